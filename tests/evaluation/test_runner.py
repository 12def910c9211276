"""Cells on a random model: what is measured, what is kept, what is not run again."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
import torch

from locret_stream.errors import ConfigError, InputError, LocretError
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import plan, runner, suite
from locret_stream.evaluation.cells import Cell, CellResult, Origin
from locret_stream.evaluation.runner import Bench
from locret_stream.policies.infllm import InfLLM
from locret_stream.runtime import Runtime
from tests.context.support import model, tokenizer
from tests.tiny_tokenizers import CHATML

pytestmark = pytest.mark.thorough


def prose(seed: int):
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choice(("once", "upon", "a", "time")) for _ in range(rng.randint(1, 9)))


PROSE = suite.Text("prose", prose)


def bench() -> Bench:
    return Bench(model(), tokenizer(), PROSE)


def cell(**more) -> Cell:
    return Cell(**{"task": "recall", "policy": "streaming_llm", "length": 700, "units": 64, "chunk_size": 32,
                   "stabilizers": 8, "streams": 2} | more)


def test_a_cell_is_run_once_and_read_afterwards(tmp_path: Path, monkeypatch):
    cells, seen = [cell(), cell(units=48)], []
    results = bench().run(cells, tmp_path, progress=lambda result, there: seen.append(there))
    assert seen == [False, False] and len(list(tmp_path.iterdir())) == 2
    first = results[0]
    assert first.cell == cells[0] and first.questions == 32 and first.budgets == (64, 64)
    assert 0 <= first.low <= first.score <= first.high <= 1 and first.tok_per_s > 0 and first.peak_bytes > 0
    assert all(500 < one.tokens and len(one.answers) == 16 for one in first.streams)
    assert results[1].peak_bytes < first.peak_bytes
    monkeypatch.setattr(Bench, "measure", None)
    again = bench().run(cells, tmp_path, progress=lambda result, there: seen.append(there))
    assert msgspec.json.encode(again) == msgspec.json.encode(results) and seen[2:] == [True, True]
    assert files.read_all(tmp_path) == sorted(results, key=lambda one: files.file_name(one.cell, one.origin))


def test_an_interrupted_run_keeps_what_is_done(tmp_path: Path):
    def stop(result: CellResult, there: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench().run([cell(), cell(units=48)], tmp_path, progress=stop)
    assert len(list(tmp_path.iterdir())) == 1
    seen = []
    bench().run([cell(), cell(units=48)], tmp_path, progress=lambda result, there: seen.append(there))
    assert seen == [True, False]


def test_a_damaged_result_is_named_and_not_believed(tmp_path: Path):
    path = tmp_path / files.file_name(cell(), bench().origin_of(cell()))
    path.write_text("{}")
    with pytest.raises(InputError, match=rf"{path.name} is no result .* remove it"):
        bench().run([cell()], tmp_path)


def test_a_result_with_damaged_knobs_or_too_much_nesting_is_named(tmp_path: Path):
    [result] = bench().run([cell()], tmp_path)
    [path] = files.paths(tmp_path)
    damaged = msgspec.structs.replace(result, origin=msgspec.structs.replace(result.origin, knobs="zz"))
    for data, why in ((msgspec.json.encode(damaged), "malformed"), (b'{"else": ' + b"[" * 100_000, "recursion")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"{path.name} is no result .*{why}.* remove it"):
            files.read_all(tmp_path)


@pytest.mark.thorough
def test_a_result_that_is_not_its_cells_is_not_believed(tmp_path: Path):
    one, other = bench().run([cell(), cell(units=48)], tmp_path)
    path = tmp_path / files.file_name(one.cell, one.origin)
    wrong = {
        f"belongs in {files.file_name(other.cell, other.origin)}": other,
        "2 streams from 0 on, and it has 0: \\[\\]": msgspec.structs.replace(one, streams=[]),
        "2 streams from 0 on, and it has 1: \\[0\\]": msgspec.structs.replace(one, streams=one.streams[:1]),
        "its score is 0.99 of": msgspec.structs.replace(one, score=0.99),
        "of 1 questions, and its streams have": msgspec.structs.replace(one, questions=1),
    }
    for why, result in wrong.items():
        files.write(result, path)
        for read in (lambda: files.read_all(tmp_path), lambda: bench().run([cell()], tmp_path)):
            with pytest.raises(InputError, match=rf"{path.name} is no result .*{why}.* remove it"):
                read()
    files.write(one, path)
    assert one in files.read_all(tmp_path) and bench().run([cell()], tmp_path) == [one]


def test_shares_in_whole_numbers_are_those_in_floats(tmp_path: Path):
    [result] = bench().run([cell(allocation=(1, 3))], tmp_path)
    assert result.budgets == (32, 96) and bench().run([cell(allocation=(1.0, 3.0))], tmp_path) == [result]
    assert files.read_all(tmp_path) == [result] and bench().run([cell(allocation=(1, 3))], tmp_path) == [result]


def test_many_may_write_one_result_at_once(tmp_path: Path):
    [result] = bench().run([cell()], tmp_path)
    [path] = files.paths(tmp_path)

    def write(_: int) -> bool:
        files.write(result, path)
        return files.read(path) == result

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(60)))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_cells_and_origins_that_differ_have_files_that_differ():
    origin = Origin(weights="w", tokenizer="t", heads="", text="x", tasks=1)
    cells = [cell(), cell(units=None), cell(policy="h2o"), cell(knobs={"recent": 0.1}), cell(streams=3),
             cell(allocation="pyramid"), cell(allocation=(1.0, 2.0))]
    origins = [origin, *(msgspec.structs.replace(origin, **{name: 2 if name == "tasks" else "other"})
                         for name in Origin.__struct_fields__)]
    assert len({files.file_name(one, where) for one in cells for where in origins}) == len(cells) * len(origins)
    one, other = (cell(knobs=knobs) for knobs in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert files.file_name(one, origin) == files.file_name(other, origin)
    assert files.file_name(cell(heads="here"), origin) == files.file_name(cell(heads="there"), origin), "by content"


def test_another_model_has_another_origin():
    other = copy.deepcopy(model())
    with torch.no_grad():
        next(iter(other.parameters())).add_(1e-3)
    assert Bench(other, tokenizer(), PROSE).origin("") != bench().origin("")
    assert Bench(model(), tokenizer(), suite.STDLIB).origin("") != bench().origin("") == bench().origin("")


def test_a_result_is_as_good_on_the_next_day_though_the_template_writes_the_date(monkeypatch):
    talking, found = copy.deepcopy(tokenizer()), []
    talking.chat_template = "{{ strftime_now('%d %B %Y') }}" + CHATML
    for day in (28, 29):
        class Clock:
            now = staticmethod(lambda day=day: datetime(2026, 11, day))

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        monkeypatch.setattr("locret_stream.text.dated.datetime", Clock)
        found.append(Bench(model(), talking, PROSE).base)
    assert found[0] == found[1]
    talking.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert Bench(model(), talking, PROSE).base != found[0]
    talking.chat_template = "{#- what it writes is the same -#}" + CHATML
    plain = copy.deepcopy(talking)
    plain.chat_template = CHATML
    assert Bench(model(), talking, PROSE).base == Bench(model(), plain, PROSE).base


def test_what_weights_and_tokens_do_not_tell_is_of_the_origin_too(monkeypatch):
    """RoPE, chat template and the defaults of a policy: changed, all is run again."""
    own = bench().origin_of(cell(policy="infllm"))
    other = copy.deepcopy(model())
    other.config.rope_parameters["rope_theta"] *= 2
    assert Bench(other, tokenizer(), PROSE).base == msgspec.structs.replace(
        bench().base, architecture=Bench(other, tokenizer(), PROSE).base.architecture) != bench().base
    talking = copy.deepcopy(tokenizer())
    talking.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
                             "{% if add_generation_prompt %}[assistant]{% endif %}")
    assert Bench(model(), talking, PROSE).base.template != bench().base.template
    assert own != bench().origin_of(cell(policy="infllm", knobs={"block": 16}))
    assert own == bench().origin_of(cell(policy="infllm", knobs={"block": 128})), "as the default is"
    monkeypatch.setattr(InfLLM.__init__, "__defaults__", (64, 0.1))
    assert own != bench().origin_of(cell(policy="infllm"))


@pytest.mark.thorough
def test_answers_do_not_depend_on_which_cells_ran_before(tmp_path: Path):
    def answers(folder: Path, cells: list[Cell]) -> list:
        return [one.answers for one in bench().run(cells, folder)[-1].streams]

    assert answers(tmp_path / "a", [cell(policy="h2o")]) == answers(tmp_path / "b", [cell(), cell(policy="h2o")])


@pytest.mark.parametrize("policy", ["oracle", "oracle_per_head"])
@pytest.mark.parametrize("task", ["passkey", "last_write"])
@pytest.mark.thorough(but=2)
def test_the_oracles_keep_what_answers_follow_from(policy: str, task: str, tmp_path: Path, monkeypatch):
    kept: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    real = runner.ask_all

    async def look(ctx, questions):
        state = ctx._session.state
        kept.append((ctx._session.services.engine.policy.wanted,
                     [state.store.positions(layer).clone() for layer in range(len(state.store.counts))]))
        return await real(ctx, questions)

    monkeypatch.setattr(runner, "ask_all", look)
    bench().run([cell(task=task, policy=policy, units=220, length=1500)], tmp_path)
    for wanted, layers in kept:
        committed = wanted[wanted < max(int(positions.max()) for positions in layers)]
        assert len(committed)
        for positions in layers:
            for head in positions:
                assert torch.isin(committed, head).all()


def test_the_oracle_by_head_keeps_in_each_what_is_worth_most_there(tmp_path: Path, monkeypatch):
    """With less room than all that is wanted takes; what is protected aside."""
    kept: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
    real = runner.ask_all

    async def look(ctx, questions):
        store, policy = ctx._session.state.store, ctx._session.services.engine.policy
        kept.append((policy.wanted, policy.worth,
                     [store.positions(layer).clone() for layer in range(len(store.counts))]))
        return await real(ctx, questions)

    monkeypatch.setattr(runner, "ask_all", look)
    bench().run([cell(task="last_write", policy="oracle_per_head", units=100, sinks=0, stabilizers=0, length=1500,
                      chunk_size=1500)], tmp_path)
    differ = 0
    for wanted, worth, layers in kept:
        assert len(wanted) > 100
        for layer, heads in enumerate(layers):
            best = [wanted[worth[layer, head].topk(100).indices] for head in range(len(heads))]
            for found, expected in zip(heads, best, strict=True):
                differ += not torch.equal(best[0].sort().values, expected.sort().values)
                assert torch.isin(expected, found).float().mean() > 0.97, "ties and what was not committed aside"
    assert differ, "heads want different tokens"


async def test_the_oracle_by_head_measures_the_attention_that_answers_pay():
    """By the stock model's own attention matrices on the needed lines, the questions and the answers."""
    own = bench()
    items = list(suite.TASKS["last_write"].items(1, 300, own.count_tokens, prose))
    worth = await own.worth(items)
    ids, rows = [i for item in items if item.needed for i in tokenizer().encode(item.text)], []
    count = len(ids)
    for item in items:
        if item.answer is not None:
            ids += tokenizer().encode(item.text)
            answer = tokenizer().encode(item.answer + "\n")
            rows += [len(ids) - 1 + n for n in range(len(answer))]
            ids += answer
    stock = copy.deepcopy(model())
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        found = stock(torch.tensor([ids]), output_attentions=True).attentions
    groups = stock.config.num_attention_heads // stock.config.num_key_value_heads
    for layer, matrix in enumerate(found):
        sums = matrix[0][:, rows, :count].sum(1)
        torch.testing.assert_close(worth[layer], sums.view(-1, groups, count).sum(1), rtol=1e-4, atol=1e-5)


def test_bits_are_those_of_the_stock_model_while_everything_fits(tmp_path: Path):
    result = bench().run([cell(task="text", policy="full", units=None, length=150, streams=1)], tmp_path)[0]
    items = list(suite.TASKS["text"].items(0, 150, bench().count_tokens, prose))
    pieces = [tokenizer().encode(item.text) for item in items]
    ids, one = [token for piece in pieces for token in piece], result.streams[0]
    assert one.tokens == len(ids)
    with torch.no_grad():
        logprobs = model()(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    lines = max(n for n in range(len(items) + 1) if sum(map(len, pieces[:n])) <= len(ids) // 32 * 32)
    counted = sum(map(len, pieces[:lines]))
    assert one.bytes == len("".join(item.text for item in items[:lines]).encode())
    bits = -sum(float(logprobs[t - 1, ids[t]]) for t in range(1, counted)) / 0.6931471805599453
    assert one.bits == pytest.approx(bits, rel=1e-4)
    assert result.score == pytest.approx(bits / one.bytes, rel=1e-4)


def test_bits_of_a_stream_too_short_are_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="no bits to count"):
        bench().run([cell(task="text", policy="full", units=None, length=20, streams=1,
                          chunk_size=512)], tmp_path)


def test_full_has_room_for_marks_that_are_longer_than_the_stream(tmp_path: Path):
    result = bench().run([cell(policy="full", units=None, length=50, streams=1)], tmp_path)[0]
    assert result.streams[0].tokens > 300 and result.questions == 16


def test_the_footprint_is_units_held_times_tokens_fed(tmp_path: Path):
    everything, few = bench().run([cell(policy="full", units=None, streams=1), cell(streams=1)], tmp_path)
    chunk, n = everything.cell.chunk_size, everything.streams[0].tokens
    committed = [at // chunk * chunk for at in range(n)]  # before each token
    assert everything.streams[0].unit_tokens == sum(committed)
    assert few.streams[0].unit_tokens == sum(min(64, units) for units in committed)


def test_heads_reach_the_runtime_as_everywhere_else(tmp_path: Path):
    """By folder: checked against the model, rounded and moved as a runtime does."""
    with pytest.raises(LocretError, match="nowhere"):
        bench().run([cell(policy="locret", heads=str(tmp_path / "nowhere"))], tmp_path / "out")


@pytest.mark.parametrize("chunk", [32, 500])
@pytest.mark.thorough(but=1)
def test_full_has_room_for_the_chat_frame(chunk: int, tmp_path: Path):
    """However little of the last chunk is pending when it is asked."""
    for length in range(300, 300 + 3 * 8, 8):
        [result] = bench().run([cell(task="sentences", policy="full", units=None, length=length, streams=1,
                                     chunk_size=chunk)], tmp_path)
        assert result.questions == 12


async def test_sentences_are_asked_in_the_chat_frame(monkeypatch):
    raw = []
    real = Runtime.open
    monkeypatch.setattr(Runtime, "open", lambda self, *a, **k: raw.append(k["raw"]) or real(self, *a, **k))
    await bench().measure(cell(task="sentences", length=400, units=160, streams=1))
    await bench().measure(cell(task="recall", length=400, units=160, streams=1))
    assert raw == [None, True]


async def test_with_a_focus_the_first_question_is_told_and_no_other_asked(monkeypatch):
    told, real = [], Runtime.open
    monkeypatch.setattr(Runtime, "open", lambda self, *a, **k: told.append(k["focus"]) or real(self, *a, **k))
    for task in ("recall", "every_so_often"):
        plain = await bench().measure(cell(task=task, streams=1))
        found = await bench().measure(cell(task=task, streams=1, focus=True))
        [(question, expected, _)] = found.streams[0].answers
        [one] = plain.streams
        assert (question, expected) == one.answers[0][:2] and found.streams[0].tokens == one.tokens
        assert told[-2:] == [None, question]
    origin = bench().origin("")
    assert files.file_name(cell(focus=True), origin) != files.file_name(cell(), origin)


def test_a_focus_that_has_no_room_is_found_before_anything_runs():
    own, few = bench(), cell(units=16)  # 4 sinks and 8 stabilizers
    assert plan.checked([few], own) == ([few], {})
    longest = own.longest_focus(cell(focus=True))
    assert longest >= 4
    with pytest.raises(ConfigError, match=f"a focus of {longest} tokens included; expected a larger budget"):
        plan.checked([few, cell(units=16, focus=True)], own)
    fits = cell(units=12 + longest + 1, focus=True)
    assert plan.checked([fits], own) == ([fits], {})


@pytest.mark.parametrize(("more", "message"), [
    ({"task": "recal"}, r"no task 'recal'; expected one of passkey, recall"),
    ({"streams": 0}, "streams is 0"),
    ({"length": -5}, "length is -5"),
    ({"policy": "oracle", "task": "text"}, "no line of task 'text' is asked about"),
])
def test_cells_that_cannot_be_run_are_refused(more: dict, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        bench().run([cell(**more)], tmp_path)
