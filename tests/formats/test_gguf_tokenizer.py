"""Tokenizers from GGUF vocabularies, against transformers' and against sentencepiece's algorithm written out."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, read_gguf_header
from sapwood_server.formats.gguf_tokenizer import (
    PRE_TOKENIZERS,
    adds_bos,
    build_tokenizer,
    merges_from_scores,
    read_vocabulary,
)
from sapwood_server.formats.model_files import ModelFiles, resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.formats.vocabulary import load_vocabulary
from support.scale import scaled
from support.tiny_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    add_byte_level_vocabulary,
    make_tiny_gguf,
)
from support.tiny_models import byte_level_tokenizer

TEXTS = (
    "Hello, world! How's it going? I'll say: we've DON'T.",
    "  two  spaces   three\t\ttabs \n\n\n  lines \r\n mixed \n ",
    "0 1 12 123 1234567890 3.14159 1,000,000 v2.0.1 ½ ² ٣٤٥ 一二三 Ⅳ",
    " 1  2   3\n4\t5 x6y7z8 a 12  b",
    "def f(x):\n    if x >= 10:\n        return x**2 - 1  # comment\n\treturn {'a': [1, 2]}\n",
    "naïve café Straße ŁÓDŹ ёлка עברית العربية हिन्दी ไทย 漢字 かな 한국어 ﬁ Ω≈ç√",
    "🎉👩‍👩‍👧‍👦🇺🇳 e\u0301 \u200b\ufeff\u00a0\u2028 \x00\x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <|im_end|> <|im_end |> <repo_name><|im_start|",
    "",
    " ",
    "\n",
)
ALPHABET = "aAbB zZ019.,'\"\n\t\r -_<|>/émü漢字🎉ÿ\u00a0\u0301½"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' tokenizer of the same file, with the pre-tokenizer that SmolLM2's own tokenizer.json has.

    transformers (5.24) does not know the file's `smollm` and cuts text as GPT-2 does: digits are not split off before
    the rest, which shows where more than one space, or a space and a non-ASCII numeral, meet.
    """
    from transformers import AutoTokenizer

    file = resolve_model("smollm2-135m").location
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def random_texts(count: int) -> list[str]:
    random_ = random.Random(3)
    return ["".join(random_.choices(ALPHABET, k=random_.randint(1, 60))) for _ in range(count)]


def test_the_demo_models_tokenizer_is_transformers(demo: Tokenizer, oracle: Any) -> None:
    for text in (*TEXTS, *random_texts(scaled(20_000, 1000))):
        ids = demo.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert demo.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_recognised_and_none_is_added(demo: Tokenizer) -> None:
    assert demo.encode("<|im_start|>", add_special_tokens=True).ids == [1]
    assert demo.encode("a<|im_end|>", add_special_tokens=False).ids[-1] == 2


def vocabulary_file(
    path: Path,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float] = (),
    merges: Sequence[str] = (),
    **more: Any,
) -> ModelFiles:
    """A GGUF of just a vocabulary and an embedding of one column."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if scores:
        writer.add_token_scores(list(scores))
    if merges:
        writer.add_token_merges(list(merges))
    for key, value in more.items():
        kind = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind[type(value)])
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(name="v", location=path, is_gguf=True)


PIECES_TEXT = (
    "▁ a b c d e h l o r t w é s < / > he ll lo ▁w or ld hell hello ▁wor ▁world ▁he ▁hello th the ▁the "
    "ab abc bc cd er ▁▁ ▁▁▁ ▁a ea </ s> éé"
)
PIECES = PIECES_TEXT.split(" ")


def sentencepiece_file(path: Path, **more: Any) -> ModelFiles:
    """Unknown, begin, end, a user-defined token, all bytes, then pieces whose scores fall in a scrambled order."""
    order = random.Random(1).sample(range(len(PIECES)), len(PIECES))
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *([BYTE] * 256), *([NORMAL] * len(PIECES))]
    scores = [*([0.0] * 260), *(-float(rank) for rank in order)]
    more |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return vocabulary_file(path, "llama", tokens, types, scores, **more)


def plain_sentencepiece(text: str, files: ModelFiles, add_space_prefix: bool) -> list[str]:
    """Sentencepiece's BPE: while some adjacent pair makes a piece, merge the pair whose piece scores best, the leftmost
    of equals; characters that are no piece become their bytes. `text` holds no special tokens."""
    vocabulary = read_vocabulary(read_gguf_header(files.location))
    rows = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    score = {token: value for token, kind, value in rows if kind == NORMAL}
    symbols = list((" " if add_space_prefix and text else "") + text)
    symbols = ["▁" if symbol == " " else symbol for symbol in symbols]
    while True:
        found = enumerate(left + right for left, right in itertools.pairwise(symbols))
        pairs = [(score[piece], -at) for at, piece in found if piece in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        piece
        for symbol in symbols
        for piece in ([symbol] if symbol in score else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


@given(text=st.text(alphabet="abcdehlortw é\n漢<s/>", max_size=30))
@settings(max_examples=scaled(2000, 150))
def test_sentencepiece_merges_as_sentencepiece_does(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if "<s>" in text or "</s>" in text:
        return
    path = tmp_path_factory.getbasetemp() / "pieces.gguf"
    for prefix in (True, False):
        files = sentencepiece_file(path, add_space_prefix=prefix)
        tokenizer = load_tokenizer(files)
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert encoding.tokens == plain_sentencepiece(text, files, prefix)
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        token_bytes = load_vocabulary(files).token_bytes
        expected = (" " + text if prefix and text else text).encode()
        assert b"".join(token_bytes[id_] for id_ in encoding.ids) == expected


def test_control_tokens_never_come_out_of_merges(tmp_path: Path) -> None:
    """`</` and `s>` are pieces, and `</s>` is made of them: only a whole `</s>` in the text is the control token."""
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=False))
    assert tokenizer.encode("a</s>b", add_special_tokens=False).tokens == ["a", "</s>", "b"]
    vocabulary = read_vocabulary(read_gguf_header(tmp_path / "m.gguf"))
    assert ("</", "s>") not in set(merges_from_scores(vocabulary))


def test_every_stretch_between_special_tokens_gets_the_space(tmp_path: Path) -> None:
    """As llama.cpp and the published tokenizers of Llama 2 and Mistral do."""
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "m.gguf"))
    assert tokenizer.encode("<s>the</s>the<tool>a", add_special_tokens=False).tokens == [
        *("<s>", "▁the", "</s>", "▁the", "<tool>", "▁a")
    ]


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("gpt-2", "x 12345  IT'S don't\n\n end", ["x", " 12345", " ", " IT", "'", "S", " don", "'t", "\n\n", " end"]),
        ("default", "a1", ["a", "1"]),
        ("smollm", "x 12  3", ["x", " ", "1", "2", "  ", "3"]),
        ("llama-bpe", "x 12345  IT'S\n\n end!?\n", ["x", " ", "123", "45", " ", " IT", "'S", "\n\n", " end", "!?\n"]),
        ("qwen2", "x 123  IT'S\n\n end", ["x", " ", "1", "2", "3", " ", " IT", "'S", "\n\n", " end"]),
        ("tekken", "helloWorld HTTPServer 12/\n", ["hello", "World", " HTTPServer", " ", "1", "2", "/\n"]),
        ("deepseek-coder", "x 12\n一二!", ["x", " ", "1", "2", "\n", "一二", "!"]),
        ("deepseek-v3", "x 1234 一二ab(foo)", ["x", " ", "123", "4", " ", "一二", "ab", "(foo", ")"]),
    ],
)
def test_pre_tokenizers_cut_as_their_families_do(pre: str, text: str, cuts: list[str], tmp_path: Path) -> None:
    """Merges that join anything would hide the cuts, so the vocabulary has bytes only."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_byte_level_vocabulary(writer, 320, pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = build_tokenizer(read_vocabulary(read_gguf_header(tmp_path / "m.gguf")))
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == cuts


def test_an_unknown_pre_tokenizer_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    files = vocabulary_file(tmp_path / "m.gguf", "gpt2", ["a"], [NORMAL], pre="chameleon")
    with pytest.raises(
        StartupError, match=re.escape("tokenizer.ggml.pre is 'chameleon' (accepted: deepseek-coder")
    ) as caught:
        load_tokenizer(files)
    assert all(name in str(caught.value) for name in PRE_TOKENIZERS)


def test_whole_words_are_taken_before_merges(tmp_path: Path) -> None:
    """Llama 3's vocabulary has tokens that its merges do not reach."""
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])):
        files = vocabulary_file(tmp_path / "m.gguf", "gpt2", ["a", "b", "c", "abc"], [NORMAL] * 4, pre=pre)
        assert load_tokenizer(files).encode("abc", add_special_tokens=False).tokens == expected


def test_qwen_normalises_to_nfc(tmp_path: Path) -> None:
    tokens = ["e", "Ì", "ģ", "Ã", "©"]
    for pre, expected in (("qwen2", ["Ã", "©"]), ("gpt-2", ["e", "Ì", "ģ"])):
        files = vocabulary_file(tmp_path / "m.gguf", "gpt2", tokens, [NORMAL] * 5, pre=pre)
        assert load_tokenizer(files).encode("e\u0301", add_special_tokens=False).tokens == expected


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        ("llama", {}, True),
        ("llama", {"add_bos_token": False}, False),
        ("gpt2", {"pre": "llama-bpe"}, True),
        ("gpt2", {"pre": "qwen2"}, False),
        ("gpt2", {"pre": "qwen2", "add_bos_token": True}, True),
        ("gpt2", {}, False),
    ],
)
def test_whether_a_begin_token_is_added(model: str, more: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    files = vocabulary_file(tmp_path / "m.gguf", model, ["a"], [NORMAL], **more)
    assert adds_bos(read_gguf_header(files.location)) is expected


@pytest.mark.parametrize(
    ("model", "tokens", "types", "more", "message"),
    [
        ("rwkv", ["a"], [NORMAL], {}, "tokenizer.ggml.model is 'rwkv' (accepted: 'gpt2', 'llama')"),
        ("gpt2", ["a", "b"], [NORMAL], {}, "tokenizer.ggml.token_type has 1 entries for 2 tokens"),
        ("llama", ["a", "b"], [NORMAL] * 2, {"scores": [1.0]}, "tokenizer.ggml.scores has 1 entries for 2 tokens"),
        (
            "gpt2",
            ["a", "b"],
            [NORMAL] * 2,
            {"merges": ["a b c"]},
            "merges has 'a b c'; expected two tokens",
        ),
    ],
)
def test_broken_vocabularies(
    model: str, tokens: list[str], types: list[int], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files = vocabulary_file(tmp_path / "m.gguf", model, tokens, types, **more)
    with pytest.raises(StartupError, match=re.escape(message)):
        load_tokenizer(files)


@pytest.mark.parametrize("merge", ["a b", "b ab", "x ab"])
def test_merges_of_tokens_that_are_not_there(merge: str, tmp_path: Path) -> None:
    files = vocabulary_file(tmp_path / "m.gguf", "gpt2", ["a", "ab", "bab"], [NORMAL] * 3, merges=[merge])
    with pytest.raises(StartupError, match=rf"tokenizer\.ggml\.merges has '{merge}'; those are no tokens of the file"):
        load_tokenizer(files)


def test_the_tiny_models_gguf_tokenizer_is_its_folders(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf")
    folder, file = byte_level_tokenizer(312), load_tokenizer(resolve_model(str(tmp_path / "m.gguf")))
    for text in (*TEXTS, *random_texts(200)):
        assert folder.encode(text).ids == file.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("unknown", [-1, 10**6])
def test_an_unknown_token_that_is_none(unknown: int, tmp_path: Path) -> None:
    """An index from the end, in Python, is none of a token."""
    header = GgufHeader(
        tmp_path / "m.gguf",
        0,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.unknown_token_id": unknown,
        },
        (),
    )
    assert read_vocabulary(header).unknown is None
