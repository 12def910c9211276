"""Train a small Llama that does the marker tasks of `locret_stream.evaluation`, from nothing but text and a seed.

    python -m research.train_recall_model --out recall-model --text books/*.txt
    python -m research.train_recall_model --out seeded --text books/*.txt --seeded --minutes 70

It starts from plain random weights, learns to look things up from `recall_model.lessons`, with Muon in the place of
AdamW for what is inside the layers, and then from the tasks in text, of 64 tokens at first and of 1,024 as accuracy or
time allows. Numbers of three digits are one token. `--seeded` starts from the circuits of `recall_model.circuits`, made
by hand, with AdamW alone, and a digit is a token: another model, to check what is found about memory with the first.
Stopped, a run goes on from where it was by the same command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import time
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from locret_stream.evaluation.haystack import read_module, training_modules
from locret_stream.snapshot.identity import digest_text
from locret_stream.training import (
    AllocationConfig,
    Example,
    TrainConfig,
    TuneConfig,
    TuneResult,
    allocate,
    is_tuned,
    train_heads,
    tune,
)
from research.recall_model.circuits import initialise
from research.recall_model.data import COPY_WEIGHT, Writer, lines_of_figures, save_tokenizer, train_tokenizer
from research.recall_model.lessons import DONE, FIRST, Lessons

STAGES = (64, 128, 256, 512, 1024)
WINDOW = 1280
ALLOCATE_EXAMPLES, ALLOCATE_ANSWERS = 24, 8  # examples that ask so much: of others any division forgets nothing
MUON_LR = 0.01
STATE = ("step", "stage", "spent", "seen", "accuracy", "lessons")  # of a run, beside weights and optimisers
LESSON_TOKENS = 1024  # of a step
LATEST = (0.2, 0.3, 0.4, 0.5)  # shares of the time at which sequences grow, whatever the accuracy
COOLDOWN = 0.35  # of the time, in which the learning rate falls to nothing


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="English text; its last 5 %% is held out")
    parser.add_argument("--seeded", action="store_true", help="start from circuits made by hand")
    parser.add_argument("--minutes", type=float, default=96, help="of training (default 96)")
    parser.add_argument("--advance", type=float, default=0.9, help="accuracy at which sequences grow (default 0.9)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW (default 3e-3)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step (default 8192)")
    parser.add_argument("--vocab", type=int, help="tokens (default 2816, of which 1,000 are numbers; seeded 1664)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads-steps", type=int, default=800, help="of each set of retaining heads (default 800)")
    parser.add_argument("--allocate-units", type=int, default=128,
                        help="budget that is divided among the layers with each set of heads, and half of it once they "
                             "are tuned; 0: none (default 128)")
    parser.add_argument("--tune-steps", type=int, default=150,
                        help="of a second stage with eviction going on, at half that budget and behind a long text; "
                             "0: none (default 150)")
    arguments = parser.parse_args()
    for name in ("minutes", "tokens", "threads"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name} is {getattr(arguments, name)}; expected more than 0")
    arguments.vocab = arguments.vocab or (1664 if arguments.seeded else 2816)
    return arguments


def split_text(paths: list[Path], code: bool = True) -> tuple[str, str]:
    """(for training, held out), by place; with `code` the training part has sources of the standard library too, the
    half that no evaluation reads: code is full of brackets and digits, which are no marks."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    cuts = [int(0.95 * len(text)) for text in texts]
    modules = [read_module(name) for name in training_modules()] if code else []
    return ("\n".join([*(text[:cut] for text, cut in zip(texts, cuts, strict=True)), *modules]),
            "\n".join(text[cut:] for text, cut in zip(texts, cuts, strict=True)))


def with_figures(text: str, seed: str) -> str:
    """The text, and behind it lines of figures: one line of five."""
    return "\n".join([text, *lines_of_figures(seed, text.count("\n") // 4)])


def build(vocab: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=WINDOW, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5}, eos_token_id=0, pad_token_id=0, bos_token_id=None))


def losses(model: LlamaForCausalLM, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted loss, whether each answer token was right, whether each copied one was)."""
    inputs, targets, weights, answers = batch
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(inputs, use_cache=False).last_hidden_state
        chosen = weights > 0
        logits = F.linear(hidden[chosen], model.model.embed_tokens.weight)
    each = F.cross_entropy(logits.float(), targets[chosen], reduction="none")
    right = logits.argmax(-1) == targets[chosen]
    loss = (each * weights[chosen]).sum() / weights[chosen].sum()
    return loss, right[answers[chosen]], right[weights[chosen] == COPY_WEIGHT]


@torch.no_grad()
def held_out_accuracy(model: LlamaForCausalLM, writer: Writer) -> str:
    """Answer tokens right by length, on text and sequences never seen."""
    return "  ".join(f"{length}: {losses(model, writer.batch(length, 8, 0.0))[1].float().mean():.3f}"
                     for length in STAGES[2:])


def optimizers_of(model: LlamaForCausalLM, lr: float, seeded: bool) -> list[torch.optim.Optimizer]:
    """AdamW; without circuits, Muon for the matrices inside the layers, which AdamW alone leaves at chance for long."""
    inside = [] if seeded else [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if not any(weight is each for each in inside)]
    muon = [torch.optim.Muon(inside, lr=MUON_LR, weight_decay=0.01)] if inside else []
    return [torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.01), *muon]


class Run:
    """One training, resumable: model, optimisers, lessons, stage and clock. `begun_with` is what may not change."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer, text: str):
        self.arguments = arguments
        self.begun_with = {"seeded": arguments.seeded, "seed": arguments.seed, "vocab": tokenizer.get_vocab_size(),
                           "text": digest_text(text)}
        self.model = build(tokenizer.get_vocab_size())
        initialise(self.model, seeded=arguments.seeded, seed=arguments.seed)
        self.optimizers = optimizers_of(self.model, arguments.lr, arguments.seeded)
        self.rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.step, self.stage, self.spent, self.seen, self.accuracy = 0, 0, 0.0, 0, None
        self.lessons = DONE if arguments.seeded else FIRST
        self.stopped = False  # set by Ctrl-C: heeded between two updates
        self.file = arguments.out / "checkpoint.pt"
        if self.file.is_file():
            checkpoint = torch.load(self.file, weights_only=True)
            for name, value in self.begun_with.items():
                before = checkpoint["begun_with"][name]
                if before != value:
                    raise SystemExit(f"{self.file} is of a run with {name} {before}; found {value}: expected the same, "
                                     "or another --out")
            self.model.load_state_dict(checkpoint["model"])
            for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            for name in STATE:
                setattr(self, name, checkpoint[name])
            print(f"goes on at step {self.step} after {self.spent / 60:.1f} minutes", flush=True)

    def save(self) -> None:
        part = self.file.with_suffix(".part")
        torch.save({"begun_with": self.begun_with, "model": self.model.state_dict(),
                    "optimizers": [each.state_dict() for each in self.optimizers]}
                   | {name: getattr(self, name) for name in STATE}, part)
        part.replace(self.file)

    def update(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], share: float) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the optimisers when `share` of the time has passed; returns what `losses` does."""
        rate = min(1.0, (self.step + 1) / 100) * min(1.0, max(0.02, (1 - share) / COOLDOWN))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, own in zip(groups, self.rates, strict=True):
            group["lr"] = own * rate
        loss, answered, copied = losses(self.model, batch)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.seen += batch[0].numel()
        return loss, answered, copied

    def train(self, writer: Writer, held_out: Writer) -> None:
        arguments, last = self.arguments, time.monotonic()
        lessons = None if self.lessons == DONE else Lessons(
            writer.tokenizer, f"lessons {arguments.seed}, from step {self.step}", self.lessons)
        while (share := self.spent / (60 * arguments.minutes)) < 1 and not self.stopped:
            if lessons and lessons.now:
                at = f"lesson {lessons.now.name}, {self.lessons[1]} keys"
                loss, answered, copied = self.update(lessons.batch(LESSON_TOKENS), share)
                lessons.heed(answered, copied)
                self.lessons, self.accuracy = lessons.state, lessons.answered
            else:
                at = f"length {STAGES[self.stage]}"
                loss = self.learn(writer, share)
            now = time.monotonic()
            self.spent, last = self.spent + now - last, now
            if self.step % 50 == 0:
                print(f"{self.spent:7.1f} s  step {self.step}  {at}  {self.seen / 1e6:.1f}M tokens  "
                      f"loss {loss.item():.3f}  accuracy {self.accuracy or 0:.3f}", flush=True)
            if self.step % 500 == 0:
                self.save()
                print("  held out, answer tokens right: " + held_out_accuracy(self.model, held_out), flush=True)
        self.save()

    def learn(self, writer: Writer, share: float) -> Tensor:
        """An update with the tasks in text, at the length of this stage or an earlier one; the next stage, if due."""
        replay = self.stage > 0 and writer.rng.random() < 0.2
        length = STAGES[writer.rng.randrange(self.stage) if replay else self.stage]
        tokens = min(self.arguments.tokens, max(4096, 8 * length))
        loss, right, _ = self.update(writer.batch(length, max(1, tokens // length), copies=0.15), share)
        if len(right) and not replay:
            share_right = right.float().mean().item()
            self.accuracy = share_right if self.accuracy is None else 0.95 * self.accuracy + 0.05 * share_right
        if self.stage < len(LATEST) and ((self.accuracy or 0) > self.arguments.advance or share > LATEST[self.stage]):
            self.stage, self.accuracy = self.stage + 1, None
        return loss


HEADS = {"heads": {}, "heads-hidden": {"features": "hidden"},
         "heads-retention": {"output": "retention", "features": "hidden"}}  # of locret, kvzap and trimkv
LABEL = "logprob"  # of the heads that are kept in research/models; "zscore", the default, has proved better since


def divide(model: LlamaForCausalLM, heads: Path, examples: list[Example], division: AllocationConfig,
           background: Tensor) -> None:
    made = allocate(model, heads, examples, division, background=background)
    print(f"  units by layer {made.units}: loss {made.measured['divided'].loss:.3f}, "
          f"evenly {made.measured['even'].loss:.3f}", flush=True)


def tune_heads(arguments: argparse.Namespace, model: LlamaForCausalLM, tokenizer: Tokenizer, name: str, text: str,
               unseen: str) -> TuneResult:
    fades = HEADS[name].get("output") == "retention"
    config = TuneConfig(units=arguments.allocate_units // 2, chunk_size=128, steps=arguments.tune_steps, batch=2,
                        lr=2e-3 if fades else 5e-4, max_tokens=STAGES[-1] + 1)
    writer, measured = (Writer(tokenizer, part, f"tuning {arguments.seed}") for part in (text, unseen))
    background, tokens = None, config.background_tokens
    if not fades:  # of what was never trained on first: that is measured with
        background = torch.cat([measured.background(tokens),
                                writer.background(-(-config.steps // config.renew_every) * tokens)])
    made = tune(model, arguments.out / name, writer.examples(STAGES[-1]), config, background=background,
                held_out=list(itertools.islice(measured.examples(STAGES[-1]), config.examples)))
    print(f"  tuned: loss {made.before.loss:.3f} before, {made.after.loss:.3f} after, "
          f"{'kept' if made.better else 'dropped'}", flush=True)
    return made


def train_all_heads(arguments: argparse.Namespace, tokenizer: Tokenizer, text: str, unseen: str) -> None:
    """One folder of retaining heads for each policy that takes any, and with each what every layer is to get of the
    budget. Part of what they read is figures."""
    text, unseen = with_figures(text, f"heads {arguments.seed}"), with_figures(unseen, f"held out {arguments.seed}")
    model = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    for name, more in HEADS.items():
        config = TrainConfig(**{"label": LABEL, "steps": arguments.heads_steps, "width": 128,
                                "input_norm": True, "bias": True, "batch": 4, "lr": 2e-3, "warmup": 0.1,
                                "max_tokens": STAGES[-1] + 1} | more)
        examples = Writer(tokenizer, text, f"heads {arguments.seed}").examples(STAGES[-1])
        result = train_heads(model, examples, arguments.out / name, config)
        print(f"{name}: top-10 % overlap {result.overlap_before:.3f} before, {result.overlap:.3f} after", flush=True)
        division = None
        if arguments.allocate_units:
            division = AllocationConfig(units=arguments.allocate_units, chunk_size=128, sinks=4, stabilizers=4,
                                        examples=ALLOCATE_EXAMPLES)
            fresh = (example for example in Writer(tokenizer, unseen, f"allocation {arguments.seed}").examples(
                STAGES[-1]) if len(example.answer_spans) >= ALLOCATE_ANSWERS)
            fresh = list(itertools.islice(fresh, ALLOCATE_EXAMPLES))
            tokens = 2 * division.background_tokens
            filled = Writer(tokenizer, unseen, f"allocation {arguments.seed}").background(tokens)
            if not (arguments.tune_steps and is_tuned(arguments.out / name)):
                divide(model, arguments.out / name, fresh, division, filled)
        if division and arguments.tune_steps:
            tuned = tune_heads(arguments, model, tokenizer, name, text, unseen)
            if tuned.better:  # at the budget of the tuning: the tighter one, where shares matter most
                division = msgspec.structs.replace(division, units=tuned.config.units)
            divide(model, arguments.out / name, fresh, division, filled)  # at once, unless the heads changed


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text, unseen = split_text(arguments.text)
    own = arguments.out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(own)) if own.is_file() else train_tokenizer(
        "\n".join(text.split("\n")[::5]), arguments.vocab, digits=1 if arguments.seeded else 3)
    save_tokenizer(tokenizer, arguments.out, WINDOW)
    run = Run(arguments, tokenizer, text)
    writer = Writer(tokenizer, text, f"training {arguments.seed}, from step {run.step}")
    before = signal.signal(signal.SIGINT, lambda *_: setattr(run, "stopped", True))
    run.train(writer, Writer(tokenizer, unseen, "held out"))
    signal.signal(signal.SIGINT, before)
    if run.stopped:
        raise SystemExit(f"stopped at step {run.step}; the same command goes on")
    run.model.to(torch.bfloat16).save_pretrained(arguments.out)
    record = arguments.out / "training.json"
    if record.is_file() and json.loads(record.read_bytes())["steps"] != run.step:
        for name in HEADS:  # those of the model as it was
            shutil.rmtree(arguments.out / name, ignore_errors=True)
    record.write_text(json.dumps({
        "seeded": arguments.seeded, "steps": run.step, "tokens": run.seen, "minutes": run.spent / 60,
        "length": STAGES[run.stage], "accuracy": run.accuracy, "seed": arguments.seed}, indent=1) + "\n")
    train_all_heads(arguments, tokenizer, text, unseen)


if __name__ == "__main__":
    main()
