"""How much one server takes: numbers, which nothing here enforces."""

from __future__ import annotations

import math

import msgspec

from locret_stream.errors import ConfigError


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one server takes.

    Args:
        max_waiting: requests that may wait for a slot; more are refused at once.
        max_tokens: the most tokens of an answer. usual_tokens: of one whose request says nothing.
        timeout_s: the most seconds of a turn, waiting included, if the request does not say less.
        unnamed_days: how long responses that named no session can be gone on from, counted from the last one.
        upload_idle_s: the most seconds in which `upload_least_bytes` of an upload must come while they are waited for.
        upload_resume_s: how long an upload that broke off waits for its sender; its session waits as long.
    """

    max_waiting: int = 64
    max_tokens: int = 4096
    usual_tokens: int = 512
    timeout_s: float = 600.0
    unnamed_days: float = 30.0
    upload_idle_s: float = 60.0
    upload_least_bytes: int = 1024
    upload_resume_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in (("max_waiting", 0), ("max_tokens", 1), ("usual_tokens", 1),
                            ("upload_least_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {least}")
        for name in ("timeout_s", "unnamed_days", "upload_idle_s", "upload_resume_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number above 0")
        for name in ("upload_idle_s", "upload_resume_s"):  # a sender that died would have its session for ever
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a finite number of seconds")
