"""The prompt encoder of a model, from its files."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer

from sapwood_server.chat.prompt import PromptEncoder
from sapwood_server.chat.template import ChatTemplate
from sapwood_server.formats.model_files import ModelFiles
from sapwood_server.formats.tokenizer import chat_templates, special_tokens
from sapwood_server.formats.vocabulary import Vocabulary


def load_prompt_encoder(files: ModelFiles, tokenizer: Tokenizer, vocabulary: Vocabulary) -> PromptEncoder:
    """The encoder; its template is None for a model without one. Raises StartupError for a template that is broken."""
    texts = special_tokens(files)
    sources = chat_templates(files)
    return PromptEncoder(
        tokenizer=tokenizer,
        template=ChatTemplate(sources, texts) if sources else None,
        bos_id=vocabulary.bos_id if vocabulary.add_bos else None,
        end_of_turn_id=_end_of_turn_id(tokenizer, texts, vocabulary),
    )


def _end_of_turn_id(tokenizer: Tokenizer, texts: Mapping[str, str], vocabulary: Vocabulary) -> int | None:
    """The tokenizer's end token; of a model that names none, the first id that ends a reply."""
    named = tokenizer.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    return named if named in vocabulary.eos_ids else min(vocabulary.eos_ids, default=None)
