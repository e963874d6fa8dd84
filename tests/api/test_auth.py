"""API keys and the tenants they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sapwood_server.api.auth import salt
from support.api_client import Api, error_of

KEYS = ("first-key", "second-key")
CLOSED = ("/v1/models", "/v1/models/scripted", "/metrics")
OPEN = ("/health", "/ready", "/version")


def bearer(key: str) -> dict[str, str]:
    """The header."""
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", CLOSED)
def test_a_key_is_needed_once_any_is_set(start: Callable[..., Api], path: str) -> None:
    api = start(keys=KEYS)
    for headers in ({}, bearer("other"), {"Authorization": "first-key"}, {"Authorization": "Basic x"}):
        response = api.client.get(path, headers=headers)
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["WWW-Authenticate"] == "Bearer"
    for key in KEYS:
        assert api.client.get(path, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_post_without_a_key_never_reaches_the_engine(start: Callable[..., Api], path: str) -> None:
    api = start(keys=KEYS)
    error_of(api.client.post(path, json={"model": "scripted", "prompt": "x"}), 401)
    error_of(api.client.post(path, content=b"{", headers=bearer("first-kez")), 401)
    assert api.engine.requests == []


@pytest.mark.parametrize("path", OPEN)
def test_some_routes_are_open_to_all(start: Callable[..., Api], path: str) -> None:
    assert start(keys=KEYS).client.get(path).status_code == 200


def test_without_keys_everybody_may(start: Callable[..., Api]) -> None:
    api = start()
    assert all(api.client.get(path).status_code == 200 for path in CLOSED)


def test_the_scheme_is_case_insensitive_and_keys_may_hold_any_character(start: Callable[..., Api]) -> None:
    api = start(keys=("clé",))
    assert api.client.get("/v1/models", headers={b"Authorization": "bearer clé".encode()}).status_code == 200
    assert api.client.get("/v1/models", headers={b"Authorization": b"Bearer cl\xff"}).status_code == 401


def salts_of(api: Api, key: str, cache_salt: str | None) -> str:
    """The salt that the engine is given."""
    body = {"model": "scripted", "prompt": "x", "cache_salt": cache_salt}
    assert api.client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
    return api.engine.requests[-1].salt


def test_each_key_has_a_salt_of_its_own_which_the_body_only_divides(start: Callable[..., Api]) -> None:
    api = start(keys=KEYS)
    cases = [(key, cache_salt) for key in KEYS for cache_salt in (None, "a", "b")]
    salts = [salts_of(api, key, cache_salt) for key, cache_salt in cases]
    assert len(set(salts)) == len(cases)
    assert [salts_of(api, key, cache_salt) for key, cache_salt in cases] == salts
    assert not any(key in text for key in KEYS for text in salts)


def test_no_body_salt_reaches_another_tenant() -> None:
    first, second = "a" * 64, "b" * 64
    assert salt(first, f"/{second}/x") != salt(second, "x")
    assert salt("", f"{second}/x") != salt(second, "x")
