"""Where units live: one preallocated pool per runtime, and the store of one slot. Knows no policy."""

from locret_stream.cache.pool import Pool
from locret_stream.cache.unit_store import UnitStore

__all__ = ["Pool", "UnitStore"]
