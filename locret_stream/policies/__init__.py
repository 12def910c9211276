"""Eviction methods, one per file, under the names of their papers: each turns tensors into scores of units."""

from locret_stream.policies.base import Chunk, ColumnSums, Listening, Policy, can_share
from locret_stream.policies.registry import POLICIES, Knob, all_knobs, make_policy, typed_knobs, usual_policy

__all__ = ["POLICIES", "Chunk", "ColumnSums", "Knob", "Listening", "Policy", "all_knobs", "can_share",
           "make_policy", "typed_knobs", "usual_policy"]
