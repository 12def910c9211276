"""The means of a model's keys, which units in few bits are coded without: measured once, and stored with the heads.

Keys have channels whose mean is many times their spread, on which codes of few bits would spend their range. A mean
that was measured beforehand serves all contexts, which then hold none of their own (`benchmarks/equal_bytes.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.errors import ConfigError
from locret_stream.files import alone_in
from locret_stream.heads import RetainingHeads
from locret_stream.heads.module import write_key_means
from locret_stream.models import Attachment, Attended, LayerCall, attached
from locret_stream.training.data import Example
from locret_stream.training.labels import Masks, window_masks

EXAMPLES, TOKENS = 32, 1_024  # many texts, and no more of each than takes a moment


@torch.no_grad()
def store_key_means(model: PreTrainedModel | Attachment, heads: str | os.PathLike[str],
                    examples: Sequence[Example]) -> Tensor:
    """Measure the means of keys before RoPE and write them into the folder of heads, as key_means.safetensors.

    Snapshots of units in few bits name the means that they were made with, so that those made before cannot be resumed
    with these heads any more; exact units are not concerned.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        heads: a folder of retaining heads of any kind.
        examples: texts like those that will be read; of the first 32 of them at most 1,024 tokens each are read.

    Returns:
        [L, H, D] fp32.

    Raises:
        ConfigError: no example. HeadsMismatch: no heads, or those of another model. InvalidTokens: ids outside the
            vocabulary.
    """
    folder = Path(heads)
    with attached(model) as attachment, alone_in(folder):
        attachment.expect_one_device("key means")
        attachment.check_heads(RetainingHeads.load(folder))
        means = measure_key_means(attachment, examples)
        write_key_means(folder, means)
    return means


def measure_key_means(attachment: Attachment, examples: Sequence[Example]) -> Tensor:
    """[L, H, D] fp32, of the first tokens of the first examples; summed in float64. Raises as above."""
    read = examples[:EXAMPLES]
    for example in read:
        example.expect_vocabulary(attachment.shape.vocab)
    ids = [example.ids[:min(TOKENS, attachment.shape.window)] for example in read]
    if not ids:
        raise ConfigError("key means: found no example; expected one at least")
    shape, tables = attachment.shape, attachment.tables(max(map(len, ids)))
    unit = shape.one_unit("means of keys")
    sums = torch.zeros(shape.layers, unit.kv_heads, unit.key_dim, dtype=torch.float64)

    for sequence in ids:
        masks = window_masks(len(sequence), attachment.device)

        def step(call: LayerCall, masks: Masks = masks) -> Attended:
            if call.keeps:
                sums[call.layer] += call.k[0].double().sum(1).cpu()
            return call.to_itself(tables, masks(shape.units[call.layer]))

        attachment.hidden(sequence[None].to(attachment.device), step)
    return (sums / sum(map(len, ids))).float()
