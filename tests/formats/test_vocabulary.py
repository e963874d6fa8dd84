"""The bytes, the control tokens and the end tokens of every id."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import Metaspace

from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import ModelFiles, resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.formats.vocabulary import Vocabulary, byte_alphabet, load_vocabulary, sentencepiece_bytes
from support.scale import scaled
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import END_ID, PADDING_IDS, byte_level_tokenizer, make_tiny_model

UNSAYABLE = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
"""Bytes that SmolLM2's vocabulary has no token for. Its tokenizer leaves them out, here as in transformers."""


PLAIN_TEXT = st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=80)
"""Without special tokens: those have no bytes."""


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    return resolve_model(str(make_tiny_model(tmp_path / "m")))


@pytest.fixture(scope="module")
def demo() -> tuple[Tokenizer, Vocabulary]:
    files = resolve_model("smollm2-135m")
    return load_tokenizer(files), load_vocabulary(files)


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; a value of `...` removes the key."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def bytes_of(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.token_bytes[id_] for id_ in ids)


@given(text=PLAIN_TEXT)
@settings(max_examples=scaled(5000, 300))
def test_the_demo_models_token_bytes_make_the_text(text: str, demo: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = demo
    sayable = bytes(byte for byte in text.encode() if byte not in UNSAYABLE)
    assert bytes_of(vocabulary, tokenizer.encode(text, add_special_tokens=False).ids) == sayable


def test_the_demo_models_vocabulary(demo: tuple[Tokenizer, Vocabulary]) -> None:
    _, vocabulary = demo
    assert (vocabulary.vocab_size, vocabulary.num_tokens) == (49152, 49152)
    assert vocabulary.control_ids == frozenset(range(17))
    assert vocabulary.eos_ids == {0, 2}
    assert (vocabulary.bos_id, vocabulary.add_bos) == (1, False)
    assert {vocabulary.token_bytes[id_] for id_ in vocabulary.control_ids} == {b""}
    assert {byte for byte in range(256) if bytes([byte]) not in set(vocabulary.token_bytes)} == UNSAYABLE


def test_the_byte_alphabet_is_gpt2s() -> None:
    """Against tokenizers' own: its byte-level pre-tokenizer spells every character of Latin-1 and beyond."""
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, [*range(0x180), 0x7FF, 0xFFFD, 0x10FFFF]))
    [(spelled, _)] = pre_tokenizer.pre_tokenize_str(text)
    assert bytes(alphabet[character] for character in spelled) == text.encode()


@pytest.mark.parametrize("is_gguf", [False, True])
def test_padding_and_control_ids_of_a_tiny_model(is_gguf: bool, tmp_path: Path) -> None:
    path = tmp_path / ("m.gguf" if is_gguf else "m")
    if is_gguf:
        make_tiny_gguf(path)
    else:
        make_tiny_model(path)
    vocabulary = load_vocabulary(resolve_model(str(path)))
    assert (vocabulary.vocab_size, vocabulary.num_tokens) == (320, 320 - PADDING_IDS)
    assert vocabulary.token_bytes[320 - PADDING_IDS :] == (b"",) * PADDING_IDS
    assert vocabulary.control_ids == {0, 1, 2}
    assert vocabulary.eos_ids == {0, END_ID}
    assert (vocabulary.bos_id, vocabulary.add_bos) == (None, False)
    tokenizer = byte_level_tokenizer(320 - PADDING_IDS)
    for id_ in range(3, 320 - PADDING_IDS):
        assert vocabulary.token_bytes[id_].decode(errors="replace") == tokenizer.decode([id_])


def test_added_tokens_that_are_not_special_keep_their_text(folder: ModelFiles) -> None:
    """Qwen's `<think>` and `<tool_call>` are such: a client must see them."""
    path = folder.location / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("<think é>", special=False, normalized=False)])
    tokenizer.save(str(path))
    vocabulary = load_vocabulary(folder)
    assert vocabulary.token_bytes[312] == "<think é>".encode()
    assert 312 not in vocabulary.control_ids
    assert vocabulary.num_tokens == 313


def test_an_added_tokens_id_is_the_one_that_the_tokenizer_gives(folder: ModelFiles) -> None:
    """The library numbers it anew if the file leaves a gap before it."""
    path = folder.location / "tokenizer.json"
    stated = {"content": "<think>", "special": False, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    document = json.loads(path.read_text())
    edit_json(path, added_tokens=[*document["added_tokens"], {"id": 4 * 10**9, **stated, **flags}])
    vocabulary = load_vocabulary(folder)
    (id_,) = load_tokenizer(folder).encode("<think>", add_special_tokens=False).ids
    assert (id_, vocabulary.num_tokens) == (312, 313)
    assert vocabulary.token_bytes[id_] == b"<think>"


def test_a_tokens_id_far_beyond_the_model_is_refused(folder: ModelFiles) -> None:
    path = folder.location / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    edit_json(path, model=model | {"vocab": model["vocab"] | {"far": 4 * 10**9}})
    with pytest.raises(StartupError, match="4000000001 tokens, but the model's vocab_size is 320"):
        load_vocabulary(folder)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7]}, {"eos_token": "<|im_start|>"}, {5, 6, 7, 1, 0, 2}),
        ({"eos_token_id": [5]}, {"eos_token_id": None}, {"eos_token": None}, {5, 0, 2}),
        ({"eos_token_id": ...}, {"eos_token_id": ...}, {"eos_token": "nothing"}, {0, 2}),
    ],
)
def test_end_tokens_are_gathered_from_every_file(
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: dict[str, Any],
    expected: set[int],
    folder: ModelFiles,
) -> None:
    """The well-known end-of-turn tokens 0 and 2 are control tokens here, so they end a reply in any case."""
    edit_json(folder.location / "config.json", **config)
    edit_json(folder.location / "generation_config.json", **generation)
    edit_json(folder.location / "tokenizer_config.json", **tokenizer)
    assert load_vocabulary(folder).eos_ids == expected


def test_a_folder_with_a_config_and_a_tokenizer_only(folder: ModelFiles) -> None:
    (folder.location / "generation_config.json").unlink()
    (folder.location / "tokenizer_config.json").unlink()
    edit_json(folder.location / "config.json", bos_token_id=1)
    vocabulary = load_vocabulary(folder)
    assert vocabulary.eos_ids == {0, 2}
    assert (vocabulary.bos_id, vocabulary.add_bos) == (1, False)


@pytest.mark.parametrize(
    ("post_processor", "stated", "expected"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_whether_raw_text_starts_with_the_begin_token(
    post_processor: bool, stated: bool | None, expected: bool, folder: ModelFiles
) -> None:
    path = folder.location / "tokenizer.json"
    if post_processor:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        tokenizer.save(str(path))
    more = {} if stated is None else {"add_bos_token": stated}
    edit_json(folder.location / "tokenizer_config.json", bos_token="<|im_start|>", **more)
    vocabulary = load_vocabulary(folder)
    assert (vocabulary.bos_id, vocabulary.add_bos) == (1, expected)


def test_no_begin_token_is_added_where_there_is_none(folder: ModelFiles) -> None:
    """The tokenizer's word counts: config.json may carry its class's default."""
    edit_json(folder.location / "config.json", bos_token_id=1)
    edit_json(folder.location / "tokenizer_config.json", bos_token=None, add_bos_token=True)
    vocabulary = load_vocabulary(folder)
    assert (vocabulary.bos_id, vocabulary.add_bos) == (None, False)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"vocab_size": 300}, "tokenizer.json: 312 tokens, but the model's vocab_size is 300"),
        ("config.json", {"vocab_size": ...}, "tokenizer.json: 312 tokens, but the model's vocab_size is None"),
        ("config.json", {"eos_token_id": 320}, "begin or end token id 320 is outside the vocabulary of 320"),
        ("config.json", {"eos_token_id": "x"}, "config.json: 'eos_token_id' is 'x'; expected an id or a list of ids"),
        (
            "tokenizer.json",
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "decoder is WordPiece (accepted: ByteLevel, ByteF",
        ),
        ("tokenizer.json", {"decoder": None}, "decoder is none (accepted"),
        ("tokenizer.json", {"model": {}}, "tokenizer.json: not a tokenizer: "),
        ("tokenizer.json", {"added_tokens": [{"id": "x"}]}, "tokenizer.json: not a tokenizer: "),
        ("config.json", {"vocab_size": 2**40}, "the model's vocab_size is 1099511627776 (accepted: at most 4194304)"),
    ],
)
def test_files_that_do_not_fit(name: str, changes: dict[str, Any], message: str, folder: ModelFiles) -> None:
    edit_json(folder.location / name, **changes)
    with pytest.raises(StartupError, match=re.escape(message)):
        load_vocabulary(folder)


def test_sentencepiece_bytes() -> None:
    for token, expected in (
        ("▁the", b" the"),
        ("▁▁", b"  "),
        ("<0x0A>", b"\n"),
        ("<0xff>", b"\xff"),
        ("<0xZZ>", b"<0xZZ>"),
        ("<0x1>", b"<0x1>"),
        ("é", b"\xc3\xa9"),
    ):
        assert sentencepiece_bytes(token) == expected


def sentencepiece_like(kind: str) -> Tokenizer:
    """Llama 2's layout (normalizer and byte fallback), or the newer one with a metaspace pre-tokenizer."""
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlotw",
        "he",
        "▁t",
        "▁the",
    ]
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    ids = {text: id_ for id_, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), Metaspace(prepend_scheme="first", split=False)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


@pytest.fixture(scope="module", params=["normalizer", "metaspace"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    path = make_tiny_model(tmp_path_factory.mktemp("sentencepiece"))
    sentencepiece_like(request.param).save(str(path / "tokenizer.json"))
    edit_json(path / "tokenizer_config.json", bos_token="<s>", eos_token="</s>", add_bos_token=True)
    return resolve_model(str(path))


def test_a_sentencepiece_folder(sentencepiece: ModelFiles) -> None:
    vocabulary = load_vocabulary(sentencepiece)
    assert vocabulary.control_ids == {0, 1, 2}
    assert vocabulary.eos_ids == {2}
    assert (vocabulary.bos_id, vocabulary.add_bos) == (1, True)
    assert vocabulary.token_bytes[3:259] == tuple(bytes([byte]) for byte in range(256))


@given(text=PLAIN_TEXT | st.text(alphabet="the low ▁é\n", max_size=40))
@settings(max_examples=scaled(2000, 150))
def test_sentencepiece_token_bytes_make_the_text_after_one_space(text: str, sentencepiece: ModelFiles) -> None:
    """The space is the normalizer's; U+2581 in a text is a space to sentencepiece."""
    tokenizer, vocabulary = load_tokenizer(sentencepiece), load_vocabulary(sentencepiece)
    found = bytes_of(vocabulary, tokenizer.encode(text, add_special_tokens=False).ids)
    meant = text.replace("▁", " ")
    prefix = "" if not text or (meant.startswith(" ") and found == meant.encode()) else " "
    assert found == (prefix + meant).encode()
