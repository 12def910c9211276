"""Measure the means of a model's keys and store them with its heads: `python research/key_means.py MODEL HEADS`.

Reads 16 pieces of 1,024 tokens of those modules of Python's standard library that models may be trained on.
`train-heads` does the same with its own examples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from locret_stream.cli.loading import load
from locret_stream.evaluation.haystack import stdlib_lines, training_modules
from locret_stream.training import Example, store_key_means

PIECES, TOKENS = 16, 1_024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or the name of a model")
    parser.add_argument("heads", type=Path, help="the folder of its heads")
    options = parser.parse_args()
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    examples = []
    for seed in range(PIECES):
        ids: list[int] = []
        for line in stdlib_lines(seed, training_modules()):
            ids += tokenizer(line, add_special_tokens=False).input_ids
            if len(ids) >= TOKENS:
                break
        examples.append(Example(torch.tensor(ids[:TOKENS]), ((TOKENS - 1, TOKENS),)))
    means = store_key_means(model, options.heads, examples)
    print(f"{options.heads}: means of {PIECES * TOKENS:,} tokens, {tuple(means.shape)}, "
          f"largest {means.abs().max():.2f}")


if __name__ == "__main__":
    main()
