"""Which examples each step trains on, and which are held out: a pure function of data, seed and step. Knows no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.training.config import TrainConfig
from locret_stream.training.data import Example, background_ids, fit, with_query
from locret_stream.training.labels import SINKS


class Source:
    """Batches of training examples by step, and the held-out ones.

    A sequence is split by hash and visited in a new seeded order every epoch. Any other iterable is read once, in
    its own order: its first `held_out_max` examples are held out, and later ones equal to them are left out; after an
    interruption it must give the same examples again from its start (`read_past` skips and compares those that were
    used).

    Raises:
        ConfigError: too few usable examples. InvalidTokens: an id outside [0, vocab).

    Attributes:
        identity: digest of a sequence's content; of an iterable that of what is held out.
        held_out: examples to evaluate on, at least one. cut, skipped: counts so far, see `data.fit`.
    """

    def __init__(self, examples: Iterable[Example], config: TrainConfig, max_tokens: int, vocab: int,
                 held_out: Iterable[Example] | None = None):
        self._config, self._max_tokens, self._vocab = config, max_tokens, vocab
        self.cut = self.skipped = self.drawn = 0
        given = [] if held_out is None else list(self._fitting(held_out))
        self._excluded = {example.digest() for example in given}  # never trained on, evaluated on or not
        self.held_out = given[:config.held_out_max]
        identity = hashlib.blake2b(b"".join(example.digest() for example in given), digest_size=16)
        self._train: list[Example] | None = None
        self._rest: Iterator[Example] = iter(())
        if isinstance(examples, Sequence):
            self._train = self._split(list(self._fitting(examples)), held_out is None)
            for example in self._train + self.held_out:
                identity.update(example.digest())
                if config.label == "attention" and example.template is not None:  # no other label looks at it
                    identity.update(example.template.numpy().tobytes())
            self.identity = identity.hexdigest()
        else:
            self._rest = self._fitting(examples)
            for example in islice(self._rest, config.held_out_max if held_out is None else 0):
                self.held_out.append(example)
                self._excluded.add(example.digest())
                identity.update(example.digest())
            self.identity = f"stream {identity.hexdigest()}"
        if not self.held_out or self._train == []:
            raise ConfigError(f"train: found {len(self._train or []) + len(self.held_out)} usable examples "
                              f"({self.skipped} do not fit {max_tokens} tokens); expected at least one to train on and "
                              "one to evaluate on; equal ones are all on one side")
        self._used = hashlib.blake2b(digest_size=16)

    def _fitting(self, examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            example.expect_vocabulary(self._vocab)
            if self._config.query_tokens:
                example = with_query(example, self._config.query_tokens)
            fitted = fit(example, self._max_tokens)
            if fitted is None or (self._config.label == "attention" and fitted.answer_spans[-1][0] <= SINKS):
                self.skipped += 1
                continue
            self.cut += len(fitted.ids) < example.answer_spans[-1][1]
            yield fitted

    def _split(self, examples: list[Example], choose: bool) -> list[Example]:
        """The examples to train on; with `choose`, those of the smallest hashes become `held_out`."""
        by_hash = sorted((example.digest(), i) for i, example in enumerate(examples))
        if choose and len(examples) > 1:
            limit = int(self._config.held_out * 2**32)
            low = [i for digest, i in by_hash if int.from_bytes(digest[:4], "big") < limit] or [by_hash[0][1]]
            self._excluded = {examples[i].digest() for i in low}
            self.held_out = [examples[i] for i in low][:self._config.held_out_max]
        return [example for example in examples if example.digest() not in self._excluded]

    @property
    def size(self) -> int:
        """Number of examples to train on; of a stream, of those drawn so far."""
        return self.drawn if self._train is None else len(self._train)

    def draw(self) -> list[Example]:
        """The batch of the next step.

        Raises:
            ConfigError: a stream ended.
        """
        batch = [self._next() for _ in range(self._config.batch)]
        for example in batch:
            self._used.update(example.digest())
        return batch

    def _next(self) -> Example:
        if self._train is not None:
            epoch, index = divmod(self.drawn, len(self._train))
            if not index or not hasattr(self, "_order"):
                noise = torch.Generator().manual_seed((self._config.seed << 20) + epoch)
                self._order = torch.randperm(len(self._train), generator=noise).tolist()
            self.drawn += 1
            return self._train[self._order[index]]
        for example in self._rest:
            if example.digest() not in self._excluded:
                self.drawn += 1
                return example
        raise ConfigError(f"train: the examples ended after {self.drawn}; expected {self._config.steps} steps of "
                          f"{self._config.batch}")

    def used(self) -> str:
        """Digest of every example drawn so far, in order."""
        return self._used.hexdigest()

    def read_past(self, steps: int, used: str) -> None:
        """Draw the batches of `steps` steps and compare their digest with `used`.

        Raises:
            ConfigError: they are not the ones used before the interruption.
        """
        for _ in range(steps):
            self.draw()
        if self.used() != used:
            raise ConfigError(f"train: the examples of the first {steps} steps differ from those used before the "
                              "interruption; expected the same stream again, or another out folder, or restart=True")


class Plain:
    """Slices of a text about which nothing is asked: a pure function of the text, the seed and the step.

    Args:
        text: [N] token ids. vocab: of the model.

    Raises:
        ConfigError: a label, or heads that know the question, with which no plain text goes.
        InvalidTokens: an id outside the vocabulary.
    """

    def __init__(self, text: Tensor | Sequence[int], config: TrainConfig, vocab: int):
        if config.label != "attention":
            raise ConfigError(f"train: found a background and label {config.label!r}, which knows nothing of other "
                              "texts; expected none, or label 'attention'")
        if config.query_tokens:
            raise ConfigError("train: found a background and query_tokens: examples begin with a question, and a "
                              "background with none; expected one of them")
        self._ids, self._seed = background_ids(text, vocab), config.seed
        if not len(self._ids):
            raise ConfigError("train: the background is empty; expected some thousands of tokens of text")

    def digest(self) -> str:
        return hashlib.blake2b(self._ids.numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()

    def of_step(self, step: int, length: int) -> Tensor:
        """Ids [1, length] from a place that depends on the step; a text that ends goes on with its beginning."""
        noise = torch.Generator().manual_seed((self._seed << 20) + step)
        start = int(torch.randint(len(self._ids), (), generator=noise))
        return self._ids[(start + torch.arange(length)) % len(self._ids)][None]
