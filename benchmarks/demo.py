"""The demo as a newcomer runs it, with its wall time: `python benchmarks/demo.py`.

A new process, loading included: two memories read the whole stream, answer, and a further process answers from what was
saved. Arguments after `--` go to `locret-stream demo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from record import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    parser.add_argument("arguments", nargs="*", help="of the demo")
    options = parser.parse_args()
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "locret_stream", "demo", "--json", *options.arguments],
                          stdout=subprocess.PIPE, check=True)
    wall_s = time.perf_counter() - began
    record(options.keep or "demo", {"wall_s": round(wall_s, 1), **json.loads(done.stdout)},
           keep=options.keep is not None)


if __name__ == "__main__":
    main()
