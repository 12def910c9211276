"""kvpress' side of peers.py, which starts it in an environment that has kvpress: `--case kvzap`, `knorm` or `snapkv`.

kvpress is bounded over a stream when a DecodingPress that compresses at every step is fed chunk by chunk with explicit
positions. All of its methods that score units work inside it; tokens are generated outside, as KVzap and SnapKV fail on
a step of one token there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from timing import answer, stock, surrogate_width

WINDOW = 64  # last queries that SnapKV looks from


class RandomKVzap(kvpress.KVzapPress):
    """KVzap with a surrogate of random weights and the published shape: the same cost, nothing to download."""

    def post_init_from_model(self, model: Any) -> None:
        if getattr(self, "kvzap_model", None) is None:
            torch.manual_seed(0)
            config = model.config
            self.kvzap_model = KVzapModel(KVzapConfig(
                input_dim=config.hidden_size, hidden_dim=surrogate_width(config.hidden_size),
                output_dim=config.num_key_value_heads, n_modules=config.num_hidden_layers))
            self.kvzap_model.eval().requires_grad_(False).to(model.device, model.dtype)


BASES = {"kvzap": RandomKVzap, "knorm": kvpress.KnormPress, "snapkv": lambda: kvpress.SnapKVPress(window_size=WINDOW)}


def bounded(base: kvpress.ScorerPress, budget: int) -> kvpress.DecodingPress:
    """The recipe: at every forward the cache is cut to the budget."""
    return kvpress.DecodingPress(base_press=base, compression_interval=1, target_size=budget,
                                 hidden_states_buffer_size=1)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=BASES, required=True)
    base = BASES[parser.parse_args().case]()

    def case(settings: SimpleNamespace) -> dict[str, Any]:
        measured = stock(settings, bounded(base, settings.budget))
        surrogate = getattr(base, "kvzap_model", None)
        return measured | {"parameters": sum(p.numel() for p in surrogate.parameters()) if surrogate else 0,
                           "versions": versions()}

    answer(case)


if __name__ == "__main__":
    main()
