"""One stored branch as one owner sees it: what is read, and from where this owner goes on (`snapshot.save` writes)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
    StaleOwner,
    StoreError,
)
from locret_stream.snapshot.format import Frame, LogRef, Manifest, PageRef, tensors
from locret_stream.snapshot.identity import Identity, expect_same
from locret_stream.snapshot.log import Spool, read_part
from locret_stream.snapshot.pages import (
    Assembly,
    Geometry,
    PageIndex,
    read_page,
    unpack_masks,
)
from locret_stream.snapshot.vault import Vault


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One stored snapshot.

    Args:
        name: of the session or the fork. session: the session it belongs to.
        generation: its number; `rewind` and `delete` take it. parent: digest of the snapshot it grew out of.
        created: seconds since 1970. tokens: accepted. units: held, over all layers and KV heads.
        log: whether its token ids are stored too, so that it could be rebuilt.
        bytes: all files it needs. bytes_written: of these, by this save; 0 for one that was only looked at.
        problem: why it cannot be read; the rest is then what its place tells.
    """

    name: str
    session: str
    generation: int
    parent: str
    created: float
    tokens: int
    units: int
    bytes: int
    library: str
    encrypted: bool
    log: bool
    bytes_written: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Restored:
    """A verified snapshot: units `l.keys`, `l.values` [H, n, D], `l.positions` [H, n], and the state beside them."""

    manifest: Manifest
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Chain:
    """A whole log: ids in order, the pending ones last; what was held behind them, bytes [n] u8; and the frame."""

    ids: list[np.ndarray]
    held: np.ndarray
    frame: Frame


class Branch:
    """One owner's view of a branch. One thread at a time.

    Attributes:
        head: the newest number this owner knows; the next save is head + 1 or `StaleOwner`.
        parent: digest of the manifest that the live context grew out of.
        base: branch, number and digest of the snapshot that names `pages` and `log`, None if there is none.
        tried: digest of a manifest whose writing failed. It may be there all the same: an answer got lost, or its
            folder could not be synced.
        spool: ids accepted since the last save, or None for a session without a log.
    """

    def __init__(self, vault: Vault, session: str, name: str, *, log: bool):
        self.vault, self.session, self.name, self.keeps_log = vault, session, name, log
        self.head, self.parent = 0, ""
        self.base: tuple[str, int, str] | None = None
        self.tried = ""
        self.pages: tuple[PageIndex, ...] = ()
        self.log: tuple[LogRef, ...] = ()
        self.spool: Spool | None = None

    # -- reading ----------------------------------------------------------------------------------------------

    def load(self, identity: Identity | None, geometry: Geometry, capacity: Sequence[int],
             generation: int | None = None) -> Restored:
        """The newest snapshot, or that of a number; this owner goes on from it.

        Args:
            identity: what it must have been made by; None leaves that unchecked.
            capacity: the most units that each layer may hold; more are refused before anything is allocated.

        Raises:
            SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, StoreError: nothing changed.
        """
        while True:
            self.vault.refresh()
            found, highest = self.vault.generations(self.name)
            if not found:
                raise SnapshotNotFound(f"{self.name!r} has no snapshot in {self.vault.files.url}")
            number = found[-1] if generation is None else generation
            try:
                restored, pages, own = self._read(number, identity, geometry, capacity)
                break
            except SnapshotError:
                # Nothing holds collectors off while this reads. Was it deleted meanwhile, a newer one is there.
                if generation is not None or number in self.vault.generations(self.name)[0]:
                    raise
        log = restored.manifest.log
        spool = self._spool(log[-1].end if log else 0) if log is not None else None
        self.close()
        self.head, self.parent, self.base, self.tried = highest, own, (self.name, number, own), ""
        self.pages, self.log, self.spool, self.keeps_log = pages, log or (), spool, log is not None
        return restored

    def reload(self, identity: Identity, geometry: Geometry, capacity: Sequence[int]) -> Restored:
        """What this owner saved last, once more; nothing of the branch changes.

        Raises:
            StaleOwner: it is not there any more, or another one stands in its place. SnapshotCorrupt, StoreError.
        """
        self.vault.refresh()
        with suppress(SnapshotNotFound):
            restored, _, own = self._read(self.head, identity, geometry, capacity)
            if own == self.parent:
                return restored
        raise StaleOwner(f"snapshot {self.head} of {self.name!r} is not there any more, or not the one that this owner "
                         "saved; expected one owner")

    def _read(self, number: int, identity: Identity | None, geometry: Geometry,
              capacity: Sequence[int]) -> tuple[Restored, tuple[PageIndex, ...], str]:
        manifest, sections, own = self.vault.read_manifest(self.name, number)
        what = f"snapshot {number} of {self.name!r}"
        if identity is not None:
            expect_same(manifest.identity, identity, what)
        check_manifest(manifest, sections, capacity, what)
        assembly = Assembly(manifest.counts, geometry, what)
        masks = unpack_masks(tensors(sections["masks"], what), manifest.pages, what)
        pages = []
        with ThreadPoolExecutor(1, thread_name_prefix="locret-read") as reader:  # one page ahead of the assembly
            coming = deque(reader.submit(self._read_page, ref, geometry, what) for ref in manifest.pages[:1])
            for number, mask in enumerate(masks):
                index, units = coming.popleft().result()
                coming.extend(reader.submit(self._read_page, ref, geometry, what)
                              for ref in manifest.pages[number + 1:number + 2])
                assembly.add(index, units, mask)
                pages.append(index)
        state = tensors(sections["state"], what)
        units = assembly.finish()
        clash = sorted(state.keys() & units.keys())
        if clash:
            raise SnapshotCorrupt(f"{what}: its state holds a tensor {clash[0]!r}, which belongs to its pages")
        return Restored(manifest, {**units, **state}), tuple(pages), own

    def _spool(self, start: int) -> Spool:
        with self.logging():
            return Spool(start)

    @contextmanager
    def logging(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"the log of {self.name!r} cannot be kept: {error}; expected room for temporary files, or "
                             "a store with log=False") from error

    def _read_page(self, ref: PageRef, geometry: Geometry, what: str) -> tuple[PageIndex, dict[str, Tensor]]:
        page = f"{what}, page {ref.name}"
        body, sections = self.vault.read_named("pages", ref, page)
        return read_page(ref, body, sections, geometry, page)

    def read_log(self, refs: Sequence[LogRef]) -> list[np.ndarray]:
        """The ids of log parts, in order.

        Raises:
            SnapshotCorrupt: a part that is missing, damaged, or does not follow the one before.
        """
        out, at = [], 0
        for ref in refs:
            what = f"log part {ref.name} of {self.name!r}"
            body, sections = self.vault.read_named("log", ref, what)
            if (body.start, body.end) != (ref.start, ref.end) or ref.start != at:
                raise SnapshotCorrupt(f"{what}: ids {body.start} to {body.end}; expected {at} to {ref.end}")
            out.append(read_part(body, sections, what).ids)
            at = ref.end
        return out

    def read_chain(self, identity: Identity) -> Chain:
        """Everything that was accepted, from the log of the newest snapshot, or, if that cannot be read, from the
        newest log part of this branch and those before it.

        Raises:
            SnapshotCorrupt: there is no whole log. SnapshotMismatch: its ids are of another tokenizer.
        """
        self.vault.refresh()
        found, _ = self.vault.generations(self.name)
        if not found:
            raise SnapshotCorrupt(f"{self.name!r} has no snapshot in {self.vault.files.url}, so no log")
        try:
            manifest, sections, _ = self.vault.read_manifest(self.name, found[-1])
        except SnapshotError:
            return self._chain_of_parts(identity, found[-1])
        if manifest.log is None:
            raise SnapshotCorrupt(f"{self.name!r} was stored without a log")
        _expect_tokenizer(manifest.identity.tokenizer, identity, self.name)
        state, nothing = tensors(sections["state"], self.name), torch.zeros(0, dtype=torch.uint8)
        self.log = manifest.log
        return Chain([*self.read_log(manifest.log), state.get("pending", nothing).numpy()],
                     state.get("held", nothing).numpy(), manifest.frame)

    def _chain_of_parts(self, identity: Identity, newest: int) -> Chain:
        parts = {}
        for name, size in self.vault.files.sizes(f"{self.vault.folder}/log").items():
            with suppress(SnapshotError):
                ref = LogRef(name, 0, 0, size)
                body, sections = self.vault.read_named("log", ref, name)
                parts[name] = body, read_part(body, sections, name)
        own = {name: part[0].generation for name, part in parts.items()
               if part[0].branch == self.name and part[0].generation <= newest}
        if not own:
            raise SnapshotCorrupt(f"{self.name!r} has no log that can be read")
        if max(own.values()) < newest:  # never lose the last tokens unsaid
            raise SnapshotCorrupt(f"neither snapshot {newest} of {self.name!r} nor its log part can be read; delete it "
                                  f"to go on from an earlier one (`snapshots delete --generation {newest}`)")
        name, *others = [name for name in own if own[name] == max(own.values())]
        if others:  # of saves that failed: those of other owners too
            raise SnapshotCorrupt(f"{self.name!r} has two logs, and nothing that can be read tells which is its own")
        (last, held), chain, refs = parts[name], [], []
        _expect_tokenizer(last.tokenizer, identity, self.name)
        at = last.end
        while name:
            body, part = parts.pop(name, (None, None))  # each once: parts without ids could go in a circle
            if body is None or body.end != at:
                raise SnapshotCorrupt(f"the log of {self.name!r} has a gap before position {at}")
            chain.append(part.ids)
            refs.append(LogRef(name, body.start, body.end, self.vault.files.sizes(f"{self.vault.folder}/log")[name]))
            at, name = body.start, body.before
        if at:
            raise SnapshotCorrupt(f"the log of {self.name!r} begins at position {at}")
        self.log = tuple(reversed(refs))
        return Chain([*reversed(chain), held.pending], held.held, last.frame)

    def begin_anew(self) -> None:
        """Go on from a log that is fed again: it stays, every page is written anew."""
        spool = self._spool(0) if self.keeps_log else None
        self.close()
        self.head, self.base, self.tried = self.vault.generations(self.name)[1], None, ""
        self.pages, self.log, self.spool = (), (), spool

    # -- writing ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This owner starts a session from nothing."""
        if self.keeps_log:
            self.spool = self._spool(0)

    def note(self, position: int, ids: Sequence[int]) -> None:
        """Ids about to be committed at `position`. The same again, or other ones after an undone turn, replace them.

        Raises:
            StoreError: the spool cannot be written.
        """
        if self.spool is not None:
            with self.logging():
                self.spool.append(ids, position)

    def fork(self, name: str, seen: int) -> Branch:
        """A branch by another name that begins at the committed position `seen` of this one; unsaved ids are copied.

        Raises:
            ConfigError: the store has something of that name already.
        """
        if self.vault.taken(name):
            raise ConfigError(f"fork {name!r}: the store has a session of that name; expected a new one, or `delete` "
                              "that first")
        twin = Branch(self.vault, self.session, name, log=self.keeps_log)
        twin.parent, twin.base = self.parent, self.base
        twin.head = self.vault.generations(name)[1]
        twin.pages = tuple(page for page in self.pages if page.ref.end <= seen)
        twin.log = self.log
        if self.spool is not None:
            with self.logging():
                twin.spool = Spool(self.spool.start)
                twin.spool.append(self.spool.read(seen))
        return twin

    def close(self) -> None:
        """Drop the spool; what was not saved is gone."""
        if self.spool is not None:
            self.spool.close()
            self.spool = None


def _expect_tokenizer(found: str, identity: Identity, name: str) -> None:
    if found != identity.tokenizer:
        raise SnapshotMismatch(f"the log of {name!r} holds ids of another tokenizer: found {found}, expected "
                               f"{identity.tokenizer}", field="tokenizer", found=found, expected=identity.tokenizer)


def check_manifest(manifest: Manifest, sections: Mapping[str, memoryview], capacity: Sequence[int], what: str) -> None:
    """Refuse a manifest whose numbers cannot be true, before anything is allocated by them.

    Raises:
        SnapshotCorrupt.
    """
    if set(sections) != {"state", "masks"}:
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}; expected state and masks")
    if len(manifest.counts) != len(capacity) or any(
            count > most for count, most in zip(manifest.counts, capacity, strict=True)):
        raise SnapshotCorrupt(f"{what}: {manifest.counts} units per layer; expected at most {tuple(capacity)}")
    at = 0
    for ref in manifest.pages:
        if not at <= ref.start < ref.end <= manifest.seen or ref.live > ref.units:
            raise SnapshotCorrupt(f"{what}: a page of positions {ref.start} to {ref.end} with {ref.live} of "
                                  f"{ref.units} units; expected ranges in order inside 0 to {manifest.seen}")
        at = ref.end
    if manifest.tokens < manifest.seen:
        raise SnapshotCorrupt(f"{what}: {manifest.tokens} tokens, of which {manifest.seen} are committed")


def describe(manifest: Manifest, size: int, encrypted: bool, written: int = 0) -> Snapshot:
    """What users see of a manifest of `size` bytes."""
    return Snapshot(name=manifest.branch, session=manifest.session, generation=manifest.generation,
                    parent=manifest.parent, created=manifest.created, tokens=manifest.tokens,
                    units=sum(ref.live for ref in manifest.pages), library=manifest.library, encrypted=encrypted,
                    log=manifest.log is not None,
                    bytes=size + sum(ref.size for ref in (*manifest.pages, *(manifest.log or ()))),
                    bytes_written=written)
