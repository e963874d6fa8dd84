"""What each token id stands for: its bytes, whether it is a control token, whether it ends a reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, read_gguf_header
from sapwood_server.formats.gguf_tokenizer import SPACE_MARK, TokenType, adds_bos, read_vocabulary
from sapwood_server.formats.model_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ModelFiles,
    read_json,
    read_optional_json,
)
from sapwood_server.formats.tokenizer import load_tokenizer, token_text
from sapwood_server.quoting import quote, shorten

END_OF_TURN_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"}
)
"""Control tokens after which no model has anything to say; they end a reply whether or not the files list them."""

MAX_VOCAB_SIZE = 2**22
"""Far above any model's: a size beyond it is a broken or hostile file, and would take gigabytes here."""

_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The token ids of a model.

    The bytes of the tokens of `encode(text)`, concatenated, are the bytes of `text` as the tokenizer's normalizer
    leaves it. A sentencepiece model's normalizer puts one space in front of a text; that space is in the bytes too, for
    what a model generates continues a text and its first space is real. (A byte that no token has is left out by the
    tokenizer itself; some published vocabularies lack control characters.)
    """

    token_bytes: tuple[bytes, ...]
    """One per id in `[0, vocab_size)`. b"" for control tokens and for ids that no token has."""
    control_ids: frozenset[int]
    eos_ids: frozenset[int]
    """Ids that end a reply."""
    bos_id: int | None
    add_bos: bool
    """Whether raw text is to start with `bos_id`. Never so if there is none."""
    num_tokens: int
    """One more than the largest id that has a token: ids from here on are padding and must not be drawn."""

    @property
    def vocab_size(self) -> int:
        """The number of ids the model has logits for."""
        return len(self.token_bytes)


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """The vocabulary of the model. StartupError if the tokenizer's kind does not give exact bytes per token."""
    return _from_gguf(files.location) if files.is_gguf else _from_folder(files)


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters and the bytes they stand for (Radford et al., 2019: printable Latin-1 stands for
    itself, the other bytes for U+0100 onwards, in order)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of a byte-level token; one that is not written in the alphabet stands for its own text."""
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a sentencepiece piece: `<0x0A>` is that byte, else its text with real spaces."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # an ordinary piece that looks alike
    return token.replace(SPACE_MARK, " ").encode()


def _from_gguf(path: Path) -> Vocabulary:
    header = read_gguf_header(path)
    vocabulary = read_vocabulary(header)
    alphabet = byte_alphabet()
    control: set[int] = set()
    token_bytes: dict[int, bytes] = {}
    for id_, (token, type_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if type_ in (TokenType.CONTROL, TokenType.UNKNOWN):
            control.add(id_)
            token_bytes[id_] = b""
        elif type_ == TokenType.UNUSED:
            continue
        elif type_ == TokenType.USER_DEFINED:
            token_bytes[id_] = token.encode()
        elif vocabulary.pre is None:
            token_bytes[id_] = sentencepiece_bytes(token)
        else:
            token_bytes[id_] = byte_level_bytes(token, alphabet)
    names = {vocabulary.tokens[id_]: id_ for id_ in control}
    stated = [header.get(f"tokenizer.ggml.{key}", int) for key in _GGUF_END_KEYS]
    bos_id = header.get("tokenizer.ggml.bos_token_id", int)
    return _build(
        path,
        token_bytes=_padded(token_bytes, _gguf_vocab_size(header), len(vocabulary.tokens), path),
        control=control,
        eos=[*(id_ for id_ in stated if id_ is not None), *(names[text] for text in END_OF_TURN_TEXTS & names.keys())],
        bos_id=bos_id,
        add_bos=adds_bos(header),
        num_tokens=max(token_bytes, default=-1) + 1,
    )


def _gguf_vocab_size(header: GgufHeader) -> int:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise StartupError(f"{header.path}: no tensor 'token_embd.weight'")


def _from_folder(files: ModelFiles) -> Vocabulary:
    folder = files.location
    path = folder / TOKENIZER_FILE
    # The ids that the tokenizer gives, not those its file states: it numbers added tokens anew where there are gaps.
    tokenizer = load_tokenizer(files)
    added = tokenizer.get_added_tokens_decoder()
    texts = {id_: text for text, id_ in tokenizer.get_vocab(with_added_tokens=False).items()}
    texts |= {id_: token.content for id_, token in added.items()}
    control = {id_ for id_, token in added.items() if token.special}
    spell = _speller(read_json(path), path)
    token_bytes = {
        id_: b"" if id_ in control else text.encode() if id_ in added else spell(text) for id_, text in texts.items()
    }
    num_tokens = max(texts, default=-1) + 1
    config = read_json(folder / CONFIG_FILE)
    tokenizer_config = read_optional_json(folder / TOKENIZER_CONFIG_FILE)
    generation_config = read_optional_json(folder / GENERATION_CONFIG_FILE)
    ids = {text: id_ for id_, text in texts.items()}
    names = {texts[id_]: id_ for id_ in control}
    eos_text = token_text(tokenizer_config.get("eos_token"))
    bos_id = _bos_id(config, tokenizer_config, ids)
    return _build(
        path,
        token_bytes=_padded(token_bytes, config.get("vocab_size"), num_tokens, path),
        control=control,
        eos=[
            *_id_list(config.get("eos_token_id"), folder / CONFIG_FILE),
            *_id_list(generation_config.get("eos_token_id"), folder / GENERATION_CONFIG_FILE),
            *([ids[eos_text]] if eos_text in ids else []),
            *(names[text] for text in END_OF_TURN_TEXTS & names.keys()),
        ],
        bos_id=bos_id,
        add_bos=_folder_adds_bos(tokenizer, tokenizer_config, bos_id),
        num_tokens=num_tokens,
    )


def _speller(document: dict[str, Any], path: Path) -> Callable[[str], bytes]:
    """How this tokenizer's tokens are turned into bytes, told by its decoder."""
    decoder = document.get("decoder") or {}
    kinds = {decoder.get("type"), *(step.get("type") for step in decoder.get("decoders") or ())}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda token: byte_level_bytes(token, alphabet)
    if kinds & {"ByteFallback", "Metaspace"}:
        return sentencepiece_bytes
    found = ", ".join(sorted(str(kind) for kind in kinds if kind)) or "none"
    raise StartupError(f"{path}: decoder is {shorten(found)} (accepted: ByteLevel, ByteFallback, Metaspace)")


def _bos_id(config: dict[str, Any], tokenizer_config: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The tokenizer's word if it has one: config.json may carry its class's default."""
    if "bos_token" in tokenizer_config:
        text = token_text(tokenizer_config["bos_token"])
        return ids.get(text) if text is not None else None
    bos_id = config.get("bos_token_id")
    return bos_id if isinstance(bos_id, int) else None


def _folder_adds_bos(tokenizer: Tokenizer, tokenizer_config: dict[str, Any], bos_id: int | None) -> bool:
    """`add_bos_token` where stated, else whether the tokenizer's post-processor adds it."""
    stated = tokenizer_config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bool(tokenizer.encode("a").ids[:1] == [bos_id])


def _id_list(value: Any, path: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id_, int) for id_ in ids):
        raise StartupError(f"{path}: 'eos_token_id' is {quote(value)}; expected an id or a list of ids")
    return ids


def _padded(token_bytes: Mapping[int, bytes], vocab_size: Any, num_tokens: int, path: Path) -> tuple[bytes, ...]:
    """One entry per logit of the model, which may have more rows than the tokenizer has tokens, never fewer."""
    if not isinstance(vocab_size, int) or vocab_size < num_tokens:
        raise StartupError(f"{path}: {num_tokens} tokens, but the model's vocab_size is {quote(vocab_size)}")
    if vocab_size > MAX_VOCAB_SIZE:
        found = f"the model's vocab_size is {quote(vocab_size)}"
        raise StartupError(f"{path}: {found} (accepted: at most {MAX_VOCAB_SIZE})")
    return tuple(token_bytes.get(id_, b"") for id_ in range(vocab_size))


def _build(
    path: Path,
    *,
    token_bytes: tuple[bytes, ...],
    control: Iterable[int],
    eos: Iterable[int],
    bos_id: int | None,
    add_bos: bool,
    num_tokens: int,
) -> Vocabulary:
    eos_ids = frozenset(eos)
    for id_ in (*eos_ids, *(() if bos_id is None else (bos_id,))):
        if not 0 <= id_ < len(token_bytes):
            given = f"begin or end token id {quote(id_)}"
            raise StartupError(f"{path}: {given} is outside the vocabulary of {len(token_bytes)}")
    return Vocabulary(
        token_bytes=token_bytes,
        control_ids=frozenset(control),
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=add_bos and bos_id is not None,
        num_tokens=num_tokens,
    )
