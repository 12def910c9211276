"""Whether what a store holds is sound: every byte of it, and that nothing of it is missing. Changes nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew
from locret_stream.snapshot.encryption import MissingKey
from locret_stream.snapshot.files import Files
from locret_stream.snapshot.format import LogPart, LogRef
from locret_stream.snapshot.log import read_part
from locret_stream.snapshot.names import FOLDER, hashed, known, record, records
from locret_stream.snapshot.pages import PageRef
from locret_stream.snapshot.session_folder import MANIFEST_LIMIT, SessionFolder, leads


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that was read whole: what is wrong with it, or "" for nothing; `locked` if its key was not given."""

    name: str
    generation: int
    problem: str = ""
    locked: bool = False


def verify(files: Files, key: bytes | None, session_folders: Sequence[SessionFolder], name: str | None
           ) -> list[Verified]:
    """What `Store.verify` gives, of those sessions; name: of this alone."""
    out: list[Verified] = []
    seen: set[str] = set()
    links: list[SessionFolder] = []
    for session_folder in session_folders:
        good: set[str] = set()
        try:
            for path, number in session_folder.manifests():
                branch = path.split("/")[1]
                if name is None or branch == hashed(name):
                    found = _verify(session_folder, path, number, good)
                    if not found.problem and number == session_folder.numbers(branch)[1] and not session_folder.gone(
                            branch, number):
                        found = msgspec.structs.replace(found, problem=_unnamed(session_folder, branch))
                    # Else it was deleted while it was read.
                    if not found.problem or (path, number) in session_folder.manifests():
                        out.append(found)
                        seen.add(branch)
        except SnapshotCorrupt:
            links.append(session_folder)
            continue
        with suppress(SnapshotCorrupt):  # the log's folder is a link: what needs it has said so
            out += [found for found in _outrun(session_folder) if name is None or found.name == name]
    names = [hashed(name)] if name is not None else sorted({*records(files), *(
        folder[2:] for folder in files.folders("") if FOLDER.fullmatch(folder))})
    for session_folder, path, number in lost(files, key, frozenset(seen), names):
        found = _verify(session_folder, path, number, set())
        if found.problem:
            out.append(found)
            seen.add(path.split("/")[1])
            links = [link for link in links if link.folder != session_folder.folder]
    out += [_verify(session_folder, nowhere(session_folder), 0, set()) for session_folder in links]
    for own in names:
        try:
            record(files, own)
            if own not in seen:
                leads(files, f"s-{own}")
        except (SnapshotCorrupt, SnapshotTooNew) as error:
            out.append(Verified(name=name or f"s-{own}", generation=0, problem=str(error)))
    return out


def _outrun(session_folder: SessionFolder) -> Iterator[Verified]:
    """Branches of whose later snapshots nothing is left but their log parts: save number n rests on number n - 1,
    which was there then. A part of the next number alone may be of a save that died.

    Only where collectors hold saves off: elsewhere a part may be left of a session that was forgotten meanwhile.
    """
    newest: dict[str, int] = {}
    files = session_folder.files
    for file, size in files.sizes(f"{session_folder.folder}/log").items() if files.locks else ():
        with suppress(SnapshotError):
            body, _ = session_folder.read_named("log", LogRef(file, 0, 0, min(size, MANIFEST_LIMIT)), file)
            newest[body.branch] = max(newest.get(body.branch, 0), body.generation)
    for branch, number in sorted(newest.items()):
        found, highest = session_folder.generations(branch)
        if found and number > highest + 1:
            yield Verified(name=branch, generation=number - 1, problem=(
                f"the log holds what snapshot {number} of {branch!r} was to name, and the newest there is is "
                f"{highest}: an older copy was put back. Expected the snapshots in between"))


def _unnamed(session_folder: SessionFolder, branch: str) -> str:
    """Why the name of a branch with snapshots in that session does not lead to them; "" if it does."""
    try:
        there = leads(session_folder.files, f"s-{branch}") or f"s-{branch}"
    except (SnapshotCorrupt, SnapshotTooNew) as error:
        return str(error)
    if there == session_folder.folder or branch not in session_folder.files.folders(f"{session_folder.folder}/m"):
        return ""
    return (f"its name leads to {there}, where other snapshots are, and not to {session_folder.folder}; expected the "
            f"file s-{branch}/branch as this store wrote it. `snapshots gc` writes it anew if it is gone")


def lost(files: Files, key: bytes | None, seen: Container[str], names: Iterable[str] | None = None
         ) -> Iterator[tuple[SessionFolder, str, int]]:
    """The newest snapshots of names (None: of all with a record) that were saved and of whose branch nothing is
    left, other than those in `seen`: session_folder, path in it, number."""
    for name in records(files) if names is None else names:
        if name not in seen and (told := known(files, name)) is not None and told.newest:
            session_folder = SessionFolder(files, told.folder, key)
            try:
                gone = told.newest in session_folder.numbers(name)[0] and not session_folder.there(name)[0]
            except SnapshotCorrupt:  # the folder is a link: who reads it is told
                gone = True
            if gone:
                yield session_folder, f"m/{name}/{told.newest:012d}.snap", told.newest


def _verify(session_folder: SessionFolder, path: str, number: int, good: set[str]) -> Verified:
    branch = name_of(session_folder, path)
    try:
        manifest = session_folder.manifest_at(path)[0]
        refs: tuple[PageRef | LogRef, ...] = (*manifest.pages, *(manifest.log or ()))
        for ref in refs:
            if ref.name not in good:
                folder = "pages" if isinstance(ref, PageRef) else "log"
                body, sections = session_folder.read_named(folder, ref, f"{folder} file {ref.name}")
                if (body.start, body.end) != (ref.start, ref.end):
                    raise SnapshotCorrupt(f"{folder} file {ref.name} is of positions {body.start} to {body.end}; "
                                          f"expected {ref.start} to {ref.end}")
                if isinstance(body, LogPart):
                    read_part(body, sections, f"log part {ref.name}")
                good.add(ref.name)
    except SnapshotError as error:
        return Verified(name=branch, generation=number, problem=str(error), locked=isinstance(error, MissingKey))
    return Verified(name=branch, generation=number)


def nowhere(session_folder: SessionFolder) -> str:
    """A path for what is to be told of a session whose snapshots cannot even be counted, for their folder is a link."""
    return f"m/{session_folder.folder[2:]}/{0:012d}.snap"


def name_of(session_folder: SessionFolder, path: str) -> str:
    """Of the branch whose manifest that is, if its record or one of its manifests can be read; else the path."""
    folder, branch = path.rpartition("/")[0], path.split("/")[1]
    told = known(session_folder.files, branch)
    if told is not None and told.title and told.folder == session_folder.folder:
        return told.title
    with suppress(SnapshotCorrupt):  # a folder that is a link
        for other, _ in session_folder.manifests():
            if other.startswith(f"{folder}/"):
                with suppress(SnapshotError):
                    return session_folder.manifest_at(other)[0].branch
    return f"{session_folder.folder}/{path}"
