"""Which example is trained on when, and which are held out: a pure function of data, seed and step. Knows no model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from locret_stream.errors import ConfigError, InvalidTokens
from locret_stream.training.config import TrainConfig
from locret_stream.training.data import Example, fit, with_query


class Source:
    """Batches of training examples by step, and the held-out ones.

    A sequence is split by hash and visited in a new seeded order every epoch. Any other iterable is read once, in
    its own order: its first `held_out_max` examples are held out, and so is any later one equal to them; after an
    interruption it must give the same examples again from its start (those already used are read past and compared).

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
        self._known = {example.digest() for example in given}  # what is not evaluated on is not trained on either
        self.held_out = given[:config.held_out_max]
        chain = hashlib.blake2b(digest_size=16)
        for example in given:
            chain.update(example.digest())
        self._train: list[Example] | None = None
        self._rest: Iterator[Example] = iter(())
        if isinstance(examples, Sequence):
            self._train = self._split(list(self._fitting(examples)), held_out is None)
            for example in self._train + self.held_out:
                chain.update(example.digest())
            self.identity = chain.hexdigest()
        else:
            self._rest = self._fitting(examples)
            while held_out is None and len(self.held_out) < config.held_out_max:
                example = next(self._rest, None)
                if example is None:
                    break
                self.held_out.append(example)
                self._known.add(example.digest())
                chain.update(example.digest())
            self.identity = f"stream {chain.hexdigest()}"
        if not self.held_out or self._train == []:
            raise ConfigError(f"train: found {len(self._train or []) + len(self.held_out)} usable examples "
                              f"({self.skipped} do not fit {max_tokens} tokens); expected at least one to train on and "
                              "one to evaluate on; equal ones are all on one side")
        self._chain = hashlib.blake2b(digest_size=16)

    def _fitting(self, examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            largest = int(example.ids.max())
            if largest >= self._vocab:
                raise InvalidTokens(f"{example.where or 'example'}: found token id {largest}; expected ids below the "
                                    f"model's vocabulary of {self._vocab}")
            if self._config.query_tokens:
                example = with_query(example, self._config.query_tokens)
            fitted = fit(example, self._max_tokens)
            if fitted is None:
                self.skipped += 1
                continue
            self.cut += len(fitted.ids) < example.answer_spans[-1][1]
            yield fitted

    def _split(self, examples: list[Example], choose: bool) -> list[Example]:
        """The training part; fills held_out with the examples of the smallest hashes if it is ours to choose."""
        by_hash = sorted((example.digest(), i) for i, example in enumerate(examples))
        if choose and len(examples) > 1:
            limit = int(self._config.held_out * 2**32)
            low = [i for digest, i in by_hash if int.from_bytes(digest[:4], "big") < limit] or [by_hash[0][1]]
            self._known = {examples[i].digest() for i in low}
            self.held_out = [examples[i] for i in low][:self._config.held_out_max]
        return [example for example in examples if example.digest() not in self._known]

    @property
    def size(self) -> int:
        """Examples there are to train on; of a stream, those drawn so far."""
        return self.drawn if self._train is None else len(self._train)

    def draw(self) -> list[Example]:
        """The batch of the next step.

        Raises:
            ConfigError: a stream ended.
        """
        batch = [self._next() for _ in range(self._config.batch)]
        for example in batch:
            self._chain.update(example.digest())
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
            if example.digest() not in self._known:
                self.drawn += 1
                return example
        raise ConfigError(f"train: the examples ended after {self.drawn}; expected {self._config.steps} steps of "
                          f"{self._config.batch}")

    def used(self) -> str:
        """Digest of every example drawn so far, in order."""
        return self._chain.hexdigest()

    def read_past(self, steps: int, used: str) -> None:
        """Draw and drop the batches of `steps` steps.

        Raises:
            ConfigError: they are not the ones used before the interruption.
        """
        for _ in range(steps):
            self.draw()
        if self.used() != used:
            raise ConfigError(f"train: the examples of the first {steps} steps differ from those used before the "
                              "interruption; expected the same stream again, or another out folder, or restart=True")
