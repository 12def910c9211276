"""A policy of a user goes where the name of one goes."""

from __future__ import annotations

import pytest
import torch

from locret_stream import Runtime
from locret_stream.errors import ConfigError
from locret_stream.policies import Chunk, Policy, make_policy
from locret_stream.policies.nacl import NaCl
from tests.context.support import tiny


class Even(Policy):
    """Keeps tokens at even positions, as long as there are any."""

    name = "even"
    needs = frozenset({"positions", "column_sums", "token_logprob"})
    stateful = True

    def score(self, chunk: Chunk) -> torch.Tensor:
        assert len(chunk.logprobs) == chunk.k.shape[1] and chunk.column_sums().shape == chunk.positions.shape
        return (chunk.positions % 2 == 0).float()


async def test_a_runtime_takes_a_policy_that_is_made():
    async with tiny(policy=Even(), units=32) as runtime, runtime.open(raw=True) as ctx:
        await ctx.feed("All work and no play makes Jack a dull boy. " * 20)
        engine, state = runtime.engine, ctx._session.state
        sinks, stabilizers = engine.layout.protection[0]
        positions = state.store.positions(0)[:, sinks:-stabilizers]
        assert positions.numel() and (positions % 2 == 0).all()
        assert engine.config.policy == runtime.identity.policy == "even"


def test_knobs_beside_a_policy_that_is_made_are_refused():
    with pytest.raises(ConfigError, match="with a Policy object"):
        Runtime("bundled", None, policy=Even(), knobs={"x": 1})


def test_settings_that_snapshots_could_not_record_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="snapshots could not record them"):
        Runtime("bundled", None, policy=NaCl(seed=3), store=tmp_path)
    Runtime("bundled", None, policy=make_policy("nacl", {"seed": 3}), store=tmp_path)
    Runtime("bundled", None, policy=Even(), store=tmp_path)
