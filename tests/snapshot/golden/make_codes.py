"""Writes the golden store of a session in few bits: `python -m tests.snapshot.golden.make_codes`.

Run once, as `make_golden` is; a change of the codes of `kernels.reference.quantise_units` needs a store beside it, and
both must be read. Units are of numbers that can be written down: unit p of KV head h in layer l has the channels
c -> sin(p + 10 h + 100 l + c), its key 5 more, where the mean of its channels is 5.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from locret_stream.budgets import row_bytes
from locret_stream.kernels import quantise_units
from locret_stream.snapshot import Geometry, LayerUnits, Moment, Save
from tests.snapshot.support import IDENTITY, local_store

FOLDER = Path(__file__).parent / "codes"
LAYERS, HEADS, DIM, SEEN, FIRST = 2, 2, 64, 12, 2
BITS = {"eight": (8, 4), "two": (2, 16)}
MEAN = torch.full((HEADS, DIM), 5.0)


def geometry(bits: tuple[int, int]) -> Geometry:
    keys, values = (4 * DIM if one == 16 else row_bytes(DIM, one) for one in bits)
    return Geometry.even(LAYERS, HEADS, keys, torch.uint8, values)


def channels(layer: int) -> tuple[Tensor, Tensor]:
    """K and V of all units of a layer, [H, n, D]."""
    at = (torch.arange(SEEN)[None, :, None] + 10 * torch.arange(HEADS)[:, None, None] + 100 * layer
          + torch.arange(DIM)).double()
    values = at.sin().float()
    return values + 5, values


def rows(x: Tensor, bits: int, mean: Tensor | None) -> Tensor:
    return x.contiguous().view(torch.uint8) if bits == 16 else quantise_units(x, bits, mean)


def main() -> None:
    assert not FOLDER.exists(), f"{FOLDER} is there already; old files are never made anew"
    store, positions = local_store(FOLDER), torch.arange(SEEN).expand(HEADS, -1)
    for name, bits in BITS.items():
        branch, state, layers = store.branch(name), {}, []
        branch.begin()
        for layer in range(LAYERS):
            keys, values = channels(layer)
            state |= {f"{layer}.first_keys": keys[:, :FIRST], f"{layer}.first_values": values[:, :FIRST],
                      f"{layer}.key_mean": MEAN, f"{layer}.scores": torch.zeros(1, HEADS, SEEN)}
            layers.append((rows(keys, bits[0], MEAN[:, None]), rows(values, bits[1], None)))
        state |= {"seen": torch.tensor(SEEN), "pending": torch.zeros(0, dtype=torch.int64)}
        branch.note(0, list(range(SEEN)))
        moment = Moment(seen=SEEN, tokens=SEEN, counts=(SEEN,) * LAYERS, positions=[positions] * LAYERS, state=state)
        with Save(branch, moment, IDENTITY, geometry(bits)) as saving:
            for start, end in saving.plan.write:
                saving.page(start, end, [LayerUnits.between(start, end, positions, *layer) for layer in layers])
            saving.finish("golden", SEEN)
        branch.close()


if __name__ == "__main__":
    main()
