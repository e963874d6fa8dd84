"""The header of a GGUF file: its metadata, and where each tensor lies.

Layout after ggml's specification of GGUF, versions 2 and 3, little-endian: magic, version, counts, key-value pairs,
tensor infos, padding, tensor data. Parsed here because `gguf.GGUFReader` makes an array object per string: 3.8 s for
a vocabulary of 49,152, where this takes a tenth of a second. Tensor data is never read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sapwood_server.errors import StartupError
from sapwood_server.quoting import quote

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Scalar = bool | int | float | str
Value = Scalar | list[bool] | list[int] | list[float] | list[str]
T = TypeVar("T", bool, int, float, str)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch (the file stores the fastest dimension first)."""
    type_code: int
    """`gguf.GGMLQuantizationType`'s value."""
    offset: int
    """First byte, from the start of the file."""


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor places of one file. Reading a key with the wrong type raises StartupError."""

    path: Path
    file_size: int
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]

    def get(self, key: str, kind: type[T]) -> T | None:
        """The scalar at `key`, or None if the file has no such key."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise StartupError(f"{self.path}: metadata key {quote(key)} is {quote(value)}; expected {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The scalar at `key`; StartupError if it is missing."""
        value = self.get(key, kind)
        if value is None:
            raise StartupError(f"{self.path}: metadata key {quote(key)} is missing")
        return value

    def array(self, key: str, kind: type[T]) -> list[T]:
        """The array at `key`, empty if the file has no such key."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise StartupError(f"{self.path}: metadata key {quote(key)} is not an array of {kind.__name__}")
        return [item for item in value if isinstance(item, kind)]


class _Cursor:
    """Reads values in order; running past the end is a StartupError that names the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.position = 0

    def broken(self, what: str) -> StartupError:
        return StartupError(f"{self._path}: not a whole GGUF file: {what} at byte {self.position}")

    def scalar(self, code: str) -> bool | int | float:
        return self.scalars(code, 1)[0]

    def count(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def scalars(self, code: str, count: int) -> list[bool] | list[int] | list[float]:
        end = self.position + struct.calcsize("<" + code) * count
        if end > len(self._data):
            raise self.broken(f"the file ends inside {count} values")
        values = list(struct.unpack_from(f"<{count}{code}", self._data, self.position))
        self.position = end
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position, size = self._data, self.position, len(self._data)
        unpack_length = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                end = position + 8 + unpack_length(data, position)[0]
                if end > size:
                    raise self.broken("the file ends inside a string")
                found.append(data[position + 8 : end].decode())
                position = end
        except struct.error as error:
            raise self.broken("the file ends inside a string") from error
        except UnicodeDecodeError as error:
            raise self.broken("a string that is not UTF-8") from error
        self.position = position
        return found

    def value(self, type_code: int) -> Value:
        if type_code == _STRING:
            return self.string()
        if type_code == _ARRAY:
            item_code, length = self.count("I"), self.count()
            if item_code == _STRING:
                return self.strings(length)
            return self.scalars(self._format(item_code), length)
        return self.scalar(self._format(type_code))

    def _format(self, type_code: int) -> str:
        if type_code not in _SCALARS:
            raise self.broken(f"unknown value type {type_code}")
        return _SCALARS[type_code]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parses the header. StartupError if the file can't be read, is no GGUF, has another version, or is cut short."""
    try:
        with path.open("rb") as file:
            magic = file.read(8)
            if magic[:4] != GGUF_MAGIC:
                raise StartupError(f"{path}: not a GGUF file (it starts with {quote(magic[:4])}, not b'GGUF')")
            if len(magic) < 8:
                raise StartupError(f"{path}: not a whole GGUF file: it has {len(magic)} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise StartupError(f"{path}: can't be read: {error.strerror}") from error


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(path, data)
    cursor.position = len(GGUF_MAGIC)
    version = cursor.count("I")
    if version not in GGUF_VERSIONS:
        accepted = " and ".join(map(str, GGUF_VERSIONS))
        raise StartupError(f"{path}: GGUF version {version} (accepted: {accepted}, little-endian)")
    num_tensors, num_pairs = cursor.count(), cursor.count()
    metadata = _parse_metadata(cursor, num_pairs)
    infos = [_parse_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise StartupError(f"{path}: general.alignment is {quote(alignment)}; expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(GgufTensor(info.name, info.shape, info.type_code, start + info.offset) for info in infos)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise StartupError(f"{path}: two tensors have the same name")
    return GgufHeader(path, len(data), metadata, tensors)


def _parse_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise cursor.broken(f"key {quote(key)} for the second time")
        metadata[key] = cursor.value(cursor.count("I"))
    return metadata


def _parse_tensor_info(cursor: _Cursor) -> GgufTensor:
    """Name, number of dimensions, dimensions, type, offset from the start of the tensor data."""
    name = cursor.string()
    num_dimensions = cursor.count("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.broken(f"tensor {quote(name)} with {num_dimensions} dimensions")
    shape = tuple(int(size) for size in reversed(cursor.scalars("Q", num_dimensions)))
    return GgufTensor(name, shape, type_code=cursor.count("I"), offset=cursor.count())
