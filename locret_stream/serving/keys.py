"""API keys as they are given: `key`, or `tenant:key`, several with commas."""

from __future__ import annotations

from locret_stream.errors import ConfigError


def read_keys(given: list[str]) -> dict[str, str]:
    """Tenants by their keys. Raises ConfigError: a key that is empty or of two tenants, or keys with and without one.
    """
    keys: dict[str, str] = {}
    for entry in [part.strip() for text in given for part in text.split(",") if part.strip()]:
        tenant, separator, key = entry.rpartition(":")
        if not key or (separator and not (tenant.isidentifier() or tenant.replace("-", "_").isidentifier())):
            raise ConfigError("an API key is empty, or its tenant is no word of letters, digits, - and _; expected a "
                              "key, or tenant:key")
        if keys.setdefault(key, tenant) != tenant:
            raise ConfigError(f"one API key was given to {keys[key]!r} and to {tenant!r}; expected keys of their own")
    if len({bool(tenant) for tenant in keys.values()}) > 1:
        raise ConfigError("some API keys have a tenant and some have none, whose sessions would be everybody's; "
                          "expected tenants for all of them, or for none")
    return keys
