"""How many replicas there are: as many as it takes for the requests that run or wait to have slots. Memories that rest
hold no replica up: they wait in the store. Nothing here imports Ray: its controller calls `by_slots`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FILLED = 0.7  # of all slots, while a replica starts for more


def wanted(loads: float, slots: float, least: int, most: int) -> int:
    """Replicas for so many requests.

    Args:
        loads: requests that run or wait, of all replicas. slots: of one replica.
        least, most: replicas.
    """
    return min(max(math.ceil(loads / (slots * FILLED)), least), most)


def by_slots(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's policy: (replicas, state that is kept), from what `Memory.record_autoscaling_stats` told.

    Args:
        context: `ray.serve.config.AutoscalingContext`.
    """
    told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    slots = max(told.get("slots", {}).values(), default=0.0)
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    if not slots:  # no replica has told yet
        return min(max(context.target_num_replicas, least), most), {}
    return wanted(sum(told.get("load", {}).values()), slots, least, most), {}
