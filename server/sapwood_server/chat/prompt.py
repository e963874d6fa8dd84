"""From a request's messages, or its text, to the token ids of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from sapwood_server.chat.messages import Message, Tool
from sapwood_server.chat.template import ChatTemplate
from sapwood_server.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """The model's tokenizer and, where it has one, its chat template. Safe to use from several threads."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    bos_id: int | None
    """The id that every raw prompt starts with; None if the model wants none."""
    end_of_turn_id: int | None
    """The id that ends an assistant's answer; None if the model has none."""

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """The ids of the rendered conversation. Its special tokens, BOS too, are those the template writes.

        Raises BadRequestError if the model has no template or the template refuses.
        """
        if self.template is None:
            raise BadRequestError(
                "this model has no chat template, so it can't be used for chat; use /v1/completions",
                code="no_chat_template",
                param="messages",
            )
        return self._encode(self.template.render(messages, tools, options))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The ids of a raw prompt, which starts with BOS once where the model wants it."""
        ids = self._encode(text)
        return ids if self.bos_id is None or ids[:1] == (self.bos_id,) else (self.bos_id, *ids)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as an assistant's whole answer: nothing before it, the end-of-turn token after it."""
        ids = self._encode(text)
        return ids if self.end_of_turn_id is None else (*ids, self.end_of_turn_id)

    def _encode(self, text: str) -> tuple[int, ...]:
        # `encode` holds Python's lock to its end, so that no other thread runs; a batch, even of one, gives it up.
        # "fast" leaves out the offsets, which nobody reads.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoding.ids)
