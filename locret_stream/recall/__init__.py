"""What was read, found again by the words of a question: `passages` cuts token ids into passages, `index` finds them.

Knows text and tokens. Knows no tensors, no model and no context.
"""

from locret_stream.recall.index import Index, Passage
from locret_stream.recall.passages import Cutter, headers

__all__ = ["Cutter", "Index", "Passage", "headers"]
