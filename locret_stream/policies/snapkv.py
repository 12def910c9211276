"""SnapKV: units that the last queries attend to, with their neighbours (arXiv:2404.14469)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.policies.base import Chunk, Policy


class SnapKV(Policy):
    """Score = softmax attention of the last `window` queries, summed, then averaged over `kernel` neighbours.

    Args:
        window: queries at the end of the chunk that observe, at most all of it. As many of the last units always stay,
            as far as the budget has one more beside them and the sinks.
        kernel: odd width of the average over neighbouring units; 1 is none.

    Deviations: the end of the prompt is the end of each chunk, so what later chunks will ask is not known (the reason
    why it does worse here than on whole prompts); neighbours are those that are held; heads that share keys share their
    score (the sum).
    """

    name = "snapkv"
    needs = frozenset({"column_sums"})
    stateful = True

    def __init__(self, window: int = 32, kernel: int = 5):
        if window < 1:
            raise ConfigError(f"policy 'snapkv': window is {window!r}; expected at least 1 query")
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"policy 'snapkv': kernel is {kernel!r}; expected an odd width, at least 1")
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
