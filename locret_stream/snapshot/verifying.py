"""Whether what a store holds is sound: every byte of it, and that nothing of it is missing. Changes nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew
from locret_stream.snapshot.files import Files
from locret_stream.snapshot.format import LogRef
from locret_stream.snapshot.log import read_part
from locret_stream.snapshot.names import FOLDER, hashed, known, record, records
from locret_stream.snapshot.pages import PageRef
from locret_stream.snapshot.seal import Locked
from locret_stream.snapshot.vault import MANIFEST_LIMIT, Vault, leads


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that was read whole: what is wrong with it, or "" for nothing; `locked` if its key was not given."""

    name: str
    generation: int
    problem: str = ""
    locked: bool = False


def verify(files: Files, key: bytes | None, vaults: Sequence[Vault], name: str | None) -> list[Verified]:
    """What `Store.verify` gives, of those sessions; name: of this alone."""
    out: list[Verified] = []
    seen: set[str] = set()
    links: list[Vault] = []
    for vault in vaults:
        good: set[str] = set()
        try:
            for path, number in vault.manifests():
                branch = path.split("/")[1]
                if name is None or branch == hashed(name):
                    found = _verify(vault, path, number, good)
                    if not found.problem and (vault.numbers(branch)[1], vault.gone(branch, number)) == (number, False):
                        found = msgspec.structs.replace(found, problem=_unnamed(vault, branch))
                    if not found.problem or (path, number) in vault.manifests():  # else deleted while it was read
                        out.append(found)
                        seen.add(branch)
        except SnapshotCorrupt:
            links.append(vault)
            continue
        with suppress(SnapshotCorrupt):  # the log's folder is a link: what needs it has said so
            out += [found for found in _outrun(vault) if name is None or found.name == name]
    names = [hashed(name)] if name is not None else sorted({*records(files), *(
        folder[2:] for folder in files.folders("") if FOLDER.fullmatch(folder))})
    for vault, path, number in lost(files, key, frozenset(seen), names):
        found = _verify(vault, path, number, set())
        if found.problem:
            out.append(found)
            seen.add(path.split("/")[1])
            links = [link for link in links if link.folder != vault.folder]
    out += [_verify(vault, nowhere(vault), 0, set()) for vault in links]
    for own in names:
        try:
            record(files, own)
            if own not in seen:
                leads(files, f"s-{own}")
        except (SnapshotCorrupt, SnapshotTooNew) as error:
            out.append(Verified(name=name or f"s-{own}", generation=0, problem=str(error)))
    return out


def _outrun(vault: Vault) -> Iterator[Verified]:
    """Branches of whose later snapshots nothing is left but their log parts: save number n rests on number n - 1,
    which was there then. A part of the next number alone may be of a save that died.

    Only where collectors hold saves off: elsewhere a part may be left of a session that was forgotten meanwhile.
    """
    newest: dict[str, int] = {}
    for file, size in vault.files.sizes(f"{vault.folder}/log").items() if vault.files.locks else ():
        with suppress(SnapshotError):
            body, _ = vault.read_named("log", LogRef(file, 0, 0, min(size, MANIFEST_LIMIT)), file)
            newest[body.branch] = max(newest.get(body.branch, 0), body.generation)
    for branch, number in sorted(newest.items()):
        found, highest = vault.generations(branch)
        if found and number > highest + 1:
            yield Verified(name=branch, generation=number - 1, problem=(
                f"the log holds what snapshot {number} of {branch!r} was to name, and the newest there is is "
                f"{highest}: an older copy was put back. Expected the snapshots in between"))


def _unnamed(vault: Vault, branch: str) -> str:
    """Why the name of a branch with snapshots in that session does not lead to them; "" if it does."""
    try:
        there = leads(vault.files, f"s-{branch}") or f"s-{branch}"
    except (SnapshotCorrupt, SnapshotTooNew) as error:
        return str(error)
    if there == vault.folder or branch not in vault.files.folders(f"{vault.folder}/m"):
        return ""
    return (f"its name leads to {there}, where other snapshots are, and not to {vault.folder}; expected the file "
            f"s-{branch}/branch as this store wrote it. `snapshots gc` writes it anew if it is gone")


def lost(files: Files, key: bytes | None, seen: Container[str], names: Iterable[str] | None = None
         ) -> Iterator[tuple[Vault, str, int]]:
    """The newest snapshots of names (None: of all with a record) that were saved and of whose branch nothing is
    left, other than those in `seen`: vault, path in it, number."""
    for name in records(files) if names is None else names:
        if name not in seen and (told := known(files, name)) is not None and told.newest:
            vault = Vault(files, told.folder, key)
            try:
                gone = told.newest in vault.numbers(name)[0] and not vault.there(name)[0]
            except SnapshotCorrupt:  # the folder is a link: who reads it is told
                gone = True
            if gone:
                yield vault, f"m/{name}/{told.newest:012d}.snap", told.newest


def _verify(vault: Vault, path: str, number: int, good: set[str]) -> Verified:
    branch = name_of(vault, path)
    try:
        manifest = vault.manifest_at(path)[0]
        for ref in (*manifest.pages, *(manifest.log or ())):
            if ref.name not in good:
                folder = "pages" if isinstance(ref, PageRef) else "log"
                body, sections = vault.read_named(folder, ref, f"{folder} file {ref.name}")
                if (body.start, body.end) != (ref.start, ref.end):
                    raise SnapshotCorrupt(f"{folder} file {ref.name} is of positions {body.start} to {body.end}; "
                                          f"expected {ref.start} to {ref.end}")
                if folder == "log":
                    read_part(body, sections, f"log part {ref.name}")
                good.add(ref.name)
    except SnapshotError as error:
        return Verified(name=branch, generation=number, problem=str(error), locked=isinstance(error, Locked))
    return Verified(name=branch, generation=number)


def nowhere(vault: Vault) -> str:
    """A path for what is to be told of a session whose snapshots cannot even be counted, for their folder is a link."""
    return f"m/{vault.folder[2:]}/{0:012d}.snap"


def name_of(vault: Vault, path: str) -> str:
    """Of the branch whose manifest that is, if its record or one of its manifests can be read; else the path."""
    folder, branch = path.rpartition("/")[0], path.split("/")[1]
    if (told := known(vault.files, branch)) is not None and told.title and told.folder == vault.folder:
        return told.title
    with suppress(SnapshotCorrupt):  # a folder that is a link
        for other, _ in vault.manifests():
            if other.startswith(f"{folder}/"):
                with suppress(SnapshotError):
                    return vault.manifest_at(other)[0].branch
    return f"{vault.folder}/{path}"
