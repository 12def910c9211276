"""Random damage to sound containers, through every reader: only SnapshotError may come out. Prints counts as JSON.

    python -m tests.snapshot.fuzz_format --inputs 200000 --seed 0

Half of the inputs are damaged as they lie on a disk; none of these may pass as sound. In the other half a field, a
tensor header or a tensor is changed and the checksums are made anew, as an attacker would, so that the readers behind
them are reached. Exits with 1 on any other exception, on damage that was not noticed, and past the bound of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from locret_stream.errors import SnapshotError
from locret_stream.snapshot.format import LogPart, Manifest, Page
from tests.snapshot.forge import MASK, NUMBERS, SOUND, build, page_ref, parts_of, read_all

NUMBERS_TO_TRY = [0, 1, 2, 3, 7, 8, 9, 15, 16, 63, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31,
                  2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -2**31, -2**63]
VALUES: list[Any] = [None, True, False, "", "x", "a" * 32, b"", b"\xff", [], {}, [[]], 0.0, 1.5, float("nan"),
                     float("inf"), "é" * 300, [0] * 50, {"x": 0}]
GROWTH_LIMIT = 256 << 20  # bytes of resident memory; every input is smaller than 16 KiB


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed in one to four places: flipped, set, cut, repeated, moved, or made another number."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(out):
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0x90, 0xC1, 0xDD, 0xFF, rng.randrange(256)))
            case 3:
                del out[at:]
            case 4:
                del out[at:at + rng.choice((1, 2, 8, 64))]
            case 5:
                out[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
            case 6:
                start = rng.randrange(len(out) + 1)
                part = out[start:start + rng.choice((1, 4, 32, 64))]
                out[at:at + len(part) * rng.randrange(2)] = part
            case _:
                size = rng.choice((2, 4, 8))
                number = rng.choice(NUMBERS_TO_TRY) % 2 ** (8 * size)
                out[at:at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        if not out:
            break
    return bytes(out)


def changed(tree: Any, rng: random.Random) -> Any:
    """A copy of a decoded tree with one leaf or branch changed; every leaf is as likely as another."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        name = rng.choices(list(tree), [leaves(value) for value in tree.values()])[0]
        match rng.randrange(12):
            case 0:
                return {key: value for key, value in tree.items() if key != name}
            case 1:
                return {**tree, rng.choice(("later", "", "x", name + "x")): tree[name]}
            case _:
                return {**tree, name: changed(tree[name], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        at = rng.choices(range(len(tree)), [leaves(value) for value in tree])[0]
        match rng.randrange(12):
            case 0:
                return tree[:at] + tree[at + 1:]
            case 1:
                return tree[:at] + [tree[at]] * rng.choice((2, 3, 40)) + tree[at + 1:]
            case 2:
                other = rng.randrange(len(tree))
                tree = list(tree)
                tree[at], tree[other] = tree[other], tree[at]
                return tree
            case 3 | 4:  # numbers that agree with each other and with nothing else
                return tree[:at] + [rng.choice(NUMBERS_TO_TRY)] * (len(tree) - at)
            case _:
                return [*tree[:at], changed(tree[at], rng), *tree[at + 1:]]
    if isinstance(tree, int) and rng.random() < 0.7:
        near = (tree + 1, tree - 1, 2 * tree, -tree, tree ^ 1 << rng.randrange(8))
        return min(max(rng.choice((*near, rng.choice(NUMBERS_TO_TRY))), -2**63), 2**64 - 1)  # msgpack knows no others
    if isinstance(tree, str) and tree and rng.random() < 0.5:
        at = rng.randrange(len(tree))
        return tree[:at] + rng.choice(("", "\0", "g", "\n", tree)) + tree[at + 1:]
    return rng.choice((*VALUES, *NUMBERS_TO_TRY))


def leaves(tree: Any) -> int:
    """How many values a tree holds, itself counted where it is empty."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(map(leaves, inner)) or 1


def forged(kind: type, rng: random.Random) -> bytes:
    """A container that lies about something, with checksums that hold."""
    header, sections = parts_of(SOUND[kind]())
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(sections))
        match rng.randrange(10):
            case 0 | 1 | 2:
                header["body"] = changed(header["body"], rng)
            case 3 | 4 | 5 | 6:
                sections[name] = with_entries(sections[name], lambda tree: changed(tree, rng))
            case 7:
                length = 8 + int.from_bytes(sections[name][:8], "little")
                sections[name] = sections[name][:length] + damaged(sections[name][length:] or b"\0", rng)
            case 8:
                sections[name] = damaged(sections[name], rng)
            case _:
                other = rng.choice(list(sections))
                sections[name], sections[other] = sections[other], sections[name]
    items = list(sections.items())
    match rng.randrange(16):
        case 0:
            return build(NUMBERS[kind], header["body"], items, entries=changed(header["sections"], rng))
        case 1:
            whole = msgspec.msgpack.encode({"body": header["body"], "sections": header["sections"]})
            return build(NUMBERS[kind], None, items, header=damaged(whole, rng))
        case 2:
            rng.shuffle(items)
    return build(NUMBERS[kind], header["body"], items)


def with_entries(section: bytes, change: Callable[[Any], Any]) -> bytes:
    """A section whose tensor header is changed and written again."""
    length = int.from_bytes(section[:8], "little")
    try:
        tree = json.loads(section[8:8 + length])
    except ValueError:  # damaged before
        return section
    text = json.dumps(change(tree), default=str).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + section[8 + length:]


def run(inputs: int, seed: int) -> dict[str, Any]:
    """Read that many inputs; a seed gives the same ones again."""
    rng = random.Random(seed)
    kinds = {kind: (make(), set()) for kind, make in SOUND.items()}
    page = page_ref("0" * 32, 10, 30, 12, 9)
    refused: Counter[str] = Counter()
    accepted = undetected = behind = unchanged = 0
    untyped: list[dict[str, Any]] = []
    before, began, longest = _resident(), time.perf_counter(), 0.0
    for number in range(inputs):
        kind = rng.choice((Manifest, Page, LogPart))
        sound, raw = kinds[kind][0], rng.random() < 0.5
        data = damaged(sound, rng) if raw else forged(kind, rng)
        ref = page if kind is Page and rng.random() < 0.5 else None
        start = time.perf_counter()
        try:
            read_all(kind, bytearray(data) if rng.random() < 0.5 else data, ref, MASK)
            accepted += 1
            unchanged += data == sound
            undetected += raw and data != sound
        except SnapshotError as error:
            refused[type(error).__name__] += 1
            behind += not raw and "checksum" not in str(error)
        except Exception as error:
            untyped.append({"input": number, "kind": kind.__name__, "error": repr(error)[:200], "hex": data.hex()})
        longest = max(longest, time.perf_counter() - start)
    return {"inputs": inputs, "seed": seed, "seconds": round(time.perf_counter() - began, 1),
            "accepted": accepted, "accepted_unchanged": unchanged, "refused": dict(refused),
            "refused_behind_checksums": behind, "undetected": undetected, "untyped": untyped[:20],
            "untyped_count": len(untyped), "longest_s": round(longest, 3), "grown_bytes": _resident() - before}


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result = run(given.inputs, given.seed)
    print(json.dumps(result, indent=2))
    return int(bool(result["untyped_count"] or result["undetected"] or result["grown_bytes"] > GROWTH_LIMIT))


if __name__ == "__main__":
    sys.exit(main())
