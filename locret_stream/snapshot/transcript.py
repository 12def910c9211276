"""What a stored session was told, read from disk and verified: its log of token ids, and how much of each is kept.

Knows nothing of tokenizers: whoever asks for text brings `decode`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from locret_stream.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotNotFound
from locret_stream.snapshot.format import LogRef, PageRef, tensors
from locret_stream.snapshot.log_reader import pending_ids, read_log
from locret_stream.snapshot.pages import unpack_masks
from locret_stream.snapshot.session_folder import SessionFolder
from locret_stream.snapshot.store import Store

Decode = Callable[[list[int]], str]
WINDOW, STEP = 128, 96  # tokens of a passage that is found, and from one to the next


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens start .. end-1 as text. share: how much of them memory keeps, on the mean over layers, KV heads and
    tokens; 0 to 1."""

    start: int
    end: int
    text: str
    share: float


@dataclass(frozen=True)
class Transcript:
    """One snapshot of a session.

    Args:
        tokens: accepted. pending: the last of them, not committed yet. positions [n] i64, ascending, of tokens that
            some layer and head keeps; shares [n] f64, by how many of all.
    """

    session_folder: SessionFolder
    name: str
    generation: int
    tokens: int
    log: tuple[LogRef, ...]
    pending: np.ndarray
    positions: np.ndarray
    shares: np.ndarray

    def ids(self) -> Iterator[tuple[int, np.ndarray]]:
        """(position of the first, ids), part by part.

        Raises:
            SnapshotCorrupt, StoreError: a part is damaged or missing.
        """
        at = 0
        for ids, _ in read_log(self.session_folder, self.name, self.log):
            yield at, ids
            at += len(ids)
        yield at, self.pending

    def between(self, start: int, end: int, decode: Decode) -> Passage:
        """The text of positions start .. end-1, as far as there are any. Raises as `ids`."""
        start = max(start, 0)
        end = max(start, min(end, self.tokens))
        found = [ids[max(start - at, 0):max(end - at, 0)] for at, ids in self.ids()]
        return self._passage(start, np.concatenate(found), decode)

    def kept(self, decode: Decode) -> list[Passage]:
        """What memory holds, run by run, in order. Raises as `ids`."""
        runs = list[tuple[int, np.ndarray]]()
        for at, ids in self.ids():
            own = self.positions[(self.positions >= at) & (self.positions < at + len(ids))]
            for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
                start, found = int(run[0]), ids[run[0] - at:run[-1] + 1 - at]
                if runs and runs[-1][0] + len(runs[-1][1]) == start:  # goes on from the part before
                    start, found = runs[-1][0], np.concatenate([runs.pop()[1], found])
                runs.append((start, found))
        return [self._passage(start, found, decode) for start, found in runs]

    def find(self, words: Sequence[str], decode: Decode, limit: int) -> list[Passage]:
        """Passages that have most of these words, upper and lower case alike; of equal ones the newest. In order of
        position. Raises as `ids`."""
        wanted, best = [word.lower() for word in words], list[tuple[int, int]]()
        tail = np.zeros(0, dtype=np.int32)
        for at, part in self.ids():
            ids, first = np.concatenate([tail, part]), at - len(tail)
            for start in range(0, max(len(ids) - (WINDOW - STEP), 1), STEP):
                text = decode(ids[start:start + WINDOW].tolist()).lower()
                if score := sum(word in text for word in wanted):
                    heapq.heappush(best, (score, first + start))
                    if len(best) > 4 * limit:  # neighbours overlap
                        heapq.heappop(best)
            tail = ids[-(WINDOW - STEP):]
        chosen = list[int]()
        for _, start in sorted(best, reverse=True):
            if all(abs(start - other) >= WINDOW for other in chosen) and len(chosen) < limit:
                chosen.append(start)
        around = WINDOW - STEP  # what stands at the edge is not cut off
        return [self.between(start - around, start + WINDOW + around, decode) for start in sorted(chosen)]

    def _passage(self, start: int, ids: np.ndarray, decode: Decode) -> Passage:
        inside = slice(*np.searchsorted(self.positions, [start, start + len(ids)]))
        share = float(self.shares[inside].sum() / len(ids)) if len(ids) else 0.0
        return Passage(start=start, end=start + len(ids), text=decode(ids.tolist()), share=round(share, 4))


def read_transcript(store: Store, name: str, generation: int | None = None, *, tokenizer: str | None = None
                    ) -> Transcript:
    """A snapshot of a session, the newest unless a number is given.

    Args:
        tokenizer: fingerprint of the one that will decode it; None leaves that unchecked.

    Raises:
        SnapshotNotFound, SnapshotCorrupt, StoreError; SnapshotMismatch: it was told by another tokenizer.
    """
    session_folder = store.branch(name).session_folder
    found, _ = session_folder.generations(name)
    if not found or (generation is not None and generation not in found):
        raise SnapshotNotFound(f"there is no {'session' if not found else f'snapshot {generation} of'} {name!r} in "
                               f"{store.url}")
    manifest, sections, _ = session_folder.read_manifest(name, found[-1] if generation is None else generation)
    what = f"snapshot {manifest.generation} of {name!r}"
    if manifest.log is None:
        raise SnapshotCorrupt(f"{what} has no log; expected a Store with log=True, without which no text can be shown")
    if tokenizer is not None and manifest.identity.tokenizer != tokenizer:
        raise SnapshotMismatch(f"{what} was made with another tokenizer; expected that of its model", field="tokenizer",
                               found=manifest.identity.tokenizer, expected=tokenizer)
    if set(sections) != {"state", "masks"}:
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}; expected state and masks")
    pending = pending_ids(tensors(sections["state"], what), what).astype(np.int32)
    masks = unpack_masks(tensors(sections["masks"], what), manifest.pages, what)
    living, heads = [], 1
    for ref, mask in zip(manifest.pages, masks, strict=True):
        positions, heads = _positions(session_folder, ref, what)
        if len(positions) != ref.units:
            raise SnapshotCorrupt(f"{what}: page {ref.name} has {len(positions)} units; expected {ref.units}")
        living.append(positions if mask is None else positions[mask])
    seen = manifest.seen
    at, counts = np.unique(np.concatenate(living) if living else np.zeros(0, np.int64), return_counts=True)
    waiting = np.arange(seen, seen + len(pending))
    return Transcript(session_folder, name, manifest.generation, manifest.tokens, manifest.log, pending,
                np.concatenate([at, waiting]), np.concatenate([counts / heads, np.ones(len(pending))]))


def _positions(session_folder: SessionFolder, ref: PageRef, what: str) -> tuple[np.ndarray, int]:
    """Positions of a verified page's units, in the order of its mask, and how many heads all layers have."""
    page = f"{what}, page {ref.name}"
    body, sections = session_folder.read_named("pages", ref, page)
    index = tensors(sections["index"], page) if "index" in sections else {}
    counts = index.get("counts")
    if (body.start, body.end) != (ref.start, ref.end) or counts is None or counts.dtype != torch.int32 or (
            counts.dim() != 2 or not counts.numel()):
        raise SnapshotCorrupt(f"{page}: not the page that is named")
    layers = [own for layer in range(len(counts)) if (own := index.get(f"{layer}.positions")) is not None
              and own.dtype == torch.int32 and own.dim() == 1]
    if len(layers) < len(counts):
        raise SnapshotCorrupt(f"{page}: a layer without positions, or with strange ones")
    positions = torch.cat(layers).numpy().astype(np.int64) + ref.start
    if ((positions < ref.start) | (positions >= ref.end)).any():
        raise SnapshotCorrupt(f"{page}: positions outside {ref.start} to {ref.end}")
    return positions, counts.numel()
