"""A background is read as the engine reads it, what it leaves competes with an example's units, and tuning with one
resumes bit for bit."""

from __future__ import annotations

import msgspec
import pytest
import torch

from locret_stream import Budget, models
from locret_stream.config import StreamConfig
from locret_stream.engine import Engine
from locret_stream.errors import ConfigError, InvalidTokens
from locret_stream.heads import RetainingHeads
from locret_stream.policies import make_policy
from locret_stream.training import AllocationConfig, Example, allocate, tune, tuning
from locret_stream.training.background import Background, Reading, Rivals, context_behind
from locret_stream.training.student import Student
from locret_stream.training.validation import Recording, answer_nll
from tests.architectures import make
from tests.kit import ids_of, random_heads, saved_heads
from tests.training.test_tuning import QUICK, finder, metrics, needles, plain, same, weights
from tests.training.tiny import make_examples

pytestmark = pytest.mark.thorough

BUDGET = Budget(units=14, sinks=1, stabilizers=2, allocation=(1.0, 2.0, 0.5))


@pytest.mark.parametrize("policy, kernel", [("locret", msgspec.UNSET), ("locret", 3), ("locret", 5),
                                            ("kvzap", msgspec.UNSET)])
@pytest.mark.parametrize("trained_layers", [None, (0, 2)])
@pytest.mark.parametrize("read", [16, 64])
@torch.no_grad()
@pytest.mark.thorough(but=3)
def test_behind_a_background_the_student_with_hard_gates_is_the_engine(policy, kernel, trained_layers, read):
    """The largest layer keeps 16 tokens whole; 64 tokens fill every layer."""
    attachment = models.attach(make("llama"))
    heads = random_heads(attachment, seed=5, policy=policy)
    heads.config = msgspec.structs.replace(heads.config, trained_layers=trained_layers, kernel=kernel)
    config = StreamConfig(budget=BUDGET, chunk_size=8, policy=policy)
    ids = torch.tensor(ids_of(read + 64, seed=1, distinct=True))  # no two units tie
    before = ids[:read]
    rivals = Reading(attachment, heads, config).read(before)
    listening = Recording(make_policy(policy, heads=heads))
    engine = Engine(attachment, config, listening, 2)
    behind = engine.open(0)
    engine.accept(behind, before.tolist())
    while engine.ready(behind):
        engine.commit(behind)
    for layer, found in rivals.items():
        assert found.keys.shape[1] == behind.store.counts[layer] == min(read, engine.budgets[layer])
        if heads.config.has_head(layer):
            torch.testing.assert_close(found.scores(heads, layer), behind.store.scores(layer)[0])
    for length in (5, 57, 64):
        spans = ((3, 5),) if length == 5 else make_examples(1, length)[0].answer_spans
        example = Example(ids[read:read + length], spans)
        student = Student(attachment, heads, engine.budgets, 8, BUDGET.sinks, BUDGET.stabilizers, 128)
        alone = student.hidden(example.ids[None], 1e-6)
        student.rivals = rivals
        hidden = student.hidden(torch.stack([example.ids, example.ids]), 1e-6)
        torch.testing.assert_close(hidden[0], hidden[1])
        logprobs = attachment.logits(hidden[:1])[0].log_softmax(-1)
        found = -sum(logprobs[at - 1, example.ids[at]].item() for start, end in example.answer_spans
                     for at in range(start, end))
        assert found == pytest.approx(answer_nll(engine, listening, example, behind), rel=1e-4)
        assert (alone - hidden[:1]).abs().max() > 0.01
    assert behind.seen == read, "the context behind is copied and stays as it was"


def test_slices_are_whole_chunks_and_the_first_is_never_tuned_with():
    found = Background(torch.arange(110), 30, chunk_size=8, least=20, vocab=200)
    assert found.slices.tolist() == torch.arange(96).view(4, 24).tolist()
    assert [found.to_tune(turn)[0].item() for turn in range(4)] == [24, 48, 72, 24]
    assert found.to_measure()[0] == 0
    assert Background(list(range(110)), 1000, 8, 20, 200).slices.shape == (2, 48), "half of it at most"
    other = Background(torch.arange(110).flip(0), 30, 8, 20, 200)
    assert found.digest() != other.digest()


def test_too_little_text_and_strange_ids_are_refused():
    with pytest.raises(ConfigError, match="background of 60 tokens gives slices of 24, and the largest layer keeps 28"):
        Background(torch.arange(60), 1000, 8, 28, 200)
    with pytest.raises(InvalidTokens, match=r"token id 110; expected ids from 0 to below .* of 110"):
        Background(torch.arange(111), 30, 8, 20, 110)
    with pytest.raises(InvalidTokens, match="token id -1"):
        Background(torch.arange(-1, 100), 30, 8, 20, 110)


def test_gradients_reach_the_units_of_the_background():
    """A unit of the background whose score rises takes the place of an example's unit, and the other way round."""
    attachment = models.attach(make("llama"))
    heads = random_heads(attachment, seed=5).requires_grad_(True)
    ids = torch.tensor(ids_of(64 + 40, seed=1, distinct=True))
    student = Student(attachment, heads, (14, 28, 7), 8, 1, 2, 128)
    config, found, real = StreamConfig(budget=BUDGET, chunk_size=8, policy="locret"), [], Rivals.scores
    student.rivals = Reading(attachment, heads, config).read(ids[:64])
    for detached in (False, True):
        heads.zero_grad()
        with pytest.MonkeyPatch.context() as patch, models.differentiable(attachment):
            if detached:
                patch.setattr(Rivals, "scores", lambda self, *args: real(self, *args).detach())
            student.hidden(ids[None, 64:], 0.5).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in heads.parameters()]))
    assert found[0].isfinite().all() and (found[0] - found[1]).abs().max() > 0.01 * found[1].abs().max()


# -- dividing a budget behind one ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_budget_is_divided_behind_it(tmp_path):
    """Every measurement reads the same slice first, and gives what the engine gives behind it."""
    model, examples = make("llama"), make_examples(6, 60)
    config = AllocationConfig(units=12, chunk_size=12, sinks=1, stabilizers=1, examples=4, factors=(1 / 4, 1),
                              background_tokens=60)
    background = torch.tensor(ids_of(150, seed=3))
    folder = saved_heads(model, tmp_path / "behind")
    made = allocate(model, folder, examples, config, background=background)
    assert made.behind == 60 and allocate(model, folder, examples, config, background=background) == made
    alone = allocate(model, saved_heads(model, tmp_path / "alone"), examples, config)
    assert alone.behind == 0 and all(alone.measured[name].nll != one.nll for name, one in made.measured.items())
    with models.attached(model) as attachment, torch.no_grad():
        heads = RetainingHeads.load(folder)
        listening = Recording(make_policy("locret", heads=heads))
        budget = Budget(units=12, sinks=1, stabilizers=1, allocation="uniform")
        engine = Engine(attachment, StreamConfig(budget=budget, chunk_size=12, policy="locret"), listening, 2)
        behind = context_behind(engine, background[:60])
        found = [answer_nll(engine, listening, example, behind) for example in examples[:4]]
    assert found == pytest.approx(made.measured["even"].nll)
    for other in (None, background.flip(0)):
        with pytest.raises(ConfigError, match="another allocation, which differs in data"):
            allocate(model, folder, examples, config, background=other)
    with pytest.raises(ConfigError, match="of 90 tokens gives slices of 36, and the largest layer keeps 48"):
        allocate(model, saved_heads(model, tmp_path / "short"), examples, config, background=background[:90])


# -- tuning behind one --------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_examples_begin_behind_it_and_a_resumed_one_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "exceeds", lambda *args: True)
    model, examples = make("llama"), make_examples(24, 60)
    config = msgspec.structs.replace(QUICK, background_tokens=48, renew_every=2)
    background = torch.tensor(ids_of(200, seed=3))
    results, reads, real = [], {}, Reading.read
    for name, stops in ("straight", ()), ("stopped", (1, 3, 4)):
        folder = saved_heads(model, tmp_path / name)
        reads[name] = read = []
        monkeypatch.setattr(Reading, "read", lambda self, ids, read=read: read.append(ids.tolist()) or real(self, ids))
        for stop in stops:
            def progress(at, stop=stop):
                if at.step == stop and at.loss is not None:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                tune(model, folder, examples, config, background=background, progress=progress)
        results.append(tune(model, folder, examples, config, background=background))
    turns = [background[start:start + 48].tolist() for start in (48, 96, 144)]
    assert reads["straight"] == turns, "every other step another slice"
    assert reads["stopped"] == [turns[0], turns[0], turns[1], turns[1], turns[2]]
    straight, stopped = results
    assert stopped.resumed_from == 4 and plain(straight) == plain(stopped)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "stopped"))
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "stopped")
    alone = tune(model, saved_heads(model, tmp_path / "alone"), examples, QUICK)
    assert alone.before.nll != straight.before.nll, "held-out examples begin behind it, too"
    for other in (None, background.flip(0)):
        with pytest.raises(ConfigError, match="another tuning, which differs in data"):
            tune(model, tmp_path / "straight", examples, config, background=other)


def test_a_refused_restart_leaves_what_was_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "exceeds", lambda *args: True)
    model, examples, folder = make("llama"), make_examples(24, 60), tmp_path
    tune(model, saved_heads(model, folder), examples, QUICK)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="expected a longer text"):
        tune(model, folder, examples, QUICK, background=[1, 2, 3], restart=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_heads_that_hear_a_query_are_not_tuned_behind_one(tmp_path):
    model = make("llama")
    heads, config = saved_heads(model, tmp_path / "divided", query_tokens=4), AllocationConfig(units=12, chunk_size=12)
    with pytest.raises(ConfigError, match="background, and query-aware heads, whose question stands in front of all"):
        allocate(model, heads, make_examples(24, 60), config, background=[1] * 200)
    with pytest.raises(ConfigError, match="background, and query-aware heads, whose question stands in front of all"):
        tune(model, saved_heads(model, tmp_path, query_tokens=4), make_examples(24, 60), QUICK, background=[1] * 200)


def test_in_a_full_memory_short_examples_do(tmp_path):
    """40 tokens evict nothing from an empty memory of 60 units."""
    model, examples, background = make("llama"), make_examples(24, 40), torch.tensor(ids_of(300, seed=3))
    config = msgspec.structs.replace(QUICK, units=60, steps=1, background_tokens=96)
    with pytest.raises(ConfigError, match="0 are so long that anything is evicted at 60 units in chunks"):
        tune(model, saved_heads(model, tmp_path / "alone"), examples, config)
    made = tune(model, saved_heads(model, tmp_path / "behind"), examples, config, background=background)
    assert made.kl > 0 and len(made.before.nll) == QUICK.examples
    one_chunk = [Example(example.ids[-12:], ((10, 12),)) for example in examples]
    with pytest.raises(ConfigError, match=r"0 are so long that anything is evicted at 60 units \(full before\)"):
        tune(model, saved_heads(model, tmp_path / "tiny"), one_chunk, config, background=background)


@pytest.mark.thorough
def test_heads_learn_what_to_hold_against_a_text_that_examples_do_not_show(tmp_path):
    """Examples are noise of three ids, and the text has others, about which the examples alone teach too little."""
    model, loss = finder()
    assert loss < 0.05
    examples = [Example(torch.where(e.ids >= 20, e.ids % 3 + 20, e.ids), e.answer_spans) for e in needles(100)]
    text = torch.randint(200, 400, (1200,), generator=torch.Generator().manual_seed(1))
    config = msgspec.structs.replace(QUICK, units=8, chunk_size=8, steps=24, batch=4, lr=1e-2, weight=0.0, cold=0.02,
                                     hot=0.2, held_out=0.4, examples=40, background_tokens=160, renew_every=4)
    alone = tune(model, saved_heads(model, tmp_path / "alone"), examples, config)
    assert alone.before.loss < 0.05 and not alone.better, "there is nothing to learn within an example"
    behind = tune(model, saved_heads(model, tmp_path / "behind"), examples, config, background=text)
    assert behind.before.loss > 0.5 and behind.after.loss < 0.05 and behind.better
