"""What an earlier library wrote opens for ever: the committed stores of every format version, value by value."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from locret_stream.errors import SnapshotTooNew
from locret_stream.kernels import dequantise_units
from locret_stream.snapshot.format import VERSION
from tests.snapshot.golden import make_codes
from tests.snapshot.golden.make_golden import plain
from tests.snapshot.support import IDENTITY, KEY, load, local_store, of_version, resume, save

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: opening a store makes lock files."""
    return shutil.copytree(GOLDEN / request.param, tmp_path / "golden")


def test_the_current_version_has_its_golden_store():
    assert VERSIONS[-1] == f"v{VERSION}"


def test_every_session_of_it_opens_and_holds_what_it_held(golden: Path):
    expected = json.loads((golden / "expected.json").read_text())
    stores = {"plain": local_store(golden / "plain"), "sealed": local_store(golden / "sealed", key=KEY)}
    for name, what in expected.items():
        branch, record = load(stores["sealed" if name == "bob" else "plain"], name)
        current = json.loads(json.dumps(plain(record)))
        assert current == what
        branch.close()
    for store in stores.values():
        assert [result.problem for result in store.verify()] == [""] * len(store.verify())


def test_a_save_goes_on_from_it(golden: Path):
    store = local_store(golden / "plain")
    branch, toy = resume(store, "alice")
    assert save(branch, toy.feed(13, branch)).generation == 4
    branch.close()
    again, record = load(store, "alice")
    again.close()
    assert plain(record) == plain(toy.record())


def test_one_of_a_later_version_is_too_new(golden: Path):
    manifest = max((golden / "plain").glob("s-*/m/*/*.snap"))
    manifest.write_bytes(of_version(manifest.read_bytes(), VERSION + 1))
    store = local_store(golden / "plain")
    with pytest.raises(SnapshotTooNew, match=f"version {VERSION + 1}"):
        for name in ("alice", "alice/fork"):
            load(store, name)[0].close()


@pytest.mark.parametrize("name", make_codes.BITS)
def test_codes_that_an_earlier_library_wrote_mean_what_they_meant(name: str, tmp_path: Path):
    """Each channel is within half a step, by the formula that the store was made with."""
    bits = make_codes.BITS[name]
    branch = local_store(shutil.copytree(GOLDEN / "codes", tmp_path / "codes")).branch(name)
    tensors = branch.load(IDENTITY, make_codes.geometry(bits), (make_codes.SEEN,) * make_codes.LAYERS).tensors
    branch.close()
    for layer in range(make_codes.LAYERS):
        for part, of, exact in zip(("keys", "values"), bits, make_codes.channels(layer), strict=True):
            rows, mean = tensors[f"{layer}.{part}"], tensors[f"{layer}.key_mean"][:, None] if part == "keys" else None
            found = rows.view(torch.float32) if of == 16 else dequantise_units(rows, of, torch.empty_like(exact), mean)
            assert (found - exact).abs().max() <= (0 if of == 16 else 1.01 / (2**of - 1))
            assert torch.equal(tensors[f"{layer}.first_{part}"], exact[:, :make_codes.FIRST])
