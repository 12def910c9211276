"""Shared by the benchmarks and `research`: what a figure was measured with, and the file it is kept in."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"
SETTINGS = "LOCRET_KERNELS", "LOCRET_CUDA_GRAPHS", "OMP_NUM_THREADS", "TRITON_INTERPRET"  # of the environment


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()


def hardware() -> str:
    """CPU model, cores that may be used, memory, and the GPU if there is one."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines()
                      if line.startswith("model name")), model)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB{gpu}"


def _triton() -> dict[str, str]:
    try:
        return {"triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _command() -> str:
    """What runs this script from the root of the repository: by its path, or as a module where it was run as one."""
    spec = sys.modules["__main__"].__spec__
    script = ["-m", spec.name] if spec else [f"benchmarks/{Path(sys.argv[0]).name}"]
    return shlex.join(["python", *script, *sys.argv[1:]])


def record(name: str, result: dict[str, Any], *, keep: bool, results: Path = RESULTS, shown: bool = True
           ) -> dict[str, Any]:
    """Print the result as one JSON object with its circumstances, which is returned; with `keep` also write it to
    `results`/NAME.json.

    Args:
        shown: whether to print it.
    """
    changed = _git("status", "--porcelain", ":(top)*.py", ":(top)*.toml", ":(top)*.sh", ":(top)locret_stream")
    whole = {
        "command": _command(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if changed else ""),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__} | _triton(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "date": datetime.date.today().isoformat(),
        "result": result,
    }
    text = json.dumps(whole, indent=1)
    if shown:
        print(text)
    if keep:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{name}.json").write_text(text + "\n")
    return whole
