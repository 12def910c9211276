"""The text of a stored session, read from disk and verified: its log of token ids, and how much of each id is kept.

Knows nothing of tokenizers: a caller who wants text passes `decode`.
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
from locret_stream.snapshot.log import pending_ids, read_log
from locret_stream.snapshot.pages import unpack_masks
from locret_stream.snapshot.session_folder import SessionFolder
from locret_stream.snapshot.store import Store

Decode = Callable[[list[int]], str]
WINDOW, STEP = 128, 96  # tokens of a window that `find` searches, and from the start of one to that of the next


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens start .. end-1 as text.

    Args:
        share: of their units that are kept, as the mean over layers, KV heads and tokens; 0 to 1.
    """

    start: int
    end: int
    text: str
    share: float


@dataclass(frozen=True)
class Transcript:
    """The log of one snapshot of a session, and which of its tokens are kept.

    Args:
        tokens: how many were accepted. log: the parts with the committed ids. pending: the ids behind them.
        positions: [n] i64, ascending, of tokens of which any unit is kept, and of the pending ones.
        shares: [n] f64, for each of these the share of layers and KV heads that keep it.
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
        """(position of the first id, ids), part by part, the pending ids last. Raises as `read_log`."""
        at = 0
        for ids, _ in read_log(self.session_folder, self.name, self.log):
            yield at, ids
            at += len(ids)
        yield at, self.pending

    def between(self, start: int, end: int, decode: Decode) -> Passage:
        """The text of positions start .. end-1, cut to those that exist. Raises as `ids`."""
        start = max(start, 0)
        end = max(start, min(end, self.tokens))
        return self._passage(start, self.cuts([(start, end)])[0], decode)

    def cuts(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The ids start .. end-1 of each span, as far as they exist. Only the parts of the log that have any of them
        are read, each once. Raises as `ids`."""
        found = [[np.zeros(0, np.int32)] for _ in spans]

        def look(at: int, ids: np.ndarray) -> None:
            for (start, end), out in zip(spans, found, strict=True):
                out.append(ids[max(start - at, 0):max(end - at, 0)])

        for ref in self.log:
            if any(start < ref.end and end > ref.start for start, end in spans):
                for ids, _ in read_log(self.session_folder, self.name, [ref], at=ref.start):
                    look(ref.start, ids)
        look(self.log[-1].end if self.log else 0, self.pending)
        return [np.concatenate(out) for out in found]

    def kept(self, decode: Decode) -> list[Passage]:
        """The text of the kept tokens, one passage for every run of positions, in order. Raises as `ids`."""
        runs = list[tuple[int, np.ndarray]]()
        for at, ids in self.ids():
            inside = self.positions[(self.positions >= at) & (self.positions < at + len(ids))]
            for run in np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1) if len(inside) else ():
                start, run_ids = int(run[0]), ids[run[0] - at:run[-1] + 1 - at]
                if runs and runs[-1][0] + len(runs[-1][1]) == start:  # the run began in the part before
                    start, run_ids = runs[-1][0], np.concatenate([runs.pop()[1], run_ids])
                runs.append((start, run_ids))
        return [self._passage(start, run_ids, decode) for start, run_ids in runs]

    def find(self, words: Sequence[str], decode: Decode, limit: int) -> list[Passage]:
        """The `limit` passages that contain most of these words, in any case; of equal ones the newest. They come in
        order of position. Raises as `ids`."""
        wanted, best = [word.lower() for word in words], list[tuple[int, int]]()
        tail = np.zeros(0, dtype=np.int32)
        for at, part in self.ids():
            ids, first = np.concatenate([tail, part]), at - len(tail)
            for start in range(0, max(len(ids) - (WINDOW - STEP), 1), STEP):
                text = decode(ids[start:start + WINDOW].tolist()).lower()
                if score := sum(word in text for word in wanted):
                    heapq.heappush(best, (score, first + start))
                    if len(best) > 4 * limit:  # more than `limit`, since overlapping windows are left out below
                        heapq.heappop(best)
            tail = ids[-(WINDOW - STEP):]
        chosen = list[int]()
        for _, start in sorted(best, reverse=True):
            if all(abs(start - other) >= WINDOW for other in chosen) and len(chosen) < limit:
                chosen.append(start)
        around = WINDOW - STEP  # so that nothing is cut off at the edges of a window
        return [self.between(start - around, start + WINDOW + around, decode) for start in sorted(chosen)]

    def _passage(self, start: int, ids: np.ndarray, decode: Decode) -> Passage:
        inside = slice(*np.searchsorted(self.positions, [start, start + len(ids)]))
        share = float(self.shares[inside].sum() / len(ids)) if len(ids) else 0.0
        return Passage(start=start, end=start + len(ids), text=decode(ids.tolist()), share=round(share, 4))


def read_transcript(store: Store, name: str, generation: int | None = None, *,
                    tokenizer: str | Sequence[str] | None = None) -> Transcript:
    """The transcript of a snapshot of a session, the newest unless a generation is given.

    Args:
        tokenizer: fingerprint of the tokenizer that will decode it, or all that it ever had, newest first; None leaves
            that unchecked.

    Raises:
        SnapshotNotFound, SnapshotCorrupt, StoreError. SnapshotMismatch: its ids are of another tokenizer.
    """
    session_folder = store.branch(name).session_folder
    generations, _ = session_folder.generations(name)
    if not generations or (generation is not None and generation not in generations):
        missing = f"snapshot {generation} of" if generations else "session"
        raise SnapshotNotFound(f"there is no {missing} {name!r} in {store.url}")
    manifest, sections, _ = session_folder.read_manifest(name, generations[-1] if generation is None else generation)
    what = f"snapshot {manifest.generation} of {name!r}"
    if manifest.log is None:
        raise SnapshotCorrupt(f"{what} has no log; expected a Store with log=True, without which no text can be shown")
    known = [tokenizer] if isinstance(tokenizer, str) else tokenizer
    if known is not None and manifest.identity.tokenizer not in known:
        raise SnapshotMismatch(f"{what} was made with another tokenizer; expected that of its model", field="tokenizer",
                               found=manifest.identity.tokenizer, expected=known[0])
    if set(sections) != {"state", "masks"}:
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}; expected state and masks")
    pending = pending_ids(tensors(sections["state"], what), what).astype(np.int32)
    masks = unpack_masks(tensors(sections["masks"], what), manifest.pages, what)
    live, heads = [], 1
    for ref, mask in zip(manifest.pages, masks, strict=True):
        positions, heads = _positions(session_folder, ref, what)
        if len(positions) != ref.units:
            raise SnapshotCorrupt(f"{what}: page {ref.name} has {len(positions)} units; expected {ref.units}")
        live.append(positions if mask is None else positions[mask])
    kept, counts = np.unique(np.concatenate(live) if live else np.zeros(0, np.int64), return_counts=True)
    pending_positions = np.arange(manifest.seen, manifest.seen + len(pending))
    return Transcript(session_folder, name, manifest.generation, manifest.tokens, manifest.log, pending,
                      positions=np.concatenate([kept, pending_positions]),
                      shares=np.concatenate([counts / heads, np.ones(len(pending))]))


def _positions(session_folder: SessionFolder, ref: PageRef, what: str) -> tuple[np.ndarray, int]:
    """The positions [units] of a verified page's units, in the order of its mask, and the KV heads of all layers."""
    page = f"{what}, page {ref.name}"
    body, sections = session_folder.read_named("pages", ref, page)
    index = tensors(sections["index"], page) if "index" in sections else {}
    counts = index.get("counts")
    if (body.start, body.end) != (ref.start, ref.end) or counts is None or counts.dtype != torch.int32 or (
            counts.dim() != 2 or not counts.numel()):
        raise SnapshotCorrupt(f"{page}: not the page that is named")
    layers = [tensor for layer in range(len(counts)) if (tensor := index.get(f"{layer}.positions")) is not None
              and tensor.dtype == torch.int32 and tensor.dim() == 1]
    if len(layers) < len(counts):
        raise SnapshotCorrupt(f"{page}: a layer without positions, or with strange ones")
    positions = torch.cat(layers).numpy().astype(np.int64) + ref.start
    if ((positions < ref.start) | (positions >= ref.end)).any():
        raise SnapshotCorrupt(f"{page}: positions outside {ref.start} to {ref.end}")
    return positions, counts.numel()
