"""What a runtime tells its user once, when it starts: a line for its log."""

from __future__ import annotations

import shlex

from locret_stream.config import ModelShape
from locret_stream.policies import usual_policy


def without_heads(shape: ModelShape, model: str) -> str:
    """That no heads were given and no policy was named, which policy is taken, and how heads are made.

    Args:
        model: as the command line takes it.
    """
    taken = usual_policy(with_heads=False)
    said = f"no retaining heads were given, and no policy: {taken!r} is taken, the best that needs none; "
    if shape.biased:
        return said + "heads know nothing of the bias by distance that this model adds to attention"
    if not shape.alike:
        return said + "heads are for models whose layers are alike, and those of this one differ"
    if all(shape.sliding):
        return said + "heads would decide nothing, as every layer of this model has a window"
    how = "" if shape.units[0].key_dim == shape.units[0].value_dim else " --features hidden"
    return said + ("with heads a memory keeps more, and this makes them: locret-stream train-heads --model "
                   f"{shlex.quote(model)} --data pairs.jsonl --out heads{how}")
