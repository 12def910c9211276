"""SnapKV: the units that the last queries attend to, and their neighbours (arXiv:2404.14469)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class SnapKV(Policy):
    """Score = softmax attention of the last `window` queries, summed, then averaged over `kernel` neighbours.

    Args:
        window: how many queries at the end of the chunk count, at most all of it. As many of the last units always
            stay, as far as the budget has one more unit beside them and the sinks.
        kernel: odd width of the average over neighbouring units; 1: no average.

    Deviations: the paper's window is the end of the prompt, here it is the end of each chunk, which does not know what
    later chunks ask (so it does worse here than on whole prompts); only kept units are neighbours; query heads that
    share a key share their score (the sum).
    """

    name = "snapkv"
    needs = frozenset({"column_sums"})
    stateful = True
    alone = True

    def __init__(self, window: int = 32, kernel: int = 5):
        self.check_knob(window >= 1, "window", window, "at least 1 query")
        self.check_knob(kernel >= 1 and kernel % 2 == 1, "kernel", kernel, "an odd width, at least 1")
        self.window, self.kernel = window, kernel

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return sinks, max(stabilizers, min(self.window, budget - sinks - 1))

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None, "declared in needs"
        new = chunk.k.shape[1]
        window = min(self.window, new)
        received = chunk.column_sums(slice(new - window, new))
        if received.shape[1] == window:
            return received
        before = F.avg_pool1d(received[:, None, :-window], self.kernel, stride=1, padding=self.kernel // 2)
        return torch.cat([before[:, 0], received[:, -window:]], dim=1)
