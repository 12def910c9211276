"""A context without a model, for tests of the store: units with random K and V that come and go as under a policy.

Everything about it follows from its seed and its number of tokens, so a process that died can be asked what it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from locret_stream.errors import StoreError
from locret_stream.snapshot import (
    Branch,
    Frame,
    Geometry,
    Identity,
    LayerUnits,
    Moment,
    Restored,
    Save,
    Snapshot,
    Store,
)
from locret_stream.snapshot import branch as branch_module
from locret_stream.snapshot.format import digest
from locret_stream.snapshot.local import LocalFiles, Posix
from locret_stream.snapshot.log import Spool, read_log
from locret_stream.snapshot.pages import PAGE_BYTES
from locret_stream.snapshot.remote import RemoteFiles

GEOMETRY = Geometry.even(2, 2, 4, torch.float32)
IDENTITY = Identity(**dict.fromkeys(Identity.__struct_fields__, "toy"))
BUDGETS = (11, 7)
CHUNK = 4
KEY = "5a" * 32
MOST = 1 << 20  # bytes that a test reads of one file
HOSTILE_NAMES = ("../x", "..", ".", "a/b", "/etc/passwd", "\x00", "lock", "key", "branch", "m", "a\nb", "ключ",
                 "😀" * 256, "x" * 256, " ", "s-" + "0" * 32, ".tmp-1", "CON", "%2e%2e", "a\\b")


class Unsynced(Posix):
    """Makes nothing durable, for tests of what does not depend on it: they run many times as fast."""

    def fsync(self, handle: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


def local_store(root: Path | str, posix: Posix | None = None, **options: object) -> Store:
    """A store in a folder, not durable unless told how."""
    return Store(root, files=LocalFiles(root, posix or Unsynced()), **options)


class _AtOnce:
    """An executor that has no thread: what is submitted has run when `submit` returns."""

    def __init__(self, workers: int, thread_name_prefix: str = ""):
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        pass

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@contextmanager
def closed_spools(threads: bool = True) -> Iterator[Callable[[], None]]:
    """Close the spool of every owner that a test left open, at the end and whenever what this gives is called.

    Args:
        threads: whether pages are read on a thread, as they are; without it a busy machine takes no time to switch.
            They are always written on threads.
    """
    opened: list[Spool] = []

    class Kept(Spool):
        def __init__(self, start: int, **more: object):
            super().__init__(start, **more)
            opened.append(self)

    def close() -> None:
        while opened:
            opened.pop().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_module, "Spool", Kept)
        if not threads:
            patch.setattr(branch_module, "ThreadPoolExecutor", _AtOnce)
        try:
            yield close
        finally:
            close()


def empty_memory() -> None:
    """Drop everything in fsspec's memory: it looks through all of it at every step."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@dataclass(frozen=True)
class Record:
    """All that a snapshot must give back."""

    tensors: dict[str, Tensor]
    frame: Frame
    tokens: int
    seen: int
    ids: tuple[int, ...] | None


def same(one: Record | None, other: Record | None) -> bool:
    """Bit for bit, by name, shape and dtype; None is the absence of a snapshot."""
    if one is None or other is None:
        return one is other
    return (one.frame, one.tokens, one.seen, one.ids) == (other.frame, other.tokens, other.seen, other.ids) and (
        one.tensors.keys() == other.tensors.keys() and all(
            (a.dtype, a.shape, _bytes(a)) == (b.dtype, b.shape, _bytes(b))
            for a, b in ((tensor, other.tensors[name]) for name, tensor in one.tensors.items())))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).numpy().tobytes()


@dataclass
class Toy:
    """A live context: committed units per layer (positions, scores [H, n], K and V [H, n, D]) and pending ids."""

    seed: int
    seen: int = 0
    pending: list[int] = field(default_factory=list)
    ids: list[int] | None = field(default_factory=list)  # committed; None if they cannot be known
    layers: list[dict[str, Tensor]] = field(default_factory=lambda: [
        {"positions": torch.zeros(2, 0, dtype=torch.int64), "scores": torch.zeros(2, 0), "keys": torch.zeros(2, 0, 4),
         "values": torch.zeros(2, 0, 4)} for _ in BUDGETS])

    def feed(self, count: int, branch: Branch | None = None) -> Toy:
        """Accept so many ids; whole chunks are committed, noted in the branch's log, and evicted to the budget."""
        for _ in range(count):
            self.pending.append((self.seed * 7919 + self.seen + len(self.pending)) % 50_000)
            if len(self.pending) == CHUNK:
                self._commit(branch)
        return self

    def _commit(self, branch: Branch | None) -> None:
        if branch is not None:
            branch.note(self.seen, self.pending)
        noise = torch.Generator().manual_seed(self.seed * 1_000_003 + self.seen)
        for layer, budget in zip(self.layers, BUDGETS, strict=True):
            new = torch.arange(self.seen, self.seen + CHUNK).expand(2, CHUNK)
            grown = {"positions": torch.cat([layer["positions"], new], 1),
                     "scores": torch.cat([layer["scores"], torch.randn(2, CHUNK, generator=noise)], 1),
                     **{part: torch.cat([layer[part], torch.randn(2, CHUNK, 4, generator=noise)], 1)
                        for part in ("keys", "values")}}
            count = min(budget, grown["positions"].shape[1])
            kept = torch.rand(grown["scores"].shape, generator=noise).topk(count, dim=1).indices.sort(dim=1).values
            for name, tensor in grown.items():
                index = kept if tensor.dim() == 2 else kept[..., None].expand(-1, -1, 4)
                layer[name] = tensor.gather(1, index)
        if self.ids is not None:
            self.ids += self.pending
        self.seen, self.pending = self.seen + CHUNK, []

    @property
    def frame(self) -> Frame:
        return Frame(turn="user", text=f"{self.seed}: after {self.seen}")

    @property
    def state(self) -> dict[str, Tensor]:
        return {"seed": torch.tensor([self.seed]), "pending": torch.tensor(self.pending, dtype=torch.int32),
                **{f"{number}.scores": layer["scores"] for number, layer in enumerate(self.layers)}}

    def moment(self) -> Moment:
        return Moment(seen=self.seen, tokens=self.seen + len(self.pending),
                      counts=tuple(layer["positions"].shape[1] for layer in self.layers),
                      positions=[layer["positions"] for layer in self.layers], state=self.state, frame=self.frame)

    def between(self, start: int, end: int) -> list[LayerUnits]:
        """The units of a range of positions, head by head."""
        inside = [(layer["positions"] >= start) & (layer["positions"] < end) for layer in self.layers]
        return [LayerUnits(own.sum(-1), *(layer[name][own] for name in ("positions", "keys", "values")))
                for own, layer in zip(inside, self.layers, strict=True)]

    def record(self) -> Record:
        """What a snapshot of now must give back."""
        units = {f"{number}.{part}": layer[part].clone() for number, layer in enumerate(self.layers)
                 for part in ("keys", "values", "positions")}
        return Record({**units, **{name: tensor.clone() for name, tensor in self.state.items()}}, self.frame,
                      self.seen + len(self.pending), self.seen, None if self.ids is None else tuple(self.ids))

    @classmethod
    def of(cls, record: Record) -> Toy:
        """The live context that goes on from a snapshot."""
        tensors = record.tensors
        return cls(seed=int(tensors["seed"]), seen=record.seen, pending=tensors["pending"].tolist(),
                   ids=None if record.ids is None else list(record.ids),
                   layers=[{part: tensors[f"{number}.{part}"].clone()
                            for part in ("positions", "scores", "keys", "values")} for number in range(len(BUDGETS))])

    def diverged(self, seed: int) -> Toy:
        """A copy that other ids and units follow."""
        copy = Toy.of(self.record())
        copy.seed = seed
        return copy


def begin(store: Store, name: str, seed: int = 1, tokens: int = 0) -> tuple[Branch, Toy]:
    """A new session's owner and its context."""
    branch = store.branch(name)
    branch.begin()
    return branch, Toy(seed).feed(tokens, branch)


def save(branch: Branch, toy: Toy, meanwhile: Callable[[], object] | None = None,
         page_bytes: int = PAGE_BYTES) -> Snapshot:
    """One save; `meanwhile` runs when everything is written but the log part and the manifest."""
    moment = toy.moment()
    with Save(branch, moment, IDENTITY, GEOMETRY, page_bytes) as saving:
        for start, end in saving.plan.write:
            saving.page(start, end, toy.between(start, end))
        if meanwhile is not None:
            saving._wait()
            meanwhile()
        return saving.finish("toy", moment.seen)


def record_of(restored: Restored, branch: Branch) -> Record:
    """What was loaded, its log read through."""
    ids = None if restored.manifest.log is None else tuple(
        int(number) for part, _ in read_log(branch.session_folder, branch.name, branch.log) for number in part)
    return Record(restored.tensors, restored.manifest.frame, restored.manifest.tokens, restored.manifest.seen, ids)


def load(store: Store, name: str, generation: int | None = None) -> tuple[Branch, Record]:
    """A new owner of a stored branch, and what it read."""
    branch = store.branch(name)
    restored = branch.load(IDENTITY, GEOMETRY, BUDGETS, generation)
    try:
        return branch, record_of(restored, branch)
    except BaseException:
        branch.close()
        raise


def resume(store: Store, name: str, generation: int | None = None) -> tuple[Branch, Toy]:
    """A new owner of a stored branch, and the context that goes on."""
    branch, record = load(store, name, generation)
    return branch, Toy.of(record)


def loaded(store: Store, name: str, generation: int | None = None) -> Record:
    """What a new owner reads, which is closed again."""
    branch, record = load(store, name, generation)
    branch.close()
    return record


def of_version(data: bytes, version: int) -> bytes:
    """The container as a library of another format version would have written it."""
    fixed = data[:8] + version.to_bytes(2, "little") + data[10:32]
    return fixed + bytes.fromhex(digest(fixed, data[48:48 + int.from_bytes(data[12:16], "little")])) + data[48:]


def everything(root: Path | str) -> dict[str, bytes | None]:
    """All paths below a folder with their content, None for folders; lock files, which are empty, are left out."""
    paths: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        paths |= {str(inside / name): None for name in folders}
        paths |= {str(inside / name): (Path(folder) / name).read_bytes() for name in files if name != "lock"}
    return paths


def needed(store: Store, name: str) -> set[str]:
    """Paths of the pages and log parts that the snapshots in a session's folder name, read without the collector."""
    session_folder = store.branch(name).session_folder
    out = set()
    for path, _ in session_folder.manifests():
        manifest = session_folder.manifest_at(path)[0]
        out |= {f"{session_folder.folder}/pages/{ref.name}" for ref in manifest.pages}
        out |= {f"{session_folder.folder}/log/{ref.name}" for ref in manifest.log or ()}
    return out


def stored(store: Store, name: str) -> set[str]:
    """Paths of the pages and log parts that are there."""
    session_folder = store.branch(name).session_folder
    return {f"{session_folder.folder}/{kind}/{file}" for kind in ("pages", "log")
            for file in store.files.sizes(f"{session_folder.folder}/{kind}")}


def ids_of(parts: list[np.ndarray]) -> list[int]:
    """The ids of log parts."""
    return [int(number) for part in parts for number in part]


def again(store: Store, **options: object) -> Store:
    """Another process's view of the same store."""
    files = LocalFiles(store.url, Unsynced()) if isinstance(store.files, LocalFiles) else RemoteFiles(store.url)
    return Store(store.url, files=files, **{"key": store._key, "keep_last": store.keep_last, **options})


def holds(store: Store, name: str, record: Record, generation: int | None = None) -> bool:
    """Whether another process reads just that record."""
    return same(loaded(again(store), name, generation), record)


def without_log(toy: Toy) -> Record:
    """What a snapshot must give back if the log of its session was lost."""
    toy.ids = None
    return toy.record()


def problems(store: Store, name: str | None = None) -> list[str]:
    """The problems that `verify` reports."""
    return [result.problem for result in store.verify(name) if result.problem]


def sound(store: Store) -> bool:
    """Whether another process finds nothing wrong with anything stored."""
    return problems(again(store)) == []


def two_owners(store: Store) -> tuple[tuple[Branch, Toy], tuple[Branch, Toy]]:
    """Two owners of one saved session that have diverged since: the winner, which saves first, and the stale owner."""
    winner, winner_toy = begin(store, "alice", tokens=30)
    save(winner, winner_toy)
    stale, stale_toy = resume(again(store), "alice")
    stale_toy.seed = 2
    return (winner, winner_toy.feed(13, winner)), (stale, stale_toy.feed(21, stale))


def failing_once(store: Store, ending: str) -> None:
    """The next read of such a file fails; the one after it is as ever."""
    real = store.files.read

    def read(path: str, most: int) -> memoryview:
        if path.endswith(ending):
            store.files.read = real
            raise StoreError("a read that fails once")
        return real(path, most)

    store.files.read = read
