"""Training of the base model, its recall head beside it: a curriculum from one snippet to a full memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import Batch, Stage, Writer
from .model import SINKS, Kept, Recaller, answer_loss

CROWDED = Stage(4, 14, 256, (60, 125), 4, 352, recent=(24, 110), kept=(1600, 2900), mined=16_384)
CURRICULUM = [
    Stage(32, 1, 96, (2, 4), 1, 160, copies=0.15, advance_at=0.88, head=False, variety=0.15),
    Stage(24, 1, 224, (4, 9), 1, 256, copies=0.1, advance_at=0.88, head=False, variety=0.4),
    Stage(12, 2, 256, (10, 20), 2, 256, copies=0.05, advance_at=0.90, variety=0.7),
    Stage(6, 6, 256, (25, 50), 3, 320, recent=(24, 96), advance_at=0.93),
    replace(CROWDED, mined=0),
]


@dataclass(frozen=True)
class Phase:
    """Training from stage `start` on; the learning rate falls to 0 over the last share `cooldown` of the steps."""

    stages: list[Stage]
    steps: int
    learning_rate: float
    cooldown: float
    start: int = 0


PHASES = [
    Phase(CURRICULUM, 1200, 2.5e-3, 0.35),
    Phase([*CURRICULUM[:-1], CROWDED], 1400, 1.5e-3, 0.7, start=len(CURRICULUM) - 1),
    Phase([replace(CROWDED, tools=0.6)], 240, 8e-4, 1.0),
]

REPORT_EVERY, EVALUATE_EVERY = 50, 100  # steps
MARGIN = 24  # first units of a snippet, which see less before them than a stream would show
POOL_STEPS = 8  # batches that share one pool of mined units


class RecallHead(nn.Module):
    """Scores units of the recall layer from pre-RoPE q, k, v; saved as a layer of RetainingHeads."""

    def __init__(self, features: int, hidden: int, kv_heads: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, kv_heads)

    def forward(self, features: Tensor) -> Tensor:
        """features [..., T, F] -> scores [..., T, H], log odds of being needed."""
        features = F.layer_norm(features.float(), features.shape[-1:])
        return self.fc2(F.silu(self.fc1(features)))


def stack_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, *, T, D] each -> [B, T, (Hq + 2 H) D], the order q, k, v."""
    return torch.cat([part.transpose(1, 2).flatten(2) for part in (q, k, v)], -1)


def head_loss(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy against attention weights, in which units with attention count more."""
    losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    weights = weights * (1 + 3 * labels)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


@torch.no_grad()
def plain_features(model: Recaller, writer: Writer, tokens: int, seed: int, length: int = 256) -> Tensor:
    """Features [N, F] bf16 of text without facts."""
    rng = np.random.default_rng(seed)
    out, seen = [], 0
    while seen < tokens:
        opening = [*writer.start_user, int(writer.text(rng, 1)[0][0])]
        rows = torch.tensor(np.stack([[*opening, *writer.text(rng, length)[0]] for _ in range(32)]))
        with torch.autocast("cpu", torch.bfloat16):
            features = stack_features(*model.snippet_features(rows))
        out.append(features[:, SINKS + MARGIN :].flatten(0, 1).bfloat16())
        seen += rows.numel()
    return torch.cat(out)


@torch.no_grad()
def score_all(head: RecallHead, features: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cat([head(part).float() for part in features.split(65_536)])


class Step:
    """One pass over a batch: features, selection, answers, labels."""

    def __init__(self, model: Recaller, head: RecallHead, writer: Writer | None = None) -> None:
        self.model, self.head, self.writer = model, head, writer
        self.pool: Tensor | None = None
        self.pool_age = 0

    def __call__(self, batch: Batch, stage: Stage, rng: np.random.Generator, train_head: bool):
        model = self.model
        contexts, snippets, length = batch.snippets.shape
        q, k, v = model.snippet_features(batch.snippets.view(contexts * snippets, length))
        margin = SINKS + (8 if snippets > 1 else 0)

        def per_context(x: Tensor) -> Tensor:
            x = x[:, :, margin:].unflatten(0, (contexts, snippets))
            return x.transpose(1, 2).flatten(2, 3)

        q, k, v = per_context(q), per_context(k), per_context(v)
        owner = batch.unit_fact[:, :, margin - SINKS :].flatten(1)
        features = stack_features(q, k, v).detach()
        index = None
        if stage.mined and self.writer is not None:
            features, owner, k, v = self._add_mined(features, owner, k, v, stage, rng)
        if stage.kept is not None:
            index = self._select(features, owner, stage, rng)
            expanded = index[..., None].expand(-1, -1, -1, k.shape[-1])
            k, v = k.gather(2, expanded), v.gather(2, expanded)
        tails = batch.tails.shape[0] // contexts
        states, attention = model.tail_states(
            batch.tails, Kept(k, v), batch.answer_rows if train_head else None
        )
        chosen = batch.weights > 0
        logits = model.logits(states[chosen])
        loss = answer_loss(logits, batch.targets[chosen], batch.weights[chosen])
        with torch.no_grad():
            right = logits.argmax(-1) == batch.targets[chosen]
            answered = right[batch.answers[chosen]]
        if train_head:
            labels = attention.amax(2).unflatten(0, (contexts, tails)).amax(1)
            loss = loss + self._head_loss(features, owner, batch.asked, labels, index)
        return loss, answered.float().mean().item() if len(answered) else None

    @torch.no_grad()
    def _mine(self, stage: Stage, rng: np.random.Generator) -> Tensor:
        """Features [P, F] of the units of plain text that the head scores highest; renewed after `POOL_STEPS`."""
        if self.pool is None or self.pool_age >= POOL_STEPS:
            plain = plain_features(self.model, self.writer, stage.mined, int(rng.integers(1 << 31)))
            scores = score_all(self.head, plain).amax(-1)
            self.pool, self.pool_age = plain[scores.topk(min(1500, len(plain))).indices.sort().values], 0
        self.pool_age += 1
        return self.pool

    def _add_mined(self, features, owner, k, v, stage: Stage, rng: np.random.Generator):
        """The context's units, with mined units before and behind them."""
        shape, contexts = self.model.shape, len(features)
        pool = self._mine(stage, rng).to(features.dtype)
        sampled = pool[torch.from_numpy(np.sort(rng.choice(len(pool), len(pool) * 2 // 3, replace=False)))]
        cut = int(rng.integers(0, len(sampled)))
        widths = [shape.query_heads * shape.head_dim] + 2 * [shape.kv_heads * shape.head_dim]
        _, mined_k, mined_v = (
            part.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1).expand(contexts, -1, -1, -1)
            for part in sampled.split(widths, -1)
        )

        def around(x: Tensor, mined: Tensor, dim: int) -> Tensor:
            before, behind = mined.split([cut, len(sampled) - cut], dim)
            return torch.cat([before, x, behind], dim)

        features = around(features, sampled.expand(contexts, -1, -1), 1)
        owner = around(owner, torch.full((contexts, len(sampled)), -1), 1)
        return features, owner, around(k, mined_k, 2), around(v, mined_v, 2)

    @torch.no_grad()
    def _select(self, features: Tensor, owner: Tensor, stage: Stage, rng: np.random.Generator) -> Tensor:
        """Indices [C, H, N] of the units that stay, in time order: those that the head scores highest, in 60 % of the
        batches with a bonus for units of facts."""
        scores = self.head(features).transpose(1, 2)
        if rng.random() < 0.6:
            scores = scores + 6.0 * (owner >= 0)[:, None]
        count = min(int(rng.integers(*stage.kept)), owner.shape[1])
        return scores.topk(count, -1).indices.sort(-1).values

    def _head_loss(self, features, owner, asked, labels, index) -> Tensor:
        scores = self.head(features).transpose(1, 2)
        labelled = (owner < 0) | asked.gather(1, owner.clamp(min=0))
        labelled = labelled[:, None].expand_as(scores).float()  # facts never asked for have no label
        if index is not None:
            scores, labelled = scores.gather(2, index), labelled.gather(2, index)
        return head_loss(scores, labels.clamp(0, 1), labelled)


def train(
    model: Recaller,
    head: RecallHead,
    writer: Writer,
    phase: Phase,
    *,
    seed: int,
    minutes: float | None = None,
    save: Callable[[], None] = lambda: None,
    evaluate: Callable[[], str] | None = None,
) -> None:
    """Train in place for one phase; the next stage begins once the running accuracy reaches `Stage.advance_at`.

    The same seed, build and thread count give the same model. `minutes` cuts the phase short on a slow
    machine: the learning rate then follows the clock.
    """
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters()}, {"params": head.parameters()}],
        lr=phase.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
    )
    step = Step(model, head, writer)
    number, accuracy, done, tokens = phase.start, None, 0, 0
    began = time.monotonic()
    while True:
        elapsed = time.monotonic() - began
        share = max(done / phase.steps, elapsed / (60 * minutes) if minutes else 0.0)
        if share >= 1:
            break
        rate = min(1.0, (done + 1) / 50) * min(1.0, max(0.02, (1 - share) / phase.cooldown))
        for group in optimizer.param_groups:
            group["lr"] = phase.learning_rate * rate
        replay = number > 0 and rng.random() < 0.15
        current = int(rng.integers(0, number)) if replay else number
        stage = phase.stages[current]
        batch = writer.batch(stage, rng)
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = step(batch, stage, rng, train_head=stage.head)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        tokens += batch.snippets.numel() + batch.tails.numel()
        if right is not None and current == number:
            accuracy = right if accuracy is None else 0.96 * accuracy + 0.04 * right
        if done % REPORT_EVERY == 0:
            print(
                f"{elapsed:7.1f} s  step {done}  stage {number}  {tokens / 1e6:.1f}M tokens"
                f"  loss {loss.item():.3f}  accuracy {accuracy or 0:.3f}  {tokens / max(elapsed, 1):.0f} tok/s",
                flush=True,
            )
        ready = accuracy is not None and accuracy > phase.stages[number].advance_at and done > 100
        if ready and number < len(phase.stages) - 1:
            print(f"{elapsed:7.1f} s  stage {number} done at step {done}", flush=True)
            number, accuracy = number + 1, None
        if done % EVALUATE_EVERY == 0:
            save()
            if evaluate is not None:
                print("  " + evaluate(), flush=True)
    save()


@torch.no_grad()
def quick_accuracy(model: Recaller, head: RecallHead, writer: Writer, stage: Stage, seed: int = 5) -> str:
    """Share of answer tokens right on held-out words and text, by size of the context."""
    out = []
    for size in (stage, replace(stage, kept=None)):
        rng = np.random.default_rng(seed)
        rights = []
        for _ in range(2):
            _, right = Step(model, head)(writer.batch(size, rng), size, rng, train_head=False)
            rights.append(right)
        out.append(f"{np.mean(rights):.3f}")
    return "held out, answer tokens right: " + " / ".join(out)
