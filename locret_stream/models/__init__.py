"""Models, the only room that knows transformers' internals: `attaching` proves one, `attachment` runs it, `rotary`
turns its keys and queries, `gradients` lets gradients through."""

from locret_stream.models.attaching import attach, attached, detach, self_test
from locret_stream.models.attachment import Attachment, Attended, LayerCall, additive_mask
from locret_stream.models.gradients import differentiable
from locret_stream.models.rotary import RopeTables

__all__ = ["Attachment", "Attended", "LayerCall", "RopeTables", "additive_mask", "attach", "attached", "detach",
           "differentiable", "self_test"]
