"""Saving a branch: a snapshot takes over what was stored before, and only one owner's save succeeds.

A save first asks whether any other owner has saved meanwhile. Then it writes pages and a log part, each durable before
anything names them, claims the branch's name, and last creates the manifest exclusively under the next generation. A
crash anywhere before that leaves the snapshot before it as the newest; files that no manifest names are deleted by the
next collection. The record of the name follows, so that the loss of an acknowledged snapshot is noticed. Where others
cannot be held off, the folder is looked at once more before the save is acknowledged.
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

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew, StaleOwner, StoreError
from locret_stream.snapshot import claims
from locret_stream.snapshot.branch import Branch, Snapshot, describe
from locret_stream.snapshot.files import Exists
from locret_stream.snapshot.format import Buffer, Frame, LogPart, LogRef, Manifest, pack, total
from locret_stream.snapshot.identity import Identity
from locret_stream.snapshot.log import Part, Refocus, absorbed, read_log, read_part, write_part
from locret_stream.snapshot.names import hashed
from locret_stream.snapshot.pages import PAGE_BYTES, Geometry, LayerUnits, PageIndex, Plan, pack_masks, plan, write_page
from locret_stream.snapshot.session_folder import MANIFEST_LIMIT, named_by

NO_FRAME = Frame()
_log = logging.getLogger(__name__)
RECENT_IDS = 16_384  # where reading is a request, a part of the log of up to so many ids is kept in memory as well
WRITERS = 2  # pages that are written at the same time: the disk syncs one while the next is copied to the page cache


@dataclass(frozen=True)
class Moment:
    """Everything that a snapshot stores beside the units' K and V.

    Args:
        seen: committed tokens. tokens: accepted ones, the pending ones included. counts: units per layer.
        positions: for every layer [H, n]. state: tensors of the engine and the policy, `l.scores` among them.
        frame: of the conversation. note: the caller's own bytes.
    """

    seen: int
    tokens: int
    counts: tuple[int, ...]
    positions: Sequence[Tensor]
    state: Mapping[str, Tensor]
    frame: Frame = NO_FRAME
    note: bytes = b""


class Save:
    """One save of a branch. `with` locks the session against collections; inside it come all pages, then `finish`.

    Raises:
        StaleOwner: on entering or in `finish`: another owner has saved meanwhile. StoreError. Nothing was acknowledged,
            and the branch can be saved again.

    Attributes:
        plan: from entering on, which pages stay and which ranges of positions must be written.
        written: bytes that this save has written.
    """

    def __init__(self, branch: Branch, moment: Moment, identity: Identity, geometry: Geometry,
                 page_bytes: int = PAGE_BYTES):
        self.branch, self.moment, self.identity, self.geometry = branch, moment, identity, geometry
        self.page_bytes = page_bytes
        self.written = 0
        self._new: list[PageIndex] = []
        self._log_before: list[tuple[np.ndarray, tuple[Refocus, ...]]] = []  # read here, to be written anew
        self._stack = ExitStack()
        self._writer = ThreadPoolExecutor(WRITERS, thread_name_prefix="locret-page")
        self._writing: deque[Future[PageIndex]] = deque()

    def __enter__(self) -> Save:
        branch, session_folder = self.branch, self.branch.session_folder
        if session_folder.files.locks:
            branch.expect_newest()  # before the lock, which would create the folder of a forgotten session again
        self._locked = self._stack.enter_context(session_folder.files.lock(session_folder.folder, shared=True))
        try:
            session_folder.key.refresh()
            with session_folder.looking() as self._looked:
                self._prepare()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _prepare(self) -> None:
        branch, session_folder = self.branch, self.branch.session_folder
        generations = branch.expect_newest()
        branch.expect_same_session(generations)
        session_folder.key.for_reading()  # so that a page does not have to look whether there is a key
        # The snapshot that this save builds on may have been deleted since, by another owner or after a rewind.
        # Without a lock, a collector may then delete its files at any moment, so none of them is taken over.
        reusable = self._locked or branch.base is None or branch.base[1] in (
            generations if branch.base[0] == branch.name else session_folder.generations(branch.base[0])[0])
        self._base = branch.base if reusable else None
        pages = [*branch.pages] if reusable else []
        stored = session_folder.stored("pages", [page.ref for page in pages])
        self.plan: Plan = plan([page for page in pages if page.ref.name in stored], self.moment.positions,
                               self.moment.seen, self.geometry, self.page_bytes)
        if branch.spool is not None and not self._takes_over_log(reusable):
            _log.warning("parts of the log of %r do not exist any more, or cannot be read: the session goes on "
                         "without a log, and cannot be rebuilt", branch.name)
            branch.close()
            branch.log = ()

    def _takes_over_log(self, reusable: bool) -> bool:
        """Whether the log goes on: its parts are there, or, where they may be deleted at any moment, could be read."""
        branch, session_folder = self.branch, self.branch.session_folder
        if reusable:
            return len(session_folder.stored("log", branch.log)) == len(branch.log)
        try:
            self._log_before = [*read_log(session_folder, branch.name, branch.log)]
        except (SnapshotCorrupt, SnapshotTooNew):
            return False
        return True

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown()
        self._stack.close()

    def page(self, start: int, end: int, layers: Sequence[LayerUnits]) -> None:
        """Write one of the ranges of `plan.write` on a thread; `layers`: the units there. The caller waits while
        `WRITERS` are being written. Raises StoreError if a range before this one could not be written."""
        parts, index = write_page(start, end, layers)
        self.branch.session_folder.key.for_writing()  # makes the key here, rather than on two threads at once
        self._wait(but=WRITERS - 1)
        self._writing.append(self._writer.submit(self._write, parts, index))

    def _write(self, parts: Sequence[Buffer], index: PageIndex) -> PageIndex:
        name = self.branch.session_folder.write_named("pages", parts)
        return PageIndex(msgspec.structs.replace(index.ref, name=name), index.counts, index.positions)

    def _wait(self, but: int = 0) -> None:
        """Wait until at most so many pages are being written."""
        while len(self._writing) > but:
            index = self._writing.popleft().result()
            self.written += index.ref.size
            self._new.append(index)

    def finish(self, library: str, log_end: int) -> Snapshot:
        """Write a log part, with the ids up to the committed position `log_end`, and the manifest. On return the
        snapshot is durable, and the newest of its branch."""
        branch, moment = self.branch, self.moment
        self._wait()
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
        if total(parts) > MANIFEST_LIMIT:
            raise SnapshotError(f"this snapshot of {branch.name!r} cannot be stored: its manifest has "
                                f"{total(parts):,} bytes, and no reader takes more than {MANIFEST_LIMIT:,}; expected a "
                                "smaller budget, or a policy that keeps fewer scores. Nothing was acknowledged")
        digest = parts[0][32:48].hex()
        self._publish(manifest, parts, digest)
        branch.head, branch.newest, branch.parent, branch.log = manifest.generation, digest, digest, log or ()
        branch.base, branch.tried = (branch.name, manifest.generation, digest), ""
        branch.pages = tuple(PageIndex(ref, index.counts, index.positions)
                             for ref, (index, _) in zip(refs, pages, strict=True))
        branch.focuses = [event for event in branch.focuses if event.position > log_end]
        if branch.spool is not None:
            try:
                branch.spool.drop(log_end)
            except OSError:  # the snapshot is durable, but the log ends with it
                branch.close()
        self.written += total(parts)
        return describe(manifest, total(parts), branch.session_folder.key.encrypted, self.written)

    def _publish(self, manifest: Manifest, parts: Sequence[Buffer], digest: str) -> None:
        """Create the manifest under its generation, which makes it the newest snapshot of the branch, and the record of
        the name; then see whether all that it needs is still there. A record is never ahead of its snapshots: it is
        written after the manifest, and withdrawn before it."""
        branch, session_folder = self.branch, self.branch.session_folder
        path = session_folder.manifest_path(branch.name, manifest.generation)
        with session_folder.looking(self._looked):
            claims.claim(session_folder, branch.name, recorded=branch.knows_record)
        branch.tried = digest
        try:
            session_folder.write(path, parts, exclusive=True)
        except Exists:
            if branch.digest(manifest.generation) != digest:  # else a layer below wrote it, and tried once more
                branch.tried = ""
                branch.expect_newest()
                raise StoreError(f"{session_folder.folder}/{path} exists and is no snapshot; expected nothing of that "
                                 "name") from None
        try:
            with session_folder.looking(self._looked):
                if session_folder.record_save(branch.name, manifest.generation):
                    branch.recorded_at = time.monotonic()
            with session_folder.looking(self._looked.looking(session_folder.folder)) as looked:
                claims.expect_claim(session_folder, branch.name)
                if not session_folder.key.unchanged:
                    raise StoreError(f"{branch.name!r}: meanwhile the session was begun anew, with another key or "
                                     "none; expected one way to store it")
                if not self._locked:
                    self._expect_undisturbed(manifest)
                    branch.looked = looked
                branch.version = session_folder.version(branch.name, manifest.generation)
            if branch.version:  # a pruning need not read what was written here
                session_folder.needs[path, branch.version.encode()] = named_by(manifest)
        except BaseException:
            with suppress(StoreError):  # the first error is the one to raise; `tried` stays, to know the file again
                session_folder.withdraw_record(branch.name, manifest.generation)
                session_folder.files.delete(f"{session_folder.folder}/{path}")
                branch.tried = ""
            raise

    def _expect_undisturbed(self, manifest: Manifest) -> None:
        """Without a lock: raises StaleOwner if another owner saved during this save, and StoreError if files of this
        snapshot were deleted."""
        branch, session_folder = self.branch, self.branch.session_folder
        if session_folder.present_generations(hashed(branch.name))[1] != manifest.generation or (
                session_folder.was_deleted(hashed(branch.name), manifest.generation)):
            raise StaleOwner(f"{branch.name!r} was saved elsewhere while it was saved here. Nothing was acknowledged; "
                             "expected one owner: save under a new name, or open it again")
        log, base = manifest.log or (), self._base
        # A collector deletes a snapshot before it looks which files no snapshot names, so as long as the base exists
        # its files do.
        if (base is not None and base[1] not in session_folder.present_generations(hashed(base[0]))[0]) or (
                len(session_folder.stored("pages", manifest.pages)) < len(manifest.pages)
                or len(session_folder.stored("log", log)) < len(log)):
            raise StoreError(f"{branch.name!r}: files of this snapshot were deleted while it was saved; expected "
                             "another try")

    def _log_parts(self, end: int) -> tuple[LogRef, ...]:
        """Write the ids of the spool up to `end` as a log part, together with the small parts before it, or with all
        parts before it where none of them may stay; returns all parts of the log."""
        branch = self.branch
        assert branch.spool is not None, "the session keeps a log"
        with branch.keeping_log():
            ids = branch.spool.read(end)
        kept, focuses = branch.log, (*branch.focuses,)
        if self._log_before:
            ids = np.concatenate([*(part for part, _ in self._log_before), ids])
            focuses = (*(event for _, events in self._log_before for event in events), *focuses)
            kept = ()
        for _ in range(absorbed(kept, len(ids))):
            what = f"log part {kept[-1].name} of {branch.name!r}"
            try:
                before = branch.recent.get(kept[-1].name) or read_part(
                    *branch.session_folder.read_named("log", kept[-1], what), what)
                ids = np.concatenate([before.ids, ids])
                focuses = (*(event for event in before.focuses if event.position <= kept[-1].end), *focuses)
            except SnapshotError as error:  # damage to an old part is no reason to refuse a new one
                if kept[-1].start < kept[-1].end:
                    break
                if isinstance(error, StoreError):  # this is no damage: the part stays for a save that can read it
                    if not kept[-1].end:  # but at position 0 a part without ids cannot come before another one
                        raise
                    break
                _log.warning("%s: a rebuild of the session will lack a focus, if this part has one", error)
            kept = kept[:-1]
        start = kept[-1].end if kept else 0
        body = LogPart(branch=branch.name, generation=branch.head + 1, tokenizer=self.identity.tokenizer, start=start,
                       end=start + len(ids), before=kept[-1].name if kept else "", frame=self.moment.frame)
        none = torch.zeros(0, dtype=torch.float32)
        pending, buffered = (self.moment.state.get(name, none).numpy() for name in ("pending", "held"))
        part = Part(ids, pending, buffered, focuses)
        parts = write_part(body, part)
        name = branch.session_folder.write_named("log", parts)
        size = total(parts)
        self.written += size
        if not self._locked and len(ids) <= RECENT_IDS:
            branch.recent[name] = part
        log = (*kept, LogRef(name, start, start + len(ids), size))
        branch.recent = {ref.name: branch.recent[ref.name] for ref in log if ref.name in branch.recent}
        return log
