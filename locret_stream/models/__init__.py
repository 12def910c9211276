"""Models, the only room that knows transformers' internals: `attaching` proves one, `attachment` runs it, `rotary`
turns its keys and queries, `gradients` lets gradients through, `weights` knows how its weights are packed."""

from locret_stream.models.attaching import attach, attached, detach, self_test
from locret_stream.models.attachment import Attachment, Attended, LayerCall, additive_mask
from locret_stream.models.gradients import differentiable, expect_gradients
from locret_stream.models.rotary import RopeTables
from locret_stream.models.weights import named_weights

__all__ = ["Attachment", "Attended", "LayerCall", "RopeTables", "additive_mask", "attach", "attached", "detach",
           "differentiable", "expect_gradients", "named_weights", "self_test"]
