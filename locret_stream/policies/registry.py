"""Policies by name, and how one is made from knobs."""

from __future__ import annotations

import inspect
import math

from locret_stream.errors import ConfigError, UnknownPolicy
from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Policy
from locret_stream.policies.full import Full
from locret_stream.policies.h2o import H2O
from locret_stream.policies.keydiff import KeyDiff
from locret_stream.policies.locret import Locret
from locret_stream.policies.random import Random
from locret_stream.policies.sirllm import SirLLM
from locret_stream.policies.streaming_llm import StreamingLLM

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Full, H2O, KeyDiff, Locret, Random, SirLLM, StreamingLLM)
}


def make_policy(name: str, knobs: dict[str, float | int | str | bool] | None = None,
                heads: RetainingHeads | None = None) -> Policy:
    """The policy of that name.

    Raises:
        UnknownPolicy: with the closest known name.
        ConfigError: a knob it does not have or of another type, or Locret without heads.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise UnknownPolicy(name, POLICIES)
    kind, knobs = POLICIES[name], dict(knobs or {})
    if kind is Locret:
        if knobs:
            raise ConfigError(f"policy 'locret' has no knobs; found {sorted(knobs)}")
        if heads is None:
            raise ConfigError("policy 'locret' needs retaining heads; expected heads=<folder>, made by "
                              "`locret-stream train-heads`, or another policy such as 'keydiff'")
        return Locret(heads)
    signature = {} if kind.__init__ is object.__init__ else {
        p.name: p.default for p in inspect.signature(kind).parameters.values()}
    for knob, value in knobs.items():
        if knob not in signature:
            raise ConfigError(f"policy {name!r} has no knob {knob!r}; expected {sorted(signature) or 'none'}")
        default = signature[knob]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (isinstance(default, int) and not isinstance(value, int)):
            raise ConfigError(f"policy {name!r}: {knob} is {value!r}; expected {type(default).__name__}, "
                              f"such as {default!r}")
    policy = kind(**knobs)
    policy.knobs = {**signature, **knobs}
    return policy
