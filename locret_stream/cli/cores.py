"""How many cores this process may use: in containers often fewer than the machine has. Knows Linux's control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores by affinity and by the quota of the control group, at least 1. torch counts those of the machine, and more
    threads than cores make it many times slower."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _quota() -> float | None:
    """CPU time per time that the control group grants (version 2, then 1); None: no bound, or none that can be read."""
    try:
        quota, period = (ROOT / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (ROOT / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (ROOT / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None
