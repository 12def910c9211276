"""Choosing a token: the processors of transformers, greedy, and noise keyed by (seed, position)."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import GenerationConfig

from locret_stream.config import Sampling
from locret_stream.errors import ConfigError
from locret_stream.sampling import processors, sample
from tests.kit import VOCAB, model


def logits_of(seed: int = 0, count: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, position: int, recent: list[int] = (), **knobs) -> int:
    sampling = Sampling(**knobs)
    return sample(logits, list(recent), position, sampling, processors(sampling))


def test_greedy_takes_the_best_and_reads_no_seed():
    for seed in range(5):
        logits = logits_of(seed)
        assert {draw(logits, p, seed=s) for p in (0, 9) for s in (0, 1)} == {int(logits.argmax())}
        assert draw(logits, 0, temperature=1.5, top_k=1) == int(logits.argmax())
        assert draw(logits, 0, temperature=2.0, min_p=1.0) == int(logits.argmax())
        assert draw(logits, 0, temperature=0.0, top_k=3, top_p=0.5) == int(logits.argmax())


def test_noise_is_keyed_by_seed_and_position():
    logits = logits_of()
    first = [draw(logits, position, temperature=2.0) for position in range(40)]
    torch.manual_seed(99)  # the global generator plays no part
    torch.rand(5)
    assert [draw(logits, position, temperature=2.0) for position in reversed(range(40))] == first[::-1]
    assert len(set(first)) > 10
    assert [draw(logits, position, temperature=2.0, seed=1) for position in range(40)] != first
    draw(logits, 2**40, temperature=1.0, seed=-(2**70))


def test_seeds_side_by_side_do_not_share_their_noise_shifted():
    """Else replies with the seeds 0, 1, 2 would be near copies of each other."""
    logits = logits_of()
    for seed in (0, 7):
        late = [draw(logits, position + 1, temperature=2.0, seed=seed) for position in range(40)]
        assert [draw(logits, position, temperature=2.0, seed=seed + 1) for position in range(40)] != late


def test_sampling_leaves_the_logits_and_the_global_generator_alone():
    logits = logits_of()
    before, state = logits.clone(), torch.random.get_rng_state()
    draw(logits, 3, [1, 2, 3], temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    assert torch.equal(logits, before) and torch.equal(torch.random.get_rng_state(), state)


KNOBS = [
    dict(temperature=1.0), dict(temperature=0.7), dict(top_k=7), dict(top_p=0.6), dict(min_p=0.1),
    dict(repetition_penalty=1.4), dict(temperature=1.7, top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("knobs", KNOBS)
def test_processors_are_those_of_generate(knobs: dict):
    """Scores equal, bit for bit, to what `generate` itself prepares for these settings."""
    stock = model()
    config = GenerationConfig(do_sample=True, **{"top_k": None, "temperature": 1.0} | knobs)
    ids = torch.tensor([[5, 9, 9, 300]])
    theirs = stock._get_logits_processor(generation_config=config, input_ids_seq_length=4, device="cpu")
    for seed in range(5):
        logits = logits_of(seed)[None]
        expected = theirs(ids, logits.clone())
        found = processors(Sampling(**{"temperature": 1.0} | knobs))(ids, logits.clone())
        assert torch.equal(found, expected)
        chosen = sample(logits[0], ids[0].tolist(), seed, Sampling(**{"temperature": 1.0} | knobs),
                        processors(Sampling(**{"temperature": 1.0} | knobs)))
        assert expected[0, chosen] > -torch.inf


def test_settings_that_change_nothing_cost_nothing():
    assert not processors(Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0))
    assert not processors(Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1))


def test_greedy_heeds_the_repetition_penalty():
    logits = torch.tensor([1.0, 3.0, 2.9, 0.0])
    assert draw(logits, 0, [1]) == 1
    assert draw(logits, 0, [1], repetition_penalty=1.5) == 2
    assert draw(logits, 0, [], repetition_penalty=1.5) == 1


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_a_factor_that_logits_do_not_stand_is_refused_and_any_other_leaves_them_numbers(name: str):
    """Divided by 1e-300 all logits above 0 are infinite, and the first of them would be chosen."""
    logits = torch.cat([logits_of(3).clamp(-1e3, 1e3) * 300, torch.tensor([0.0, -torch.inf])])
    for factor in (1e-300, 1e-40, 5e-324, 1e40, 1e300):
        with pytest.raises(ConfigError, match=rf"{name} is {re.escape(repr(factor))}; expected .* from 1e-30 to 1e"):
            Sampling(**{name: factor})
    for factor in (1e-30, 1e-8, 1e8, 1e30):
        sampling = Sampling(**{"temperature": 1.0} | {name: factor})
        scores = processors(sampling)(torch.arange(len(logits))[None], logits[None].clone())
        assert torch.isfinite(scores[0, :-1]).all() and scores[0, -1] == -torch.inf
    for position in range(20):
        assert draw(logits, position, temperature=1e-30) == int(logits.argmax())
        assert draw(logits, position, temperature=1e30) < len(logits) - 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_distribution_is_the_softmax(temperature: float):
    """4,000 positions over 6 tokens: every frequency within 4 standard deviations."""
    logits, draws = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -torch.inf]), 4_000
    counts = torch.zeros(6)
    for position in range(draws):
        counts[draw(logits, position, temperature=temperature, seed=7)] += 1
    expected = (logits / temperature).softmax(0)
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert counts[5] == 0
    assert ((counts / draws - expected).abs() <= 4 * deviation + 1e-9).all()
