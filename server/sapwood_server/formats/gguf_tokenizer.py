"""A `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries: byte-level BPE and sentencepiece BPE."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader
from sapwood_server.quoting import quote

SPACE_MARK = "▁"
"""Sentencepiece's stand-in for a space in the pieces of its vocabulary (U+2581)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_CHINESE_JAPANESE_KOREAN = "[一-龥ࠀ-一가-퟿]+"
_CHINESE_JAPANESE = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a family cuts text before BPE, as its published tokenizer.json says."""

    splits: tuple[str, ...] = ()
    """Regular expressions, applied in order, each match a piece of its own."""
    byte_level_regex: bool = False
    """Also cut by GPT-2's expression (`tokenizers`' own)."""
    whole_words: bool = False
    """A piece that is a token is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Prompts start with the begin token if the file does not say."""
    unicode_nfc: bool = False


_GPT2_STYLE = PreTokenizer(byte_level_regex=True)
_DIGITS_STYLE = PreTokenizer(splits=(r"\p{N}",), byte_level_regex=True)
_LLAMA3_STYLE = PreTokenizer(splits=(_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_STYLE = PreTokenizer(splits=(_QWEN2,), unicode_nfc=True)

PRE_TOKENIZERS = {
    "default": _GPT2_STYLE,
    "gpt-2": _GPT2_STYLE,
    "olmo": _GPT2_STYLE,
    "smollm": _DIGITS_STYLE,
    "starcoder": _DIGITS_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "qwen2": _QWEN2_STYLE,
    "deepseek-r1-qwen": _QWEN2_STYLE,
    "tekken": PreTokenizer(splits=(_TEKKEN,), whole_words=True, add_bos=True),
    "deepseek-coder": PreTokenizer(splits=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_JAPANESE_KOREAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer(splits=(r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3)),
}
"""By `tokenizer.ggml.pre`. The names and their groups are llama.cpp's (`llama-vocab.cpp`)."""


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer section of a GGUF file. Index = token id."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]
    pre: PreTokenizer | None
    """None: sentencepiece."""
    unknown: str | None
    add_space_prefix: bool
    """Sentencepiece: text between special tokens gets one space in front."""


def read_vocabulary(header: GgufHeader) -> GgufVocabulary:
    """The vocabulary of a file. StartupError for a tokenizer kind or pre-tokenizer that is not known exactly."""
    kind = header.require("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise StartupError(f"{header.path}: tokenizer.ggml.model is {quote(kind)} (accepted: 'gpt2', 'llama')")
    tokens = tuple(header.array("tokenizer.ggml.tokens", str))
    if not tokens:
        raise StartupError(f"{header.path}: tokenizer.ggml.tokens is missing or empty")
    types = tuple(header.array("tokenizer.ggml.token_type", int)) or (int(TokenType.NORMAL),) * len(tokens)
    scores = tuple(header.array("tokenizer.ggml.scores", float)) or (0.0,) * len(tokens)
    for name, array in (("token_type", types), ("scores", scores)):
        if len(array) != len(tokens):
            raise StartupError(
                f"{header.path}: tokenizer.ggml.{name} has {len(array)} entries for {len(tokens)} tokens"
            )
    unknown = header.get("tokenizer.ggml.unknown_token_id", int)
    return GgufVocabulary(
        tokens=tokens,
        types=types,
        merges=_read_merges(header, frozenset(tokens)),
        scores=scores,
        pre=_pre_tokenizer(header) if kind == "gpt2" else None,
        unknown=tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None,
        add_space_prefix=header.get("tokenizer.ggml.add_space_prefix", bool) is not False,
    )


def adds_bos(header: GgufHeader) -> bool:
    """Whether a prompt starts with the begin token: as the file says, else as the family does."""
    stated = header.get("tokenizer.ggml.add_bos_token", bool)
    if stated is not None:
        return stated
    if header.require("tokenizer.ggml.model", str) == "llama":
        return True
    return _pre_tokenizer(header).add_bos


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """The tokenizer. It adds no begin or end token; control and user-defined tokens in text are recognised."""
    tokenizer = _byte_level(vocabulary, vocabulary.pre) if vocabulary.pre else _sentencepiece(vocabulary)
    for kind, special in ((TokenType.CONTROL, True), (TokenType.UNKNOWN, True), (TokenType.USER_DEFINED, False)):
        found = [token for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True) if type_ == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in found if token]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.get("tokenizer.ggml.pre", str) or "default"
    if name not in PRE_TOKENIZERS:
        raise StartupError(
            f"{header.path}: tokenizer.ggml.pre is {quote(name)} (accepted: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    return PRE_TOKENIZERS[name]


def _read_merges(header: GgufHeader, tokens: frozenset[str]) -> tuple[tuple[str, str], ...]:
    merges: list[tuple[str, str]] = []
    for line in header.array("tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise _wrong_merge(header, line, "expected two tokens and a space")
        if left not in tokens or right not in tokens or left + right not in tokens:
            raise _wrong_merge(header, line, "those are no tokens of the file")
        merges.append((left, right))
    return tuple(merges)


def _wrong_merge(header: GgufHeader, line: str, why: str) -> StartupError:
    return StartupError(f"{header.path}: tokenizer.ggml.merges has {quote(line)}; {why}")


def _byte_level(vocabulary: GgufVocabulary, pre: PreTokenizer) -> Tokenizer:
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges), ignore_merges=pre.whole_words))
    cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.byte_level_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    if pre.unicode_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    merges = list(vocabulary.merges or merges_from_scores(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=vocabulary.unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    strip: list[decoders.Decoder] = []
    if vocabulary.add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        strip.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(vocabulary: GgufVocabulary) -> Sequence[tuple[str, str]]:
    """The BPE merges that a sentencepiece vocabulary implies: every way to make a normal piece of two others, the
    piece with the best score first. (Sentencepiece itself merges the adjacent pair whose result scores best.)"""
    normal = {
        token: id_
        for id_, (token, type_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if type_ == TokenType.NORMAL
    }
    by_score = sorted(normal, key=lambda token: -vocabulary.scores[normal[token]])
    return [
        (token[:cut], token[cut:])
        for token in by_score
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
