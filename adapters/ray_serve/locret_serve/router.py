"""Which replica a session's requests go to: the one whose place on a ring of hashes is next to the session's.

Ray's router is experimental, so that its name and its options are here alone.
"""

from __future__ import annotations

from ray.serve.config import RequestRouterConfig

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def sticky() -> RequestRouterConfig:
    """All requests of one `session_id` to one replica, as long as it lives; those without one to any.

    No other replica is tried where the session's own is busy: it would load the session, and the first to save would
    win. Requests wait instead, as far as the replica lets them. With more or fewer replicas about one session in as
    many moves.
    """
    return RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": 0})
