"""Models, the only package that knows transformers' internals: `attachment` runs a model, `comparison` tests it,
`attaching` shares it, `decoders` finds its layers, `probing` sees what they keep, `own_attention` notices attention
that modules compute by themselves, `rotary` applies RoPE, `queries` knows what comes behind it, `recurrent` hands on
what layers without attention carry, `gradients` lets gradients through, `weights` knows how weights are packed;
`foreseen` tells of a model without them."""

from locret_stream.models.attaching import attach, attached, detach
from locret_stream.models.attachment import Attachment
from locret_stream.models.calls import Attended, LayerCall, Step, additive_mask, masked_attention, visible
from locret_stream.models.comparison import self_test
from locret_stream.models.foreseen import Foreseen, foresee
from locret_stream.models.gradients import differentiable, expect_gradients
from locret_stream.models.rotary import RopeTables
from locret_stream.models.weights import named_weights

__all__ = ["Attachment", "Attended", "Foreseen", "LayerCall", "RopeTables", "Step", "additive_mask", "attach",
           "attached", "detach", "differentiable", "expect_gradients", "foresee", "masked_attention", "named_weights",
           "self_test", "visible"]
