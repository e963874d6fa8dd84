"""API keys, and the tenant that each one is."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from sapwood_server.errors import AuthenticationError

_SCHEME = "bearer "
_documented = HTTPBearer(auto_error=False, description="An API key, if the server was started with any.")
"""Tells the OpenAPI document of keys; it refuses nobody."""


class KeyRing:
    """The keys that the server accepts; with none, everybody is one tenant and needs no key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants = [hashlib.sha256(key.encode()).hexdigest() for key in keys]

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header: a hash of its key, or "" if no keys are set.

        Raises AuthenticationError for a missing or unknown key. Hashes are compared, each of them and in constant time:
        the answer's time tells nothing of any key, its length included.
        """
        if not self._tenants:
            return ""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise AuthenticationError("no API key: send the header 'Authorization: Bearer KEY'", code="invalid_api_key")
        key = authorization[len(_SCHEME) :].strip().encode("latin-1")  # the header's bytes: so it was decoded
        given = hashlib.sha256(key).hexdigest()
        matches = [tenant for tenant in self._tenants if hmac.compare_digest(tenant, given)]
        if not matches:
            raise AuthenticationError("the API key is not one that this server knows", code="invalid_api_key")
        return matches[0]


async def authenticate(request: Request, _key: Annotated[Any, Depends(_documented)]) -> str:
    """The caller's tenant; a dependency of every route that shows or uses the model."""
    keys: KeyRing = request.app.state.service.keys
    return keys.tenant(request.headers.get("authorization"))


def salt(tenant: str, cache_salt: str | None) -> str:
    """The cache salt of a request. A body's `cache_salt` divides a tenant's cache further; it can't reach another's."""
    return f"{tenant}/{cache_salt or ''}"
