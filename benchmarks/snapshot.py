"""Saving and restoring a large cache against the disk's own speed: `python benchmarks/snapshot.py`.

Units of the shape of Llama-3.1-8B at 6,000 units per KV head (768 MB of K and V) are saved, saved again after 1 % new
tokens, and restored with every byte verified. In the same run, in turn, the same bytes are written with fsync and read
back from the page cache. Ratios are medians over the repeats.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from record import record

from locret_stream.snapshot import Geometry, Identity, LayerUnits, Moment, Save, Store

IDENTITY = Identity(**dict.fromkeys(Identity.__struct_fields__, "benchmark"))
SEEN, CHUNK = 1_000_000, 1024


class Cache:
    """Random units of `layers` x `heads` at random positions of a stream; 1 % of them can be replaced by newer ones."""

    def __init__(self, geometry: Geometry, units: int):
        self.geometry, self.units, self.seen = geometry, units, SEEN
        heads, dim, _ = geometry.layers[0]
        self.positions = [torch.stack([torch.randperm(SEEN)[:units].sort().values for _ in range(heads)])
                          for _ in geometry.layers]
        self.keys, self.values = ([torch.randn(heads, units, dim).to(geometry.dtype) for _ in geometry.layers]
                                  for _ in range(2))

    def advance(self) -> None:
        """As much text goes by as replaces 1 % of the units: random old ones leave, the newest come."""
        new = self.units // 100
        for layer, positions in enumerate(self.positions):
            keep = torch.stack([torch.randperm(self.units)[new:].sort().values for _ in range(len(positions))])
            fresh = torch.arange(self.seen, self.seen + new).expand(len(positions), -1)
            self.positions[layer] = torch.cat([positions.gather(1, keep), fresh], 1)
            for units in (self.keys, self.values):
                wide = keep[..., None].expand(-1, -1, units[layer].shape[-1])
                drawn = torch.randn(len(positions), new, units[layer].shape[-1]).to(units[layer].dtype)
                units[layer] = torch.cat([units[layer].gather(1, wide), drawn], 1)
        self.seen += new

    def between(self, layer: int, start: int, end: int) -> LayerUnits:
        """As the engine gives them."""
        return LayerUnits.between(start, end, self.positions[layer], self.keys[layer], self.values[layer])

    def moment(self) -> Moment:
        scores = {f"{layer}.scores": torch.randn(1, self.geometry.most_heads, self.units)
                  for layer in range(len(self.geometry.layers))}
        return Moment(self.seen, self.seen, (self.units,) * len(self.geometry.layers), self.positions, scores)


def save(branch, cache: Cache) -> tuple[float, int]:
    """Seconds and bytes of one save."""
    began = time.perf_counter()
    with Save(branch, cache.moment(), IDENTITY, cache.geometry) as run:
        for start, end in run.plan.write:
            run.page(start, end, [cache.between(layer, start, end) for layer in range(len(cache.geometry.layers))])
        done = run.finish("benchmark", branch.spool.start)
    return time.perf_counter() - began, done.bytes_written


def plain_write(folder: Path, data: bytearray, piece: int) -> float:
    """Seconds to write the bytes in files as large as pages, each with fsync, and the folder's."""
    began = time.perf_counter()
    for at in range(0, len(data), piece):
        with open(folder / f"plain {at}", "wb", buffering=0) as file:
            view = memoryview(data)[at:at + piece]
            while len(view):
                view = view[file.write(view):]
            os.fsync(file.fileno())
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    return time.perf_counter() - began


def plain_read(folder: Path) -> float:
    """Seconds to read all these files from the page cache, into fresh memory that need not be zeroed first."""
    began, kept = time.perf_counter(), []
    for file in sorted(folder.iterdir()):
        view = memoryview(np.empty(file.stat().st_size, np.uint8))
        kept.append(view)
        with open(file, "rb", buffering=0) as opened:
            while len(view):
                view = view[opened.readinto(view):]
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder without")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    geometry = Geometry.even(32, 8, 128, torch.bfloat16)
    spent: dict[str, list[float]] = defaultdict(list)
    written: dict[str, int] = {}
    torch.manual_seed(0)
    cache = Cache(geometry, options.units)
    root = Path(tempfile.mkdtemp(prefix="locret-snapshot-", dir=options.folder))
    try:
        for repeat in range(options.repeats):
            store = Store(root / str(repeat))
            branch = store.branch("benchmark")
            branch.begin()
            seconds, size = save(branch, cache)
            spent["save_s"].append(seconds)
            written["save"] = size
            plain = root / f"plain {repeat}"
            plain.mkdir()
            spent["plain_write_s"].append(plain_write(plain, bytearray(os.urandom(1 << 20)) * (size >> 20), 64 << 20))
            spent["plain_read_s"].append(plain_read(plain))
            reader = store.branch("benchmark")
            began = time.perf_counter()
            restored = reader.load(IDENTITY, geometry, (options.units,) * len(geometry.layers))
            spent["restore_s"].append(time.perf_counter() - began)
            assert torch.equal(restored.tensors["3.keys"], cache.keys[3])
            del restored
            reader.close()
            cache.advance()
            seconds, size = save(branch, cache)
            spent["save_again_s"].append(seconds)
            written["save_again"] = size
            branch.close()
            shutil.rmtree(root / str(repeat))
            shutil.rmtree(plain)
            print({name: round(values[-1], 3) for name, values in spent.items()}, file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    median = {name: statistics.median(values) for name, values in spent.items()}
    record(options.keep or "snapshot", {
        "units": options.units, "bytes": written["save"], "median": median, "all": dict(spent),
        "save_against_plain_write": median["plain_write_s"] / median["save_s"],
        "restore_against_plain_read": median["plain_read_s"] / median["restore_s"],
        "bytes_again": written["save_again"], "again_share_of_bytes": written["save_again"] / written["save"],
    }, keep=options.keep is not None)


if __name__ == "__main__":
    main()
