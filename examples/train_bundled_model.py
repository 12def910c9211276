"""Train the bundled model and its retaining heads from nothing but text and a seed.

    python examples/train_bundled_model.py --out my-model --text books/*.txt

Writes a tokenizer, a base model and its retaining head, which load with transformers and with
`Runtime.from_pretrained`. See `bundled_model/` for the parts: `data` writes the batches, `model` and
`circuits` hold the network and its starting weights, `pretrain` trains both, `export` writes.
Training reads nothing that the demo streams or asks: see `locret_stream.evaluation.words` and `haystack`.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bundled_model import chat, circuits, data, export, pretrain
from bundled_model.model import Recaller, Shape

from locret_stream.evaluation.facts import make_facts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="English text; else Python's own help topics")
    parser.add_argument("--minutes", type=float, help="end training sooner; without it, about 40 on 2 cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="a checkpoint of this recipe: run only the last phase on it")
    return parser.parse_args()


def tokenizer_lines(sources: list[tuple[str, float]], seed: int) -> Iterator[str]:
    """The texts that the vocabulary is learnt from: the streams, the fact sentences and the words of the template."""
    for text, _ in sources:
        yield from chat.segments(text[:2_500_000])
    rng = random.Random(seed)
    for fact in make_facts(rng, 12_000, held_out=False, digits_only=False):
        yield fact.sentence + "\n"
        yield fact.question
    for _ in range(3000):
        yield from ("user\n", "assistant\n", "system\n", "tool\n")
        yield from ('{"name": "lookup", "arguments": {"key": "', '"}}\n')


def card(arguments: argparse.Namespace, minutes: float, model: Recaller) -> str:
    texts = ", ".join(path.name for path in arguments.text) or "Python's help topics"
    return f"""# The bundled model

A Llama of {sum(p.numel() for p in model.parameters()):,} parameters that recalls facts from a stream, made by
`examples/train_bundled_model.py --seed {arguments.seed}` in {minutes:.0f} minutes on
{arguments.threads} cores ({platform.machine()}, torch {torch.__version__}).

Trained on: the training half of Python {platform.python_version()}'s standard library, {texts}, synthetic logs and
generated facts.
"""


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    began = time.monotonic()

    sources = data.gather_sources(arguments.text, arguments.seed)
    tokenizer = chat.train_tokenizer(tokenizer_lines(sources, arguments.seed), Shape.vocab)
    writer = data.Writer(tokenizer, sources, words=data.common_words(sources))
    held_out_sources = data.gather_sources(arguments.text, arguments.seed, held_out=True)
    held_out = data.Writer(tokenizer, held_out_sources, held_out=True)
    print(f"{time.monotonic() - began:7.1f} s  sources and tokenizer", flush=True)

    model = Recaller(Shape())
    circuits.initialise(model, arguments.seed)
    head = pretrain.RecallHead(model.head_features, 128, model.shape.kv_heads)
    checkpoint = arguments.out / "checkpoint.pt"
    arguments.out.mkdir(parents=True, exist_ok=True)
    first = 0
    if arguments.resume:
        saved = torch.load(arguments.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        head.load_state_dict(saved["head"])
        first = len(pretrain.PHASES) - 1

    def save() -> None:
        torch.save({"model": model.state_dict(), "head": head.state_dict()}, checkpoint)

    phases = pretrain.PHASES[first:]
    for number, phase in enumerate(phases, first):
        print(f"phase {number + 1} of {len(pretrain.PHASES)}", flush=True)
        pretrain.train(
            model,
            head,
            writer,
            phase,
            seed=arguments.seed + number,
            minutes=arguments.minutes and arguments.minutes / len(phases),
            save=save,
            evaluate=lambda: pretrain.quick_accuracy(model, head, held_out, pretrain.CURRICULUM[3]),
        )
    minutes = (time.monotonic() - began) / 60
    export.export(model, head, tokenizer, arguments.out / "model", card(arguments, minutes, model))
    print(f"{minutes * 60:7.1f} s  written to {arguments.out / 'model'}", flush=True)


if __name__ == "__main__":
    main()
