"""The configuration: its values are checked, its sizes read, its secrets kept."""

from __future__ import annotations

import pytest

from sapwood_server.config import ServerConfig, parse_bytes
from sapwood_server.errors import StartupError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 2**30),
        ("1GiB", 2**30),
        ("1.5 gib", 3 * 2**29),
        ("512 MB", 512 * 10**6),
        ("7b", 7),
        ("1e6", 10**6),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert ServerConfig(kv_memory=text).kv_memory_bytes == size


@pytest.mark.parametrize("text", ["", "lots", "0", "-1GiB", "0.1", "1 GiB 2", "1Gbit", "nan", "inf", "1e999"])
def test_what_is_no_size_is_quoted(text: str) -> None:
    with pytest.raises(StartupError, match="accepted: a positive number") as caught:
        ServerConfig(kv_memory=text)
    assert repr(text) in str(caught.value)


def test_no_text_of_a_configuration_holds_a_key() -> None:
    assert "a-secret" not in repr(ServerConfig(api_key=("a-secret",)))
    with pytest.raises(StartupError) as caught:
        ServerConfig(api_key=(" a-secret",))
    assert "a-secret" not in str(caught.value)
