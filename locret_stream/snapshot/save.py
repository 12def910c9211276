"""Saving a branch: it grows out of what was stored before, and is fenced against other owners.

A save is: is this owner's still the newest? Then pages and log part, each durable before anything names them, the
claim of the branch's name, and last the manifest, created exclusively under the next number. Cut anywhere, the store
holds the snapshot before; a file that no manifest names is rubbish for the collector. The record of the name follows,
so that a snapshot which was acknowledged cannot get lost unnoticed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from locret_stream.errors import SnapshotError, StaleOwner, StoreError
from locret_stream.snapshot.branch import Branch, Snapshot, describe
from locret_stream.snapshot.files import Exists
from locret_stream.snapshot.format import Buffer, Frame, LogPart, LogRef, Manifest, pack, total
from locret_stream.snapshot.identity import Identity
from locret_stream.snapshot.log import Part, absorbed, read_part, write_part
from locret_stream.snapshot.names import hashed
from locret_stream.snapshot.pages import (
    PAGE_BYTES,
    Geometry,
    LayerUnits,
    PageIndex,
    Plan,
    pack_masks,
    plan,
    write_page,
)

NO_FRAME = Frame()
_log = logging.getLogger(__name__)
WRITERS = 2  # pages that are written at the same time


@dataclass(frozen=True)
class Moment:
    """What a save is of, beside the units' K and V: everything small.

    state: tensors of the engine and the policy, `l.scores` among them. positions: for every layer [H, n].
    tokens: accepted by then, the pending ones included.
    """

    seen: int
    tokens: int
    counts: tuple[int, ...]
    positions: Sequence[Tensor]
    state: Mapping[str, Tensor]
    frame: Frame = NO_FRAME
    note: bytes = b""


class Save:
    """One save under way; `with` holds the collector off. Pages first, then `finish`.

    Raises:
        StaleOwner: on entering or in `finish`: another owner has saved meanwhile. StoreError. Nothing was acknowledged,
            and the branch can be saved again.
    """

    def __init__(self, branch: Branch, moment: Moment, identity: Identity, geometry: Geometry,
                 page_bytes: int = PAGE_BYTES):
        self.branch, self.moment, self.identity, self.geometry = branch, moment, identity, geometry
        self.page_bytes = page_bytes
        self.written = 0
        self._new: list[PageIndex] = []
        self._stack = ExitStack()
        # One page on its way into the page cache while the disk takes the one before: a sync is half of a write.
        self._writer = ThreadPoolExecutor(WRITERS, thread_name_prefix="locret-page")
        self._writing: deque[Future[PageIndex]] = deque()

    def __enter__(self) -> Save:
        branch, session_folder = self.branch, self.branch.session_folder
        branch.expect_newest()  # before the lock, which would make the folder of a forgotten session again
        self._locked = self._stack.enter_context(session_folder.files.lock(session_folder.folder, shared=True))
        try:
            session_folder.refresh()
            found = branch.expect_newest()
            branch.expect_not_anew(found)
            # What this owner knows may have been deleted since: by somebody else, or after a rewind. Where collectors
            # cannot be held off, what no snapshot names may go in any moment.
            named = self._locked or branch.base is None or branch.base[1] in (
                found if branch.base[0] == branch.name else session_folder.generations(branch.base[0])[0])
            self._rests_on = branch.base if named else None
            pages, log = ([*branch.pages], [*branch.log]) if named else ([], [])
            stored = session_folder.stored("pages", [page.ref for page in pages])
            self.plan: Plan = plan([page for page in pages if page.ref.name in stored], self.moment.positions,
                                   self.moment.seen, self.geometry, self.page_bytes)
            if branch.spool is not None and len(session_folder.stored("log", log)) < len(branch.log):
                _log.warning("parts of the log of %r are gone: it goes on without one, and could not be rebuilt",
                             branch.name)
                branch.close()
                branch.log = ()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown()
        self._stack.close()

    def page(self, start: int, end: int, layers: Sequence[LayerUnits]) -> None:
        """Write one of the ranges that `plan.write` asks for, beside the caller, who waits while two are under way.

        Raises:
            StoreError: a range before this one could not be written.
        """
        parts, index = write_page(start, end, layers)
        self.branch.session_folder.ready()  # a key is made here, not by two threads at once
        self._written(but=WRITERS - 1)
        self._writing.append(self._writer.submit(self._write, parts, index))

    def _write(self, parts: Sequence[Buffer], index: PageIndex) -> PageIndex:
        name = self.branch.session_folder.write_named("pages", parts)
        return PageIndex(msgspec.structs.replace(index.ref, name=name), index.counts, index.positions)

    def _written(self, but: int = 0) -> None:
        """Wait for the pages under way, but so many."""
        while len(self._writing) > but:
            index = self._writing.popleft().result()
            self.written += index.ref.size
            self._new.append(index)

    def finish(self, library: str, log_end: int) -> Snapshot:
        """Write a log part and the manifest; the snapshot is durable, and the branch's newest, on return."""
        branch, moment = self.branch, self.moment
        self._written()
        pages: list[tuple[PageIndex, np.ndarray | None]] = [(index, np.concatenate(masks))
                                                            for index, masks in self.plan.stay]
        pages += [(index, None) for index in self._new]
        pages.sort(key=lambda item: item[0].ref.start)
        refs = tuple(msgspec.structs.replace(index.ref, live=index.ref.units if mask is None else int(mask.sum()))
                     for index, mask in pages)
        log = self._log_parts(log_end) if branch.spool is not None else None
        manifest = Manifest(
            session=branch.session, branch=branch.name, generation=branch.head + 1, parent=branch.parent,
            created=time.time(), library=library, identity=self.identity, tokens=moment.tokens, seen=moment.seen,
            counts=moment.counts, pages=refs, log=log, frame=moment.frame, note=moment.note)
        parts = pack(manifest, {"state": moment.state, "masks": pack_masks([mask for _, mask in pages])})
        own = parts[0][32:48].hex()
        self._publish(manifest, parts, own)
        branch.head, branch.newest, branch.parent, branch.log = manifest.generation, own, own, log or ()
        branch.base, branch.tried = (branch.name, manifest.generation, own), ""
        branch.pages = tuple(PageIndex(ref, index.counts, index.positions)
                             for ref, (index, _) in zip(refs, pages, strict=True))
        branch.focuses = [event for event in branch.focuses if event.position > log_end]
        if branch.spool is not None:
            try:
                branch.spool.drop(log_end)
            except OSError:  # the snapshot is durable; of the log, what this one has is the end
                branch.close()
        self.written += total(parts)
        return describe(manifest, total(parts), branch.session_folder.encrypted, self.written)

    def _publish(self, manifest: Manifest, parts: Sequence[Buffer], own: str) -> None:
        """Create the manifest under its number, which makes everything it names this branch's newest snapshot."""
        branch, session_folder = self.branch, self.branch.session_folder
        path = session_folder.manifest_path(branch.name, manifest.generation)
        session_folder.claim(branch.name)
        branch.tried = own
        try:
            session_folder.write(path, parts, exclusive=True)
        except Exists:
            if branch.digest(manifest.generation) != own:  # else the place was asked twice by a layer below
                branch.tried = ""
                branch.expect_newest()
                raise StoreError(f"{session_folder.folder}/{path} is there and is no snapshot; expected nothing of "
                                 "that name") from None
        try:
            session_folder.expect_claim(branch.name)
            if not session_folder.key_stands:
                raise StoreError(f"{branch.name!r}: meanwhile the session was begun anew, with another key or none; "
                                 "expected one way to store it")
            if not self._locked:
                self._expect_undisturbed(manifest)
        except BaseException:
            with suppress(StoreError):  # that it failed matters more; what could not be deleted is known again
                session_folder.files.delete(f"{session_folder.folder}/{path}")
                branch.tried = ""
            raise
        session_folder.remember(branch.name, manifest.generation, self._locked)

    def _expect_undisturbed(self, manifest: Manifest) -> None:
        """Where nothing held others off: nobody saved, deleted, collected or forgot while this saved."""
        branch, session_folder = self.branch, self.branch.session_folder
        if session_folder.generations(branch.name)[1] != manifest.generation or session_folder.gone(
                hashed(branch.name), manifest.generation):
            raise StaleOwner(f"{branch.name!r} was saved elsewhere while it was saved here. Nothing was acknowledged; "
                             "expected one owner: save under a new name, or open it again")
        log, base = manifest.log or (), self._rests_on
        # A collector deletes a snapshot before it looks which files nobody names: is it there, its files stay.
        if (base is not None and base[1] not in session_folder.generations(base[0])[0]) or (
                len(session_folder.stored("pages", manifest.pages)) < len(manifest.pages)
                or len(session_folder.stored("log", log)) < len(log)):
            raise StoreError(f"{branch.name!r}: files of this snapshot were deleted while it was saved; expected "
                             "another try")

    def _log_parts(self, end: int) -> tuple[LogRef, ...]:
        """The log up to `end`, its newest parts put together with what the spool holds."""
        branch = self.branch
        assert branch.spool is not None, "the session keeps a log"
        with branch.keeping_log():
            ids = branch.spool.read(end)
        stay, focuses = branch.log, (*branch.focuses,)
        for _ in range(absorbed(branch.log, len(ids))):
            what = f"log part {stay[-1].name} of {branch.name!r}"
            try:
                before = read_part(*branch.session_folder.read_named("log", stay[-1], what), what)
                ids = np.concatenate([before.ids, ids])
                focuses = (*(event for event in before.focuses if event.position <= stay[-1].end), *focuses)
            except SnapshotError as error:  # damage done to what was stored is no reason to refuse what is new
                if stay[-1].start < stay[-1].end:
                    break
                if isinstance(error, StoreError):  # it is no damage: the part stays, for a save that can read it
                    if not stay[-1].end:  # but no part comes before the first one
                        raise
                    break
                _log.warning("%s: a focus that it may hold is gone, should the session be rebuilt", error)
            stay = stay[:-1]
        start = stay[-1].end if stay else 0
        body = LogPart(branch=branch.name, generation=branch.head + 1, tokenizer=self.identity.tokenizer, start=start,
                       end=start + len(ids), before=stay[-1].name if stay else "", frame=self.moment.frame)
        pending, held = (self.moment.state.get(part, torch.zeros(0)).numpy() for part in ("pending", "held"))
        parts = write_part(body, Part(ids, pending, held, focuses))
        name = branch.session_folder.write_named("log", parts)
        size = total(parts)
        self.written += size
        return (*stay, LogRef(name, start, start + len(ids), size))
