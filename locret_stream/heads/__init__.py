"""Retaining heads: small trained networks that score units as they are committed (Locret, arXiv:2410.01805)."""

from locret_stream.heads.module import HeadsConfig, RetainingHeads

__all__ = ["HeadsConfig", "RetainingHeads"]
