"""Whether everything that a store holds is intact, and nothing of it is missing. Changes nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew
from locret_stream.snapshot.claims import fork_target
from locret_stream.snapshot.encryption import MissingKey
from locret_stream.snapshot.files import Files
from locret_stream.snapshot.format import LogPart, LogRef
from locret_stream.snapshot.log import read_part
from locret_stream.snapshot.names import FOLDER, hashed, read_record, readable_record, recorded_names
from locret_stream.snapshot.pages import PageRef
from locret_stream.snapshot.session_folder import MANIFEST_LIMIT, SessionFolder


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot after every byte of it was read.

    Args:
        name, generation: of the snapshot.
        problem: what is wrong with it, "" for nothing. locked: whether that is its missing key.
    """

    name: str
    generation: int
    problem: str = ""
    locked: bool = False


def verify(files: Files, key: bytes | None, session_folders: Sequence[SessionFolder], name: str | None
           ) -> list[Verified]:
    """What `Store.verify` gives, for these sessions; `name`: the only name to verify, None for all."""
    results: list[Verified] = []
    seen: set[str] = set()
    links: list[SessionFolder] = []
    for session_folder in session_folders:
        intact: set[str] = set()
        try:
            for path, number in session_folder.manifests():
                branch = path.split("/")[1]
                if name is None or branch == hashed(name):
                    result = _verify_snapshot(session_folder, path, number, intact)
                    if not result.problem and number == session_folder.generations_of(branch)[1] and (
                            not session_folder.was_deleted(branch, number)):
                        result = msgspec.structs.replace(result, problem=_alias_problem(session_folder, branch))
                    # A problem of a manifest that is not listed any more: the snapshot was deleted while it was read.
                    if not result.problem or (path, number) in session_folder.manifests():
                        results.append(result)
                        seen.add(branch)
        except SnapshotCorrupt:
            links.append(session_folder)
            continue
        with suppress(SnapshotCorrupt):  # the log's folder is a link, which the snapshots above have reported
            results += [result for result in _older_than_log(session_folder) if name is None or result.name == name]
    names = [hashed(name)] if name is not None else sorted({*recorded_names(files), *(
        folder[2:] for folder in files.folders("") if FOLDER.fullmatch(folder))})
    for session_folder, path, number in lost_snapshots(files, key, frozenset(seen), names):
        result = _verify_snapshot(session_folder, path, number, set())
        if result.problem:
            results.append(result)
            seen.add(path.split("/")[1])
            links = [link for link in links if link.folder != session_folder.folder]
    results += [_verify_snapshot(session_folder, unlisted_path(session_folder), 0, set()) for session_folder in links]
    for name_hash in names:
        try:
            read_record(files, name_hash)
            if name_hash not in seen:
                fork_target(files, f"s-{name_hash}")
        except (SnapshotCorrupt, SnapshotTooNew) as error:
            results.append(Verified(name=name or f"s-{name_hash}", generation=0, problem=str(error)))
    return results


def _older_than_log(session_folder: SessionFolder) -> Iterator[Verified]:
    """Branches whose log is newer than their newest snapshot, because an older copy of the manifests was put back.

    Save number n builds on snapshot n - 1, which existed then. A log part of just the next generation proves nothing,
    since the save that wrote it may have died. Where the place has no locks no part proves anything, since it may be
    left of a session that was forgotten meanwhile.
    """
    newest: dict[str, int] = {}
    files = session_folder.files
    for file, size in files.sizes(f"{session_folder.folder}/log").items() if files.locks else ():
        with suppress(SnapshotError):
            body, _ = session_folder.read_named("log", LogRef(file, 0, 0, min(size, MANIFEST_LIMIT)), file)
            newest[body.branch] = max(newest.get(body.branch, 0), body.generation)
    for branch, number in sorted(newest.items()):
        generations, highest = session_folder.generations(branch)
        if generations and number > highest + 1:
            yield Verified(name=branch, generation=number - 1, problem=(
                f"the log holds what snapshot {number} of {branch!r} was to name, but the newest stored snapshot is "
                f"{highest}: an older copy was put back. Expected the snapshots in between"))


def _alias_problem(session_folder: SessionFolder, branch_hash: str) -> str:
    """Why the name of a branch with snapshots in that session does not lead to them; "" if it does."""
    try:
        target = fork_target(session_folder.files, f"s-{branch_hash}") or f"s-{branch_hash}"
    except (SnapshotCorrupt, SnapshotTooNew) as error:
        return str(error)
    if target == session_folder.folder or branch_hash not in session_folder.branches():
        return ""
    return (f"its name leads to {target}, where other snapshots are, and not to {session_folder.folder}; expected the "
            f"file s-{branch_hash}/branch as this store wrote it. `snapshots gc` writes it anew if it is missing")


def lost_snapshots(files: Files, key: bytes | None, seen: Container[str], name_hashes: Iterable[str] | None = None
                   ) -> Iterator[tuple[SessionFolder, str, int]]:
    """The newest snapshots of branches that were saved and of which no manifest is left: the session's folder, the path
    of the manifest in it, and its generation.

    Args:
        seen: hashes of names to leave out. name_hashes: those to look at, None for all that have a record.
    """
    for name_hash in recorded_names(files) if name_hashes is None else name_hashes:
        if name_hash not in seen and (record := readable_record(files, name_hash)) is not None and record.newest:
            session_folder = SessionFolder(files, record.folder, key)
            try:
                is_lost = record.newest in session_folder.generations_of(name_hash)[0] and (
                    not session_folder.present_generations(name_hash)[0])
            except SnapshotCorrupt:  # the folder is a link, as reading the snapshot will report
                is_lost = True
            if is_lost:
                yield session_folder, f"m/{name_hash}/{record.newest:012d}.snap", record.newest


def _verify_snapshot(session_folder: SessionFolder, path: str, number: int, intact: set[str]) -> Verified:
    """Read the manifest at `path` and all files that it names but those in `intact`, to which it adds the others."""
    branch = name_of(session_folder, path)
    try:
        manifest = session_folder.manifest_at(path)[0]
        refs: tuple[PageRef | LogRef, ...] = (*manifest.pages, *(manifest.log or ()))
        for ref in refs:
            if ref.name not in intact:
                folder = "pages" if isinstance(ref, PageRef) else "log"
                body, sections = session_folder.read_named(folder, ref, f"{folder} file {ref.name}")
                if (body.start, body.end) != (ref.start, ref.end):
                    raise SnapshotCorrupt(f"{folder} file {ref.name} is of positions {body.start} to {body.end}; "
                                          f"expected {ref.start} to {ref.end}")
                if isinstance(body, LogPart):
                    read_part(body, sections, f"log part {ref.name}")
                intact.add(ref.name)
    except SnapshotError as error:
        return Verified(name=branch, generation=number, problem=str(error), locked=isinstance(error, MissingKey))
    return Verified(name=branch, generation=number)


def unlisted_path(session_folder: SessionFolder) -> str:
    """A path that stands for the snapshots of a session that cannot be listed, because their folder is a link."""
    return f"m/{session_folder.folder[2:]}/{0:012d}.snap"


def name_of(session_folder: SessionFolder, path: str) -> str:
    """The name of the branch whose manifest is at `path`, by its record or any of its manifests; else the path."""
    folder, branch_hash = path.rpartition("/")[0], path.split("/")[1]
    record = readable_record(session_folder.files, branch_hash)
    if record is not None and record.title and record.folder == session_folder.folder:
        return record.title
    with suppress(SnapshotCorrupt):  # the folder is a link
        for other, _ in session_folder.manifests():
            if other.startswith(f"{folder}/"):
                with suppress(SnapshotError):
                    return session_folder.manifest_at(other)[0].branch
    return f"{session_folder.folder}/{path}"
