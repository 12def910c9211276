"""Which units stay: one method per file, named as its paper names it. Tensors in, scores out."""

from locret_stream.policies.base import Chunk, ColumnSums, Policy
from locret_stream.policies.observed import Listening
from locret_stream.policies.registry import POLICIES, Knob, all_knobs, make_policy, typed_knobs

__all__ = ["POLICIES", "Chunk", "ColumnSums", "Knob", "Listening", "Policy", "all_knobs", "make_policy", "typed_knobs"]
