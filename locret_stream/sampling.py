"""Sampling of the next token: transformers' logits processors, and noise that is a function of (seed, position)."""

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
    chain = LogitsProcessorList()
    if sampling.repetition_penalty is not None and sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature > 0:
        if sampling.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            chain.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1.0:
            chain.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p is not None:
            chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def sample(logits: Tensor, recent: list[int], position: int, sampling: Sampling, using: LogitsProcessorList,
           allowed: Tensor | None = None) -> int:
    """The next token id from logits [vocab] fp32.

    Args:
        recent: the last token ids, which a repetition penalty takes.
        position: absolute position of the token. The same (seed, position) always draws the same noise (Gumbel-max), so
            that a restored or repeated generation samples the same tokens as the first one.
        using: the `processors` of these settings.
        allowed: [vocab] bool, any device: the ids that may be chosen, before all settings; None: all.
    """
    scores = logits.float()[None]
    if allowed is not None:
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
    if using:
        ids = torch.tensor([recent or [0]], device=logits.device)
        scores = using(ids, scores)  # type: ignore[arg-type]  # transformers says LongTensor, which is no tensor's type
    if sampling.temperature > 0:
        key = hashlib.blake2b(f"{sampling.seed}/{position}".encode(), digest_size=8).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
        uniform = torch.rand(scores.shape, generator=noise, dtype=torch.float64).clamp_(1e-300, 1 - 1e-16)
        scores = scores.double() - (-uniform.log()).log().to(scores.device)
    return int(scores.argmax(-1))
