"""Retaining heads: small networks that score a unit once, when it is committed (Locret, arXiv:2410.01805)."""

from locret_stream.heads.module import HeadsConfig, RetainingHeads

__all__ = ["HeadsConfig", "RetainingHeads"]
