"""Where units live: one preallocated pool per runtime, and the store of one slot. Knows no policy."""

from locret_stream.cache.buffers import stored_row
from locret_stream.cache.headwise_codes import HeadwiseCodes, HeadwiseTier
from locret_stream.cache.headwise_store import NOWHERE, HeadwiseStore, HeadwiseUnits
from locret_stream.cache.pool import Pool
from locret_stream.cache.quantised_store import QuantisedStore
from locret_stream.cache.states import StateTensor
from locret_stream.cache.tiered_store import TieredStore
from locret_stream.cache.unit_store import UnitStore

__all__ = ["NOWHERE", "HeadwiseStore", "HeadwiseTier", "Pool", "QuantisedStore", "StateTensor", "TieredStore",
           "UnitStore", "store_of", "stored_row"]


def store_of(pool: Pool, slot: int) -> UnitStore:
    """The store of one slot, without units."""
    shares = any(pool.headwise)
    if pool.tier is not None:
        return (HeadwiseTier if shares else TieredStore)(pool, slot)
    if pool.quantised:
        return (HeadwiseCodes if shares else QuantisedStore)(pool, slot)
    return (HeadwiseUnits if shares else UnitStore)(pool, slot)
