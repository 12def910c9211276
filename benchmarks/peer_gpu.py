"""kvpress' side of gpu.py, which starts it in an environment that has kvpress: one process, all of its methods in turn.

The model has the shape and the random weights of gpu.py's, the recipe is that of `peer_kvpress.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from peer_kvpress import BASES, bounded, versions
from timing import random_llama, serve
from transformers import DynamicCache


@torch.inference_mode()
def turns(settings: SimpleNamespace) -> Iterator[dict[str, Any]]:
    """First the versions, all warm; then, over and over, what each method measures."""
    device, chunk = torch.device(settings.device), settings.sizes["chunk"]
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    model = random_llama(settings.sizes, device, getattr(torch, settings.dtype))
    ids = torch.tensor(settings.ids, device=device)
    bases = {name: base() for name, base in BASES.items()}

    def measure(base: Any, chunks: int, steps: int) -> dict[str, float]:
        cache, press = DynamicCache(), bounded(base, settings.budget)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        wait()
        began = time.perf_counter()
        with press(model):
            for n in range(chunks):
                positions = torch.arange(n * chunk, (n + 1) * chunk, device=device)[None]
                model.model(input_ids=ids[n % len(ids)][None], position_ids=positions, past_key_values=cache)
        wait()
        row = {"tok_per_s": chunks * chunk / (time.perf_counter() - began),
               "units": max(layer.get_seq_length() for layer in cache.layers)}
        token, began = ids[:1, :1], time.perf_counter()
        for step in range(chunks * chunk, chunks * chunk + steps):
            out = model(input_ids=token, position_ids=torch.tensor([[step]], device=device), past_key_values=cache)
            token = out.logits[:, -1:].argmax(-1)
            token.item()  # whoever writes answers needs it
        row["decode_ms"] = 1e3 * (time.perf_counter() - began) / steps
        return row | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {})

    for base in bases.values():
        measure(base, 3, 3)
    yield versions()
    while True:
        for base in bases.values():
            yield measure(base, settings.chunks, settings.steps)


if __name__ == "__main__":
    serve(turns)
