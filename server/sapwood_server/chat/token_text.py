"""The text and bytes of single tokens, for logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class TokenTexts:
    """Token id to bytes and to display text."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes[id]`: what the token adds to the text; empty for a control token."""
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes

    def data(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def text(self, token_id: int) -> str:
        """The token's own text: a control token's name, else its bytes, U+FFFD where they are half a character."""
        data = self.data(token_id)
        if not data:
            return self._tokenizer.id_to_token(token_id) or ""
        return data.decode("utf-8", "replace")
