"""API keys: as they are given, `key` or `tenant:key`, several with commas; and whose a request is."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

from locret_stream.errors import ConfigError
from locret_stream.serving.errors import ApiError

_TENANT = re.compile(r"[\w-]+")


def read_keys(given: list[str]) -> dict[str, str]:
    """Tenants by their keys. Raises ConfigError: a key that is empty or of two tenants, or keys with and without one.
    """
    keys: dict[str, str] = {}
    for entry in [part.strip() for text in given for part in text.split(",") if part.strip()]:
        tenant, separator, key = entry.rpartition(":")
        if not key or (separator and not _TENANT.fullmatch(tenant)):
            raise ConfigError("an API key is empty, or its tenant is no word of letters, digits, - and _; expected a "
                              "key, or tenant:key")
        if keys.setdefault(key, tenant) != tenant:
            raise ConfigError(f"one API key was given to {keys[key]!r} and to {tenant!r}; expected keys of their own")
    if len({bool(tenant) for tenant in keys.values()}) > 1:
        raise ConfigError("some API keys have a tenant and some have none, whose sessions would be everybody's; "
                          "expected tenants for all of them, or for none")
    return keys


class Keys:
    """Who may call: API keys by tenant, whose sessions no other tenant's key reaches.

    Args:
        keys: by key, its tenant; "" for all of a server with one tenant. Empty: anybody on this machine may call.
    """

    def __init__(self, keys: Mapping[str, str]):
        self._digests = [(hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str) -> str:
        """What stands ahead of the names of the caller's sessions. Raises ApiError 401. It takes the same time for all
        keys."""
        if not self._digests:
            return ""
        scheme, _, given = authorization.partition(" ")
        digest, found = hashlib.sha256(given.strip().encode()).digest(), list[str]()
        for known, tenant in self._digests:
            if hmac.compare_digest(known, digest):
                found.append(tenant)
        if scheme.lower() != "bearer" or not found:
            raise ApiError(401, "no valid API key was given; expected `Authorization: Bearer <key>`",
                           kind="authentication_error", code="invalid_api_key")
        return f"{found[0]}/" if found[0] else ""
