"""Snapshots: `format` (bytes and their specification), `identity`, `store` (the public part)."""

from locret_stream.snapshot.branch import Branch, Restored, Snapshot
from locret_stream.snapshot.format import NOTE_LIMIT, Frame
from locret_stream.snapshot.identity import Expected, Identity
from locret_stream.snapshot.names import check_name
from locret_stream.snapshot.pages import Geometry, LayerUnits
from locret_stream.snapshot.removing import Collected
from locret_stream.snapshot.save import Moment, Save
from locret_stream.snapshot.store import Store
from locret_stream.snapshot.verifying import Verified

__all__ = ["NOTE_LIMIT", "Branch", "Collected", "Expected", "Frame", "Geometry", "Identity", "LayerUnits", "Moment",
           "Restored", "Save", "Snapshot", "Store", "Verified", "check_name"]
