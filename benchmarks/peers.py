"""Streaming prefill under a budget, ours and kvpress', on one random Llama: every case in a fresh process, in turn.

    pip install -c constraints.txt -e .
    python -m venv ../peer                          # kvpress needs an older transformers, so a place of its own
    ../peer/bin/pip install torch==2.13.0           # first, so that a CPU build stays one
    ../peer/bin/pip install kvpress==0.5.5
    python benchmarks/peers.py --peer-python ../peer/bin/python --tokens 65536 --repeats 5

Ours runs through the public async API with retaining heads; kvpress through its bounded recipe (`peer_kvpress.py`)
with KVzap, Knorm and SnapKV. Heads and KVzap's surrogate are random and of about the same size: what is compared is
cost, not what is kept. To know when reading the figures:

- KVzap scores the newest chunk only, and DecodingPress takes these scores for those of the oldest units. So what it
  keeps has nothing to do with its scores (where budget and chunk are equal, the first chunk stays for ever), the top-k
  is over one chunk instead of all units, and a budget above the chunk size fails.
- kvpress drops units in the order of their scores and lets positions grow without end; ours keeps the order of time,
  moves rows, and rotates the kept keys anew to their ranks.
- kvpress decodes outside the press, so its cache grows by what is generated, and so does ours until the next commit.

Prefill is without the LM head on both sides. `timing.py` tells what the figures are.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path

from timing import (
    SINKS,
    STABILIZERS,
    add_options,
    answer,
    check_options,
    figures,
    finish,
    heads_width,
    in_turn,
    ours,
    pool_note,
    ratio,
    run_case,
    settings_of,
    spreads,
    tiny_llama,
)

OURS, PEERS = "ours", ("kvzap", "knorm", "snapkv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has kvpress; without it ours is measured alone")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    add_options(parser, tokens=65_536, repeats=5)
    options = parser.parse_args()
    if options.case:
        answer(lambda settings: asyncio.run(ours(settings)))
        return
    check_options(parser, options)
    if options.peer_python and not shutil.which(options.peer_python):
        parser.error(f"--peer-python is {options.peer_python!r}; expected a Python interpreter")
    peers = list(options.peers) if options.peer_python else []
    if "kvzap" in peers and options.budget > options.chunk:
        parser.error(f"--budget is {options.budget} with a --chunk of {options.chunk}; expected at most the chunk, "
                     "or --peers without kvzap: it cannot keep more units than it scores at a time")
    here = Path(__file__).resolve()
    with tiny_llama(options.tokens) as folder:
        settings = settings_of(options, folder)
        runs = in_turn([OURS, *peers], options.repeats, lambda case: run_case(
            *((sys.executable, here) if case == OURS else (options.peer_python, here.with_name("peer_kvpress.py"))),
            case, settings))
    steady = -(-options.budget // options.chunk) + 1
    rows = {case: [figures(run, steady) for run in runs[case]] for case in runs}
    ratios = {f"{name} {OURS}/{peer}": ratio(rows[OURS], rows[peer], name)
              for name in ("tok_per_s", "decode_ms") for peer in peers}
    parameters = {case: runs[case][0]["parameters"] for case in runs}
    memory = runs[OURS][0]["memory"]
    finish(options, "peers", {case: spreads(rows[case]) for case in rows}, ratios,
           [f"parameters that score: {parameters}", pool_note(memory)],
           {name: settings[name] for name in ("tokens", "budget", "chunk", "decode")} | {
               "sinks": SINKS, "stabilizers": STABILIZERS, "heads_width": heads_width(), "parameters": parameters,
               "memory": memory, "peer_versions": runs[peers[0]][0]["versions"] if peers else None})


if __name__ == "__main__":
    main()
