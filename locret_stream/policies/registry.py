"""Policies by name, made from knobs."""

from __future__ import annotations

import inspect

from locret_stream.config import POLICY_NAMES, is_number
from locret_stream.errors import ConfigError, UnknownPolicy
from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Policy
from locret_stream.policies.full import Full
from locret_stream.policies.h2o import H2O
from locret_stream.policies.infllm import InfLLM
from locret_stream.policies.keydiff import KeyDiff
from locret_stream.policies.kvzap import KVzap
from locret_stream.policies.locret import Locret
from locret_stream.policies.nacl import NaCl
from locret_stream.policies.random import Random
from locret_stream.policies.scissorhands import Scissorhands
from locret_stream.policies.sirllm import SirLLM
from locret_stream.policies.snapkv import SnapKV
from locret_stream.policies.streaming_llm import StreamingLLM
from locret_stream.policies.tova import TOVA
from locret_stream.policies.trimkv import TrimKV

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Full, H2O, InfLLM, KeyDiff, KVzap, Locret, NaCl, Random, Scissorhands, SirLLM,
                                       SnapKV, StreamingLLM, TOVA, TrimKV)
}
assert tuple(sorted(POLICIES)) == POLICY_NAMES, "verbs refuse other names before anything is loaded"

WITH_HEADS, WITHOUT_HEADS = Locret.name, KeyDiff.name
"""What is taken where no policy is named. Of those that need no heads KeyDiff keeps most of what is asked about later,
over the tasks and budgets of docs/benchmarks.md, and it needs nothing but keys, which every kind of model has."""

Knob = float | int | str
MOST = 2**31 - 1  # of a knob that is a count: the largest 32-bit index


def usual_policy(*, with_heads: bool) -> str:
    """The policy of a memory for which none is named."""
    return WITH_HEADS if with_heads else WITHOUT_HEADS


def make_policy(name: str, knobs: dict[str, Knob] | None = None, heads: RetainingHeads | None = None) -> Policy:
    """The policy of that name.

    Raises:
        UnknownPolicy: no such policy; names the closest one.
        ConfigError: a knob that it does not have, or of another type; no heads where it needs them, or heads of another
            policy.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise UnknownPolicy(name, POLICIES)
    kind = POLICIES[name]
    with_heads = {"heads": _fitting(kind, heads)} if "heads" in _parameters(kind) else {}
    policy = kind(**with_heads, **typed_knobs(name, knobs or {}))
    policy.knobs = all_knobs(name, knobs or {})
    return policy


def all_knobs(name: str, knobs: dict[str, Knob]) -> dict[str, Knob]:
    """All knobs of the policy of that name: those given, and defaults. Raises ConfigError as `typed_knobs`."""
    return {**_defaults(POLICIES[name]), **typed_knobs(name, knobs)}


def typed_knobs(name: str, knobs: dict[str, Knob]) -> dict[str, Knob]:
    """The knobs given for the policy of that name, each cast to the type of its default: 1 becomes 1.0 for a share.

    Raises:
        ConfigError: a knob that the policy does not have, or of another type.
    """
    defaults, typed = _defaults(POLICIES[name]), {}
    for knob, value in knobs.items():
        if knob not in defaults:
            raise ConfigError(f"policy {name!r} has no knob {knob!r}; expected {sorted(defaults) or 'none'}")
        default = defaults[knob]
        fits = isinstance(value, str) if isinstance(default, str) else (
            is_number(value) and not (isinstance(default, int) and not isinstance(value, int)))
        if not fits:
            raise ConfigError(f"policy {name!r}: {knob} is {value!r}; expected {type(default).__name__}, "
                              f"such as {default!r}")
        if isinstance(default, int) and isinstance(value, int) and knob != "seed" and value > MOST:
            raise ConfigError(f"policy {name!r}: {knob} is {value}; expected at most {MOST:,}")
        typed[knob] = type(default)(value)
    return typed


def _parameters(kind: type[Policy]) -> dict[str, inspect.Parameter]:
    return {} if kind.__init__ is object.__init__ else dict(inspect.signature(kind).parameters)


def _defaults(kind: type[Policy]) -> dict[str, Knob]:
    return {name: parameter.default for name, parameter in _parameters(kind).items() if name != "heads"}


def _fitting(kind: type[Policy], heads: RetainingHeads | None) -> RetainingHeads:
    """The heads, if the policy can score with them. Raises ConfigError."""
    if heads is None:
        raise ConfigError(f"policy {kind.name!r} needs retaining heads; expected heads=<folder>, made by "
                          f"`locret-stream train-heads`, or another policy such as {WITHOUT_HEADS!r}")
    config = heads.config
    if config.output != kind.output or kind.features not in (None, config.features):
        other = next(policy for policy in POLICIES.values() if "heads" in _parameters(policy)
                     and policy.output == config.output and policy.features in (None, config.features))
        raise ConfigError(f"policy {kind.name!r} needs heads that read {kind.features or 'anything'} and give a "
                          f"{kind.output}; found heads that read {config.features} and give a {config.output}, which "
                          f"are those of policy {other.name!r}")
    return heads
