"""Writes the golden store of the current format: `python -m tests.snapshot.golden.make_golden`.

Run it once per format version, commit what it wrote, and never run it again for that version: it is what old files look
like. A branch saved three times with dead units and a log, a fork of it, and an encrypted session; what they hold is
kept as plain JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

from locret_stream.snapshot.format import VERSION
from tests.snapshot.support import KEY, Record, begin, local_store, save

FOLDER = Path(__file__).parent / f"v{VERSION}"


def plain(record: Record) -> dict:
    """A record as JSON can hold it; floats keep every bit."""
    tensors = {name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "values": tensor.flatten().tolist()}
               for name, tensor in sorted(record.tensors.items())}
    return {"seen": record.seen, "tokens": record.tokens, "frame": [record.frame.turn, record.frame.text],
            "ids": record.ids and list(record.ids), "tensors": tensors}


def main() -> None:
    assert not FOLDER.exists(), f"{FOLDER} is there already; old files are never made anew"
    expected = {}
    store = local_store(FOLDER / "plain")
    branch, toy = begin(store, "alice", tokens=30)
    for tokens in (0, 25, 3):
        save(branch, toy.feed(tokens, branch))
    expected["alice"] = plain(toy.record())
    fork = branch.fork("alice/fork", toy.seen)
    other = toy.diverged(9)
    save(fork, other.feed(17, fork))
    expected["alice/fork"] = plain(other.record())
    sealed = local_store(FOLDER / "sealed", key=KEY)
    hidden, secret = begin(sealed, "bob", tokens=41)
    save(hidden, secret)
    expected["bob"] = plain(secret.record())
    for one in (branch, fork, hidden):
        one.close()
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
