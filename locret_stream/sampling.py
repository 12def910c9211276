"""Choosing the next token: transformers' own logits processors, and noise keyed by (seed, position)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from locret_stream.config import Sampling


def processors(sampling: Sampling) -> LogitsProcessorList:
    """The processors of transformers for these settings, in the order that `generate` uses."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty is not None and sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature > 0:
        if sampling.temperature != 1.0:
            found.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1.0:
            found.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p is not None:
            found.append(MinPLogitsWarper(sampling.min_p))
    return found


def sample(logits: Tensor, recent: list[int], position: int, sampling: Sampling, using: LogitsProcessorList) -> int:
    """The next token id from logits [vocab] fp32.

    Args:
        recent: the last token ids, what a repetition penalty looks at.
        position: absolute position of the token to choose. The same (seed, position) always draws the same noise, so
            a restored or repeated generation samples what the first one did (Gumbel-max).
    """
    scores = logits.float()[None]
    if using:
        ids = torch.tensor([recent or [0]], device=logits.device)
        scores = using(ids, scores)  # type: ignore[arg-type]  # transformers says LongTensor, a type no tensor has
    if sampling.temperature > 0:
        key = hashlib.blake2b(f"{sampling.seed}/{position}".encode(), digest_size=8).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
        uniform = torch.rand(scores.shape, generator=noise, dtype=torch.float64).clamp_(1e-300, 1 - 1e-16)
        scores = scores.double() - (-uniform.log()).log().to(scores.device)
    return int(scores.argmax(-1))
