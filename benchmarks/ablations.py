"""What single parts of the papers' methods do, one at a time, on small models: the rows of docs/findings.md that no
other script measures.

    nacl       share of proxies, random share, draws by score or all alike, one eviction or many (NaCl, Table 3,
               Figure 5): prompts that end with the question, in 20 % of their units
    errors     of the last hidden state and of the scores, by stabilizers (Locret, Figure 3)
    ends       the end of a prompt that is not evicted; stabilizers that do not count at the last eviction (Locret,
               algorithm 1)
    focus      the question in front of the stream, by policy (Locret, the revision's Table 6)
    memory     a context's bytes against what it tells, by policy (Locret, Figure 4)
    sparsity   of a token's attention: the part on its best k units, on those of the token before, on those that
               eviction kept (SpeCache, Figure 2)
    game       rock, paper, scissors (SirLLM's games, in files of its repository: `--games FOLDER`; Locret, Table 19)

SmolLM2 with its heads tells numbers from the streams of `host_tier.py`, `nacl` and `focus` the model of the marker
tasks, too (`--model recall`). A value is told token by token: how likely is each, and is each the likeliest.

    python benchmarks/ablations.py memory --keep ablations_memory
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from host_tier import TOGETHER, Asked, Found, asked, read, stream, summary, told
from record import record

from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine, EngineState
from locret_stream.evaluation import markers, metrics
from locret_stream.evaluation.haystack import stdlib_lines
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import select_units
from locret_stream.models import attach
from locret_stream.named_models import model_path, named_model
from locret_stream.policies import Chunk, Listening, Policy, make_policy
from locret_stream.runtime.loading import load_model, load_tokenizer

RECALL = Path(__file__).resolve().parents[1] / "research" / "models" / "recall"
SINKS = 4
WITHOUT_HEADS = "h2o", "snapkv", "nacl", "sirllm", "tova", "streaming_llm", "keydiff", "random"


class Subject:
    """A model with its heads, of which engines are made."""

    def __init__(self, name: str, dtype: str):
        self.marks = name == "recall"
        path, named = (RECALL, None) if self.marks else (model_path(name), named_model(name))
        self.tokenizer = load_tokenizer(path)
        self.attachment = attach(load_model(path, dtype, "cpu"))
        heads = RetainingHeads.load(RECALL / "heads" if named is None else named.heads)
        self.heads = self.attachment.put_beside(heads, self.attachment.dtype)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def policy(self, name: str, **knobs: float | str) -> Policy:
        return make_policy(name, knobs, self.heads)

    def engine(self, policy: Policy | str, units: int, *, chunk: int = 256, stabilizers: int = 0,
               slots: int = 1 + TOGETHER) -> Engine:
        """Every layer has as many units."""
        chosen = self.policy(policy) if isinstance(policy, str) else policy
        config = StreamConfig(budget=Budget(units=units, sinks=SINKS, stabilizers=stabilizers), chunk_size=chunk,
                              policy=chosen.name)
        return Engine(self.attachment, config, chosen, slots=slots)

    def stream(self, seed: int, tokens: int, count: int) -> tuple[list[int], list[Asked]]:
        """As `host_tier.stream`, or the same of marks."""
        if not self.marks:
            return stream(self.ids, seed, tokens, count)
        case = markers.recall(random.Random(f"ablations {seed}"), count)
        lines = markers.planted(case, stdlib_lines(seed), tokens, lambda text: len(self.ids(text)))
        return ([token for line in lines for token in self.ids(line)],
                [(self.ids(question.ask), self.ids(question.answer)) for question in case.questions])


def say(what: str, row: dict[str, Any], began: float) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if isinstance(value, int | float)}
    print(f"{what}: {shown}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return row


def differences(before: Found, after: Found) -> dict[str, Any]:
    """What each question's negative log-likelihood changes by."""
    values = [b - a for (a, _), (b, _) in zip(before, after, strict=True)]
    return {"nll": round(statistics.mean(values), 4), "nll_interval": list(metrics.interval([[x] for x in values]))}


# -- NaCl ---------------------------------------------------------------------------------------------------------


class ProxiesOnly(Policy):
    """The attention of the last tokens of a chunk, which keep no place for that: what a share of proxies scores."""

    name, needs, stateful = "proxies_only", frozenset({"column_sums"}), True

    def __init__(self, share: float):
        self.share = share

    def score(self, chunk: Chunk) -> torch.Tensor:
        assert chunk.column_sums is not None
        new = chunk.k.shape[1]
        return chunk.column_sums(slice(new - max(1, round(self.share * new)), new))


def prompts(subject: Subject, tokens: int, options: argparse.Namespace) -> list[tuple[list[int], Asked]]:
    """Texts of exactly so many tokens, of which each ends with a question of its own."""
    made, streams = [], math.ceil(options.asked / options.facts)
    for seed in range(streams):
        ids, asks = subject.stream(seed, tokens - 48, options.facts)
        before = [token for line, _ in zip(stdlib_lines(1000 + seed), range(50), strict=False)
                  for token in subject.ids(line)]
        for ask, value in asks:
            assert len(ids) + len(ask) <= tokens, "a line is longer than the room that was left"
            made.append(((before + ids + ask)[-tokens:], (ask, value)))
    return made[:options.asked]


class Several(Policy):
    """Scores a chunk by several policies, as if its units were evicted to `units` of them; all of them must fit."""

    name, needs, stateful = "several", frozenset({"column_sums", "positions"}), True

    def __init__(self, policies: dict[str, Policy], units: int):
        self.policies, self.units = policies, units
        self.kept: dict[str, list[torch.Tensor]] = {}  # by name, of each layer the ranks that stay

    def score(self, chunk: Chunk) -> torch.Tensor:
        if not chunk.layer:
            self.kept = {name: [] for name in self.policies}
        for name, policy in self.policies.items():
            sinks, stabilizers = policy.protection(self.units, chunk.sinks, chunk.stabilizers)
            scores = policy.score(dataclasses.replace(chunk, budget=self.units, sinks=sinks, stabilizers=stabilizers))
            self.kept[name].append(select_units(scores, self.units, sinks, stabilizers))
        return chunk.k.new_zeros(chunk.k.shape[0], chunk.keys.shape[1]).float()


def nacl(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Each prompt is read with its question, evicted, and asked once more: what the last token of a prompt makes likely
    is computed before anything is evicted, whatever the policy. Beside that streams that nobody asks yet."""
    tokens, few = 640, 0.015
    units, made = tokens // 5, prompts(subject, tokens, options)

    def drawn(share: float, chances: str = "score", proxies: float = few) -> Policy:
        return subject.policy("nacl", proxies=proxies, random=share, chances=chances)

    policies = {
        **{f"proxies {share:g}": drawn(0.0, proxies=share) for share in (0.0, few, 0.1, 0.5, 1.0)},
        **{f"proxies {share:g} without places of their own": ProxiesOnly(share) for share in (0.1, 0.5)},
        **{f"random {share:g}, {chances}": drawn(share, chances)
           for share in (0.37, 0.7, 0.9, 1.0) for chances in ("score", "uniform")},
        "h2o": subject.policy("h2o")}
    several = Several(policies, units)
    engine, began = subject.engine(several, tokens, chunk=tokens, slots=1 + len(policies)), time.perf_counter()
    once: dict[str, Found] = {name: [] for name in policies}
    for ids, ask in made:
        state = engine.open(0)
        read(engine, state, ids)
        forks = [engine.fork(state, 1 + at) for at in range(len(policies))]
        for fork, kept in zip(forks, several.kept.values(), strict=True):
            for layer, ranks in enumerate(kept):
                fork.store.put_in_front(layer, None, ranks, 0, engine.layout.tables.rotate)
        for name, found in zip(policies, told(engine, forks, [ask] * len(forks)), strict=True):
            once[name].append(found)
    rows = {name: say(name, summary(found), began) for name, found in once.items()}

    def in_chunks(name: str, policy: Policy, units: int, chunk: int, not_told: bool) -> None:
        began, found = time.perf_counter(), Found()
        engine = subject.engine(policy, units, chunk=chunk)
        if not_told:
            for ids, asks in (subject.stream(seed, tokens + 32, options.facts) for seed in range(
                    math.ceil(options.asked / options.facts))):
                state = engine.open(0)
                read(engine, state, ids[:tokens])
                found += asked(engine, state, asks)
        else:
            for first in range(0, len(made), TOGETHER):
                part = made[first:first + TOGETHER]
                contexts = [engine.open(slot) for slot in range(len(part))]
                for context, (ids, _) in zip(contexts, part, strict=True):
                    read(engine, context, ids)
                found += told(engine, contexts, [ask for _, ask in part])
        rows[name] = say(name, summary(found), began)

    many = 128
    for share in (0.0, 0.37) if subject.marks else (0.37,):
        in_chunks(f"random {share:g}, evicted every {many}", drawn(share, proxies=few * tokens / many), units, many,
                  False)
    for share in (0.0, 0.37, 0.7, 1.0) if subject.marks else ():
        for chances in ("score", "uniform") if share else ("score",):
            in_chunks(f"not told, evicted every {many}, {tokens // 2} units, random {share:g}, {chances}",
                      drawn(share, chances, 0.05), tokens // 2, many, True)
    return {"tokens": tokens, "units": units, "facts": options.facts, "rows": rows}


# -- errors by stabilizers ----------------------------------------------------------------------------------------


class Watched(Engine):
    """Keeps the last hidden states of all that it commits, and the scores that its policy gives."""

    def __init__(self, subject: Subject, policy: str, units: int, stabilizers: int):
        self.hidden: list[torch.Tensor] = []
        self.given: list[list[torch.Tensor]] = [[] for _ in range(subject.attachment.shape.layers)]
        listening = Listening(subject.policy(policy), lambda chunk, scores: self.given[chunk.layer].append(
            scores[..., -chunk.k.shape[1]:].clone()), needs=frozenset())
        config = StreamConfig(budget=Budget(units=units, sinks=SINKS, stabilizers=stabilizers), chunk_size=256,
                              policy=policy)
        super().__init__(subject.attachment, config, listening, slots=1 + TOGETHER)

    def _forward(self, state: EngineState, ids: list[int], offset: int, scorer: Any) -> Any:
        hidden, carried = super()._forward(state, ids, offset, scorer)
        if scorer is not None:
            self.hidden.append(hidden[0].float())
        return hidden, carried

    def passed(self, ids: Sequence[int]) -> tuple[EngineState, torch.Tensor, torch.Tensor]:
        """The context, hidden states [T, hidden] and scores [L, H, T] of a text in whole chunks."""
        self.hidden, state = [], self.open(0)
        for layer in self.given:
            layer.clear()
        read(self, state, ids)
        return state, torch.cat(self.hidden), torch.stack([torch.cat(layer, dim=-1) for layer in self.given])


def errors(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Against the same text with everything kept, of the tokens that come once something was evicted."""
    tokens, units = 4096, 768
    texts = [subject.stream(seed, tokens + 64, options.facts) for seed in range(math.ceil(options.asked
                                                                                          / options.facts))]
    rows: dict[str, dict[str, Any]] = {}
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, kept, stabilizers in [("everything kept", tokens, 0),
                                    *((f"n_s = {n}", units, n) for n in (0, 32, 128, 512))]:
        began, found, far = time.perf_counter(), Found(), []
        engine = Watched(subject, "locret", kept, stabilizers)
        for at, (ids, asks) in enumerate(texts):
            state, hidden, scores = engine.passed(ids[:tokens])
            found += asked(engine, state, asks)
            if kept == tokens:
                whole.append((hidden, scores))
                continue
            hidden_0, scores_0 = whole[at]
            part = slice(units + engine.chunk_size, None)
            distance = (hidden - hidden_0)[part].norm(dim=-1) / hidden_0[part].norm(dim=-1)
            spread = scores_0[..., part].std(dim=-1, keepdim=True)
            off = ((scores - scores_0)[..., part].abs() / spread).mean()
            top = [values[..., part].flatten(0, 1) for values in (scores, scores_0)]
            tenth = top[0].shape[-1] // 10
            common = [len(set(a.topk(tenth).indices.tolist()) & set(b.topk(tenth).indices.tolist())) / tenth
                      for a, b in zip(*top, strict=True)]
            far.append((float(distance.mean()), float((hidden - hidden_0)[-1].abs().max()), float(off),
                        statistics.mean(common)))
        row = summary(found)
        for label, values in zip(("hidden", "last_token_most", "scores", "top_tenth_in_common"),
                                 zip(*far, strict=True), strict=False):
            row[label] = round(statistics.mean(values), 4)
            row[f"{label}_by_text"] = [round(value, 4) for value in values]
        rows[name] = say(name, row, began)
    return {"tokens": tokens, "units": units, "chunk": 256, "facts": options.facts, "texts": len(texts), "rows": rows}


# -- the end of a prompt ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def protecting(engine: Engine, stabilizers: int) -> Iterator[None]:
    """Meanwhile another number of last units stays at an eviction."""
    layout = engine.layout
    budget = msgspec.structs.replace(layout.config.budget, stabilizers=stabilizers)
    engine.layout = dataclasses.replace(layout, config=msgspec.structs.replace(layout.config, budget=budget))
    try:
        yield
    finally:
        engine.layout = layout


def ends(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """A prompt is a text of 4,196 tokens and a question. Of its last tokens as many as are said are held back from the
    last eviction, and stay beside the budget until the value is told."""
    tokens, units, beyond, chunk = 4096, 512, 100, 256
    texts = [subject.stream(seed, tokens + beyond + 64, options.facts)
             for seed in range(math.ceil(options.asked / options.facts))]
    rows: dict[str, dict[str, Any]] = {}
    of_all: dict[str, Found] = {}

    def held_back(engine: Engine, state: EngineState, asks: Sequence[Asked], local: int | None) -> Found:
        found: Found = []
        for first in range(0, len(asks), TOGETHER):
            part = asks[first:first + TOGETHER]
            forks = [engine.fork(state, 2 + at) for at in range(len(part))]
            for fork, (ask, _) in zip(forks, part, strict=True):
                engine.accept(fork, ask)
                if local is not None:
                    engine._commit(fork, len(fork.pending) - local)
            found += told(engine, forks, [([], value) for _, value in part])
        return found

    for kept, stabilizers in ((units, 0), (units, 32), (units, 128), (units + beyond, 32)):
        engine = subject.engine("locret", kept, stabilizers=stabilizers, slots=2 + TOGETHER, chunk=chunk)
        began = time.perf_counter()
        found: dict[str, Found] = {}
        for ids, asks in texts:
            asks = asks[:options.asked // len(texts)]
            state = engine.open(0)
            read(engine, state, ids[:tokens - chunk])
            if kept == units and stabilizers:
                # The whole text is read, its last chunk with stabilizers or without, and the question waits.
                for last in (stabilizers, 0):
                    copy = engine.fork(state, 1)
                    with protecting(engine, last):
                        read(engine, copy, ids[tokens - chunk:tokens])
                    found.setdefault(f"{kept} units, n_s = {stabilizers}, at the last eviction {last}", []).extend(
                        asked(engine, copy, asks, first_slot=2))
            read(engine, state, ids[tokens - chunk:tokens + beyond])
            if stabilizers < 128:
                for local in (0, 32, None) if kept == units else (0,):
                    words = "100 and the question" if local is None else str(local)
                    found.setdefault(f"{kept} units, n_s = {stabilizers}, n_loc = {words}", []).extend(
                        held_back(engine, state, asks, local))
        for name, values in found.items():
            rows[name] = say(name, summary(values), began)
        of_all |= found
    pairs = [(f"{kept} units, n_s = {n}, n_loc = {local}", f"{units} units, n_s = {n}, n_loc = 100 and the question")
             for kept, n, local in ((units, 0, "0"), (units, 32, "0"), (units, 32, "32"), (units + beyond, 32, "0"))]
    pairs += [(f"{units} units, n_s = {n}, at the last eviction {n}",
               f"{units} units, n_s = {n}, at the last eviction 0") for n in (32, 128)]
    for before, after in pairs:
        rows[f"{after}, less {before}"] = differences(of_all[before], of_all[after])
    return {"tokens": tokens + beyond, "units": units, "chunk": chunk, "facts": options.facts, "texts": len(texts),
            "rows": rows}


# -- the question in front ----------------------------------------------------------------------------------------


def focus(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Streams of 1,024 tokens, read once for all questions, and once for each with it in front."""
    tokens, units, chunk = 1024, 128, 128
    texts = [subject.stream(seed, tokens + 32, options.facts) for seed in range(math.ceil(options.asked
                                                                                          / options.facts))]
    rows: dict[str, dict[str, Any]] = {}
    for policy in ("locret", "snapkv", "h2o", "nacl", *options.more):
        engine = subject.engine(policy, units, chunk=chunk)
        for in_front in (False, True):
            began, found = time.perf_counter(), Found()
            for ids, asks in texts:
                state = engine.open(0)
                if not in_front:
                    read(engine, state, ids[:tokens])
                    found += asked(engine, state, asks)
                    continue
                for first in range(0, len(asks), TOGETHER):
                    part = asks[first:first + TOGETHER]
                    contexts = [engine.open(1 + at) for at in range(len(part))]
                    for context, (ask, _) in zip(contexts, part, strict=True):
                        engine.focus(context, ask)
                        read(engine, context, ids[:tokens])
                    found += told(engine, contexts, part)
            name = f"{policy}, {'in front' if in_front else 'not told'}"
            rows[name] = say(name, summary(found), began)
    return {"tokens": tokens, "units": units, "chunk": chunk, "facts": options.facts, "texts": len(texts),
            "rows": rows}


# -- memory against score -----------------------------------------------------------------------------------------


def memory(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """The stream of `host_tier.py --streams 1 --tokens 4096 --facts 64`; bytes are those of a slot, its chunk included.
    """
    tokens, rows = 4096, {}
    ids, asks = subject.stream(0, tokens, options.facts)
    for policy, units in [*((policy, units) for units in (256, 512) for policy in ("locret", *WITHOUT_HEADS)),
                          ("full", len(ids) + 64)]:
        began, engine = time.perf_counter(), subject.engine(policy, units, stabilizers=0 if policy == "full" else 32)
        state = engine.open(0)
        read(engine, state, ids)
        name = policy if policy == "full" else f"{policy}, {units} units"
        rows[name] = say(name, summary(asked(engine, state, asks[:options.asked])) | {
            "bytes": engine.pool.bytes_resident // engine.pool.slots}, began)
    return {"tokens": len(ids), "facts": options.facts, "chunk": 256, "rows": rows}


# -- sparsity -----------------------------------------------------------------------------------------------------


class Rows(Policy):
    """Keeps in `weights` of each layer the attention of the chunk's tokens `rows` to all units, [R, H, n + T], the mean
    of the query heads of each KV head. Scores nothing: all must fit."""

    name, needs = "rows", frozenset({"column_sums"})

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.weights: list[torch.Tensor] = []

    def score(self, chunk: Chunk) -> torch.Tensor:
        assert chunk.column_sums is not None
        groups = chunk.q.shape[0] // chunk.k.shape[0]
        if self.rows:
            self.weights.append(torch.stack([chunk.column_sums(slice(row, row + 1)) for row in self.rows]) / groups)
        return chunk.k.new_zeros(chunk.k.shape[:2]).float()


def sparsity(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Of every fourth token of a chunk behind 3,840 tokens: the share of its attention on k of these, beside the tokens
    of the chunk, which all have."""
    tokens, chunk, shares = 3840, 256, (0.005, 0.01, 0.02, 0.05, 0.2)
    found: dict[str, list[torch.Tensor]] = {}  # by name of each stream [R, L]
    began = time.perf_counter()
    for seed in range(options.streams):
        ids, _ = subject.stream(seed, tokens + chunk + 64, options.facts)
        watching = Rows()
        engine = subject.engine(watching, tokens + chunk, slots=1)
        state = engine.open(0)
        read(engine, state, ids[:tokens])
        watching.rows = [row for at in range(3, chunk, 4) for row in (at - 1, at)]
        read(engine, state, ids[tokens:tokens + chunk])
        weights = torch.stack(watching.weights, dim=1)  # [R, L, H, n + T]
        before, now = weights[0::2], weights[1::2]
        old, new = now[..., :tokens], now[..., tokens:].sum(-1)
        found.setdefault("the chunk alone", []).append(new.mean(-1))
        for share in shares:
            k = round(share * tokens)

            def add(way: str, mass: torch.Tensor, share: float = share, new: torch.Tensor = new) -> None:
                found.setdefault(f"{share:.1%}, {way}", []).append((mass + new).mean(-1))

            add("best", old.topk(k).values.sum(-1))
            add("best of the token before", old.gather(-1, before[..., :tokens].topk(k).indices).sum(-1))
            add("newest", old[..., -k:].sum(-1))
            for policy in ("h2o", "locret"):
                evicting = subject.engine(policy, k, slots=1)
                reader = evicting.open(0)
                read(evicting, reader, ids[:tokens])
                kept = evicting.receipts(reader, 0, tokens).kept
                assert int(kept.sum(-1).min()) == int(kept.sum(-1).max()) == k
                add(f"kept by {policy}", (old * kept).sum(-1))
        print(f"stream {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    rows = {}
    for name, streams in found.items():
        values = torch.cat(streams)
        rows[name] = say(name, {"share": round(float(values.mean()), 4),
                                "interval": list(metrics.interval([[value] for value in values.mean(-1).tolist()])),
                                "by_layer": [round(value, 3) for value in values.mean(0).tolist()]}, began)
    return {"tokens": tokens, "chunk": chunk, "streams": options.streams, "queries": len(values), "rows": rows}


# -- rock, paper, scissors ----------------------------------------------------------------------------------------

THROWS = "rock", "paper", "scissors"
FIRST = "Let's play a game of Rock-Paper-Scissors. Choose one option from: (A) rock (B) paper (C) scissors. "
NEXT = ("I chose [{throw}]. Analyze my preferences to maximize your winning rate and proceed to the next round. "
        "Choices: (A) rock (B) paper (C) scissors. You choose:")


def outcomes(chosen: Sequence[int], thrown: Sequence[int]) -> dict[str, Any]:
    off = [(answer - throw) % 3 for answer, throw in zip(chosen, thrown, strict=True)]
    return {**{name: round(off.count(value) / len(off), 4) for value, name in enumerate(("tie", "win", "lose"))},
            "win_interval": list(metrics.interval([[float(value == 1)] for value in off])),
            "answers": [chosen.count(throw) for throw in range(3)]}


def game(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """As SirLLM's repository plays it: behind a turn's text the likeliest of the three letters is the answer, and the
    memory evicts after every turn. Budget 1,024, no stabilizers; SirLLM's scores decay by 0.9 a turn. Beside that what
    would have been answered if each letter counted against its mean so far, as a small model prefers one of them."""
    assert options.games is not None, "--games: a folder with rock_paper_scissors_dominant_*.jsonl"
    letters = [subject.ids(f" {letter}")[0] for letter in "ABC"]
    rows: dict[str, dict[str, Any]] = {}
    for favourite in THROWS:
        file = options.games / f"rock_paper_scissors_dominant_{favourite}.jsonl"
        thrown = ["ABC".index(json.loads(line)["user_choice"]) for line in
                  file.read_text().splitlines()[:options.turns]]
        for name, policy in (("locret", subject.policy("locret")), ("sirllm", subject.policy("sirllm", decay=0.9)),
                             ("streaming_llm", subject.policy("streaming_llm"))):
            if name not in options.players:
                continue
            began, engine = time.perf_counter(), subject.engine(policy, 1024, chunk=64, slots=1)
            state, seen, ahead = engine.open(0), [], list[int]()
            for turn in range(len(thrown)):
                words = NEXT.format(throw=THROWS[thrown[turn - 1]]) if turn else FIRST
                engine.accept(state, [*ahead, *subject.ids(f"USER: {words}\n\nASSISTANT:")])
                engine._commit(state, len(state.pending))
                seen.append(engine.logits(state).log_softmax(-1)[letters])
                ahead = [letters[int(seen[-1].argmax())], *subject.ids("\n\n")]
            likely = torch.stack(seen)
            mean = likely.cumsum(0) / torch.arange(1, len(seen) + 1)[:, None]
            row = outcomes(likely.argmax(-1).tolist(), thrown)
            row["against their mean"] = outcomes((likely - mean).argmax(-1).tolist(), thrown)
            row["letters"] = [round(value, 2) for value in likely.mean(0).tolist()]
            rows[f"{favourite}, {name}"] = say(f"{favourite}, {name}", row | {
                "throws": [thrown.count(throw) for throw in range(3)]}, began)
    return {"turns": options.turns, "units": 1024, "rows": rows}


PARTS: dict[str, Callable[[Subject, argparse.Namespace], dict[str, Any]]] = {
    "nacl": nacl, "errors": errors, "ends": ends, "focus": focus, "memory": memory, "sparsity": sparsity, "game": game}


@torch.no_grad()
def run(options: argparse.Namespace) -> dict[str, Any]:
    dtype = options.dtype or ("float32" if options.model == "recall" else "bfloat16")
    return {"model": options.model, "dtype": dtype, **PARTS[options.part](Subject(options.model, dtype), options)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="smollm2", help="with heads of its own, or 'recall'")
    parser.add_argument("--dtype", help="bfloat16 where nothing else is said; of 'recall' float32")
    parser.add_argument("--facts", type=int, default=16, help="told in each stream")
    parser.add_argument("--asked", type=int, default=64, help="questions in all")
    parser.add_argument("--streams", type=int, default=2, help="of `sparsity`")
    parser.add_argument("--more", nargs="*", default=[], help="policies of `focus`, beside four")
    parser.add_argument("--games", type=Path)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--players", nargs="+", default=["locret", "sirllm"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record(options.keep or "ablations", run(options), keep=options.keep is not None)


if __name__ == "__main__":
    main()
