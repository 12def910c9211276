"""Which replica a session's requests go to: the one whose place on a ring of hashes is next to the session's.

Ray's router is experimental, so that its name and its options are here alone.
"""

from __future__ import annotations

from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class StickyRouter(ConsistentHashRouter):
    """Ray's ring, from which a replica is gone as soon as one request found it dead.

    Ray's own waits for the controller's next list, and until then leads the sessions of the dead one to nobody: no
    other replica is tried for them.
    """

    def on_replica_actor_died(self, replica_id: object) -> None:
        super().on_replica_actor_died(replica_id)
        alive = frozenset(self._replica_id_set)
        if alive != self._replica_set_snapshot:  # every request that was there tells of the same death
            self._rebuild_ring(alive)


def sticky() -> RequestRouterConfig:
    """All requests of one `session_id` to one replica, as long as it lives; those without one to any.

    No other replica is tried where the session's own is busy: it would load the session, and the first to save would
    win. Requests wait instead, as far as the replica lets them. With more or fewer replicas about one session in as
    many moves.
    """
    return RequestRouterConfig(request_router_class=f"{__name__}.{StickyRouter.__name__}",
                               request_router_kwargs={"num_fallback_replicas": 0})
