"""The GGUF header parser against files that the gguf package writes, whole, cut and garbled."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, read_gguf_header
from support.scale import scaled
from support.tiny_gguf import make_tiny_gguf


def write_every_kind_of_value(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 漢字 🎉")
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float64("f64", 1e-300)
    writer.add_array("texts", ["", "a", "ключ"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("reals", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_every_kind_of_value(path)
    metadata = dict(read_gguf_header(path).metadata)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "f32": 0.5,
        "yes": True,
        "text": "naïve 漢字 🎉",
        "u64": 2**63,
        "i64": -(2**62),
        "f64": 1e-300,
        "texts": ["", "a", "ключ"],
        "numbers": [1, -2, 3],
        "reals": [0.5, 1.5],
        "flags": [True, False],
    }


def test_tensors_are_where_the_package_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, "qwen2", "Q4_1")
    header = read_gguf_header(path)
    reader = gguf.GGUFReader(path)
    assert header.file_size == path.stat().st_size
    assert [(tensor.name, tensor.shape, tensor.type_code, tensor.offset) for tensor in header.tensors] == [
        (tensor.name, tuple(reversed(tensor.shape.tolist())), int(tensor.tensor_type), tensor.data_offset)
        for tensor in reader.tensors
    ]
    assert header.array("tokenizer.ggml.tokens", str) == reader.fields["tokenizer.ggml.tokens"].contents()


def header_of(tmp_path: Path) -> GgufHeader:
    write_every_kind_of_value(tmp_path / "m.gguf")
    return read_gguf_header(tmp_path / "m.gguf")


def test_typed_reading(tmp_path: Path) -> None:
    header = header_of(tmp_path)
    assert header.require("u32", int) == 4_000_000_000
    assert header.require("i8", float) == -100.0
    assert header.get("nothing", int) is None
    assert header.array("nothing", int) == []
    assert header.array("flags", bool) == [True, False]
    reads: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: header.require("nothing", int), "metadata key 'nothing' is missing"),
        (lambda: header.get("text", int), "metadata key 'text' is 'naïve 漢字 🎉'; expected int"),
        (lambda: header.get("yes", int), "metadata key 'yes' is True; expected int"),
        (lambda: header.get("yes", float), "metadata key 'yes' is True; expected float"),
        (lambda: header.get("texts", str), "expected str"),
        (lambda: header.array("text", str), "metadata key 'text' is not an array of str"),
        (lambda: header.array("texts", int), "metadata key 'texts' is not an array of int"),
    )
    for read, message in reads:
        with pytest.raises(StartupError, match=re.escape(message)):
            read()


def test_a_file_cut_anywhere_in_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_every_kind_of_value(path)
    whole = path.read_bytes()
    start = min(tensor.offset for tensor in read_gguf_header(path).tensors)
    end = start - 32  # the last bytes before the tensors may be padding
    for size in range(0, end, max(1, end // scaled(end, 100))):
        path.write_bytes(whole[:size])
        with pytest.raises(StartupError, match=r"m\.gguf: not a"):
            read_gguf_header(path)


@given(place=st.integers(4, 900), garbage=st.binary(min_size=1, max_size=8))
@settings(max_examples=scaled(2000, 100))
def test_garbled_bytes_raise_nothing_but_a_startup_error(
    place: int, garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Absurd lengths and counts must neither crash nor be believed (no allocation follows them)."""
    path = tmp_path_factory.getbasetemp() / "garbled.gguf"
    write_every_kind_of_value(path)
    data = bytearray(path.read_bytes())
    data[place : place + len(garbage)] = garbage
    path.write_bytes(data)
    with contextlib.suppress(StartupError):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file (it starts with b''"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file (it starts with b'PK"),
        (b"GGUF", "not a whole GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "GGUF version 1 (accepted: 2 and 3, little-endian)"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "GGUF version 50331648 (accepted: 2 and 3, little-endian)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "the file ends inside a string"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"key", "the file ends inside a string"),
        (
            b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 4, 2**40),
            "the file ends inside 1099511627776 val",
        ),
        (b"GGUF" + struct.pack("<IQQQ3sI", 3, 0, 1, 3, b"key", 77), "unknown value type 77"),
        (b"GGUF" + struct.pack("<IQQQ3s", 3, 0, 1, 3, b"\xff\xfe\xfd"), "a string that is not UTF-8"),
    ],
)
def test_no_gguf(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(StartupError, match=re.escape(message)) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_can_not_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="can't be read: No such file"):
        read_gguf_header(tmp_path / "nothing.gguf")
