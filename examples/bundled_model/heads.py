"""The retaining head of the recall layer, fitted to the finished base model.

Positives come from contexts whose facts are all asked: a unit's label is the largest attention that a
row predicting an answer (its end included) pays to it. Negatives come from a large pool of text with no
facts in it, of which every round takes those units that the head so far would keep.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .data import Stage, Writer
from .model import SINKS, Kept, Recaller
from .pretrain import MARGIN, RecallHead, head_loss, score_all, stack_features

ASKED = Stage(2, 4, 256, (16, 34), 6, 352, recent=(24, 120))


@dataclass
class Labelled:
    """Units with what they were worth: features [N, F] bf16, labels [N, H], weights [N, H]."""

    features: Tensor
    labels: Tensor
    weights: Tensor


@torch.no_grad()
def label_contexts(model: Recaller, writer: Writer, batches: int, seed: int) -> Labelled:
    """Features and labels of contexts that were asked about; units of facts that were not asked weigh nothing."""
    rng = np.random.default_rng(seed)
    features, labels, weights = [], [], []
    for _ in range(batches):
        batch = writer.batch(ASKED, rng)
        contexts, snippets, length = batch.snippets.shape
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = model.snippet_features(batch.snippets.view(contexts * snippets, length))
            q, k, v = (
                x[:, :, SINKS:].unflatten(0, (contexts, snippets)).transpose(1, 2).flatten(2, 3) for x in (q, k, v)
            )
            tails = batch.tails.shape[0] // contexts
            _, attention = model.tail_states(batch.tails, Kept(k, v), batch.answer_rows)
        mass = attention.amax(2).unflatten(0, (contexts, tails)).amax(1)
        owner = batch.unit_fact.flatten(1)
        known = (owner < 0) | batch.asked.gather(1, owner.clamp(min=0))
        late = (torch.arange(length - SINKS) >= MARGIN).repeat(snippets)
        known = known & late
        features.append(stack_features(q, k, v).flatten(0, 1).bfloat16())
        labels.append(mass.transpose(1, 2).flatten(0, 1))
        weights.append(known.flatten().float()[:, None].expand(-1, labels[-1].shape[1]))
    return Labelled(torch.cat(features), torch.cat(labels), torch.cat(weights))


def fit_head(
    head: RecallHead,
    asked: Labelled,
    plain: Tensor,
    *,
    rounds: int = 4,
    steps: int = 250,
    batch: int = 8192,
    hard_share: float = 0.04,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> None:
    """Fit in place; each round mines the `hard_share` of the plain units that score highest."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=0.01)
    done, total, began = 0, rounds * steps, time.monotonic()
    half = batch // 2
    for number in range(rounds):
        top = score_all(head, plain).amax(-1).topk(int(hard_share * len(plain))).indices
        running = 0.0
        for _ in range(steps):
            some = torch.randint(len(asked.features), (half,), generator=rng)
            hard = top[torch.randint(len(top), (half // 2,), generator=rng)]
            easy = torch.randint(len(plain), (half // 2,), generator=rng)
            features = torch.cat([asked.features[some], plain[hard], plain[easy]])
            labels = torch.cat([asked.labels[some], torch.zeros(2 * (half // 2), asked.labels.shape[1])])
            weights = torch.cat([asked.weights[some], torch.ones(2 * (half // 2), asked.labels.shape[1])])
            with torch.autocast("cpu", torch.bfloat16):
                scores = head(features).float()
            loss = head_loss(scores, labels.clamp(0, 1), weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            rate = min(1.0, done / 30) * max(0.02, 1 - done / total)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * rate
            running += loss.item() / steps
        seconds = time.monotonic() - began
        print(f"{seconds:7.1f} s  head round {number + 1} of {rounds}  loss {running:.4f}", flush=True)
