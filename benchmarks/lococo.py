"""What a learnt convolution buys that merges the units which are dropped (LoCoCo with Locret, Table 11 of the paper).

A commit keeps the best b units per KV head (`merging.py`). Here the worst eighth of these take in those that are
dropped (Cai et al., ICML 2024): one convolution over their keys and values, 21 units wide, says for each that takes in
how much of every other, and their keys and values become (1 - n) times their own and n times those sums. Convolutions
and n are trained as there, by the loss of the chunk that follows: on other streams, whose facts are told twice, so that
what was dropped is of use. The model stays as it is, layer norms too,
and gradients reach one commit back. With n = 0 this is plain eviction; in the first half of training n
stays at `--mixed`, as it would fall to 0 before the convolutions have learnt anything.

SmolLM2 with its heads in fp32; each way is paired, question by question, with plain units in as many bytes.

    python benchmarks/lococo.py --units 256 --steps 240 --keep lococo
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from host_tier import facts
from merging import WAYS, Way, made, measured, row, taken
from record import record
from torch import Tensor, nn

from locret_stream.evaluation import chat
from locret_stream.evaluation.haystack import stdlib_lines
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import select_units
from locret_stream.models import Attachment, Attended, LayerCall, attach, differentiable
from locret_stream.named_models import model_path, named_model
from locret_stream.runtime.loading import load_model, load_tokenizer

SINKS, STABILIZERS, WIDTH, SHARE = 4, 32, 21, 8  # as `merging.py`; the paper's kernel, and its 2,048 of 16,384
TRAINED_ON = 1000  # the number of the first stream that it is trained on


class Convolutions(nn.Module):
    """One of each layer, for all its heads: keys and values [H, 2D, N] -> a logit of each unit for each of m."""

    def __init__(self, attachment: Attachment, budgets: list[int], mixed: float):
        super().__init__()
        units = attachment.shape.units
        self.taking = [budget // SHARE for budget in budgets]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(unit.key_dim + unit.value_dim, m, WIDTH, padding=WIDTH // 2)
            for unit, m in zip(units, self.taking, strict=True))
        self.mixed = nn.Parameter(torch.full((len(units),), mixed))  # n, by layer

    def merged(self, layer: int, keys: Tensor, values: Tensor, scores: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the units at the ranks `keep` [H, B], of which the worst take in those that are not kept:
        keys, values [H, N, D] before RoPE, scores [H, N] -> [H, B, D] twice."""
        m, (heads, total) = self.taking[layer], scores.shape
        of_kept = scores.gather(1, keep)
        of_kept = of_kept.masked_fill(keep < SINKS, float("inf")).masked_fill(keep >= total - STABILIZERS, float("inf"))
        at = of_kept.topk(m, largest=False).indices.sort(1).values  # places in `keep`
        taken_in = torch.ones_like(scores, dtype=torch.bool).scatter_(1, keep, False)
        taken_in.scatter_(1, keep.gather(1, at), True)
        others = taken_in.nonzero()[:, 1].view(heads, -1)
        k, v = taken(keys, others), taken(values, others)
        given = nn.functional.layer_norm(torch.cat([k, v], -1), (k.shape[-1] + v.shape[-1],))
        weights = self.convolutions[layer](given.mT).softmax(-1)
        n = self.mixed[layer]

        def mixed(all_kept: Tensor, of_others: Tensor) -> Tensor:
            index = at[..., None].expand(-1, -1, all_kept.shape[-1])
            own = all_kept.gather(1, index)
            return all_kept.scatter(1, index, (1 - n) * own + n * (weights @ of_others))

        return mixed(taken(keys, keep), k), mixed(taken(values, keep), v)


def texts(options: argparse.Namespace, tokenizer: Any) -> Iterator[list[int]]:
    """Streams of ids, each fact told twice, without end."""
    seed = TRAINED_ON
    while True:
        rng = random.Random(f"lococo {seed}")
        told = facts(rng, options.facts)
        lines = chat.in_text([[one] for one in told + told], rng, (line + "\n" for line in stdlib_lines(seed)),
                             options.tokens, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids))
        yield [token for line, _ in lines for token in tokenizer(line, add_special_tokens=False).input_ids]
        seed += 1


class Training:
    """Reads streams chunk by chunk, as the engine does, with gradients from a chunk's loss to the commit before it."""

    def __init__(self, options: argparse.Namespace, attachment: Attachment, own: Any, budgets: list[int]):
        self.options, self.attachment, self.own, self.budgets = options, attachment, own, budgets
        self.convolutions = Convolutions(attachment, budgets, options.mixed)
        self.tables = attachment.tables(max(budgets) + 2 * options.chunk)

    def run(self, tokenizer: Any) -> dict[str, Any]:
        """Train; gives how long it took, the losses of the first and the last fifty steps, and n by layer."""
        options, made = self.options, self.convolutions
        adam = torch.optim.Adam([{"params": made.convolutions.parameters(), "lr": options.rate},
                                 {"params": [made.mixed], "lr": 0.0}])
        losses, step, began = list[float](), 0, time.perf_counter()
        for ids in texts(options, tokenizer):
            held: list[tuple[Tensor, Tensor, Tensor]] | None = None
            evicts = False
            for first in range(0, len(ids) - options.chunk + 1, options.chunk):
                chunk = torch.tensor(ids[first:first + options.chunk])[None]
                with torch.set_grad_enabled(evicts), differentiable(self.attachment):
                    new, loss = self._read(chunk, held)
                    if evicts:
                        adam.param_groups[1]["lr"] = 0.0 if step < options.steps // 2 else options.rate
                        adam.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
                        adam.step()
                        step, losses = step + 1, [*losses, float(loss)]
                        if step % 20 == 0:
                            print(f"step {step}: {statistics.mean(losses[-20:]):.4f}, n "
                                  f"{float(made.mixed.mean()):.3f}, {time.perf_counter() - began:.0f} s",
                                  file=sys.stderr, flush=True)
                if step == options.steps:
                    return {"steps": step, "losses": [round(statistics.mean(part), 4) for part in (
                            losses[:50], losses[-50:])], "minutes": round((time.perf_counter() - began) / 60, 1),
                            "n": [round(each, 3) for each in made.mixed.tolist()]}
                held, evicts = self._commit(held, new)
        raise AssertionError("the streams have no end")

    def _read(self, ids: Tensor, held: list[tuple[Tensor, Tensor, Tensor]] | None
              ) -> tuple[dict[int, tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Keys, values and scores of a chunk's units by layer, and the loss of its tokens behind those held."""
        new: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

        def step(call: LayerCall) -> Attended:
            with torch.no_grad():
                scores = self.own.averaged(self.own.score(call.layer, call.q, call.k, call.v, call.hidden))[0]
                new[call.layer] = call.k[0].detach(), call.v[0].detach(), scores
            k, v = call.k, call.v
            if held is not None:
                k = torch.cat([held[call.layer][0][None], k], 2)
                v = torch.cat([held[call.layer][1][None], v], 2)
            start = k.shape[2] - call.q.shape[2]
            ranks = torch.arange(k.shape[2])
            return (self.tables.rotate_queries(call.layer, call.q, start), self.tables.rotate(call.layer, k, 0), v,
                    ranks[start:, None] >= ranks)

        hidden = self.attachment.hidden(ids, step)
        logits = self.attachment.logits(hidden[:, :-1])[0].float()
        return new, nn.functional.cross_entropy(logits, ids[0, 1:])

    def _commit(self, held: list[tuple[Tensor, Tensor, Tensor]] | None, new: dict[int, tuple[Tensor, Tensor, Tensor]]
                ) -> tuple[list[tuple[Tensor, Tensor, Tensor]], bool]:
        """What is held then, and whether anything was dropped: with a graph from what the convolutions changed."""
        after, dropped = [], False
        for layer, budget in enumerate(self.budgets):
            whole = [new[layer]] if held is None else [tuple(x.detach() for x in held[layer]), new[layer]]
            keys, values, scores = (torch.cat(parts, 1) for parts in zip(*whole, strict=True))
            keep = select_units(scores, budget, SINKS, STABILIZERS)
            if keep.shape[1] < scores.shape[1]:
                with torch.enable_grad():
                    keys, values = self.convolutions.merged(layer, keys, values, scores, keep)
                scores, dropped = scores.gather(1, keep), True
            after.append((keys, values, scores))
        return after, dropped


def run(options: argparse.Namespace) -> dict[str, Any]:
    named = named_model("smollm2")
    assert named is not None and named.heads is not None
    heads, path = RetainingHeads.load(named.heads), model_path("smollm2")
    attachment, tokenizer = attach(load_model(path, "float32", "cpu")), load_tokenizer(path)
    own = attachment.put_beside(heads, attachment.dtype)
    result: dict[str, Any] = {name: getattr(options, name) for name in ("tokens", "facts", "streams", "chunk", "rate")}
    for units in options.units:
        torch.manual_seed(0)
        training = Training(options, attachment, own,
                            list(made(options, WAYS["plain"], units, attachment, heads, own).budgets))
        course = training.run(tokenizer)
        convolutions = training.convolutions.requires_grad_(False)
        plain, found = (measured(options, way, units, attachment, tokenizer, heads, own, name) for name, way in (
            ("plain", WAYS["plain"]), ("convolution", Way(convolution=convolutions.merged))))
        result[f"{units} units"] = {
            "questions": len(plain.losses), "taking in": convolutions.taking, "training": course,
            "parameters": sum(parameter.numel() for parameter in convolutions.parameters()),
            "plain": row(plain, None), "convolution": row(found, plain)}
        print(result[f"{units} units"], file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--facts", type=int, default=48, help="told in each stream")
    parser.add_argument("--asked", type=int, default=48, help="of these")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=2)
    parser.add_argument("--units", type=int, nargs="+", default=[256], help="kept per KV head")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300, help="of training, each of a chunk")
    parser.add_argument("--rate", type=float, default=1e-3, help="Adam's")
    parser.add_argument("--mixed", type=float, default=0.3, help="what n is at first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    options.task = "facts"
    torch.set_num_threads(options.threads)
    record(options.keep or "lococo", run(options), keep=options.keep is not None)


if __name__ == "__main__":
    main()
