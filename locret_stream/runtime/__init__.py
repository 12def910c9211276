"""Runtime: `core` owns the engine and opens contexts, `sharing` has the slots, `loading` reads models."""

from locret_stream.runtime.core import Runtime, RuntimeMemory

__all__ = ["Runtime", "RuntimeMemory"]
