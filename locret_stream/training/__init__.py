"""Training of retaining heads (Locret, arXiv:2410.01805): prompts with answers in, heads for one model out, and what
each layer needs of the budget."""

from locret_stream.training.allocation import allocate, held_out_examples
from locret_stream.training.config import Allocation, AllocationConfig, Measurement, Progress, TrainConfig, TrainResult
from locret_stream.training.data import Example, load_examples, read_jsonl, render
from locret_stream.training.loop import evaluate_heads, train_heads
from locret_stream.training.progress import progress_bar

__all__ = [
    "Allocation",
    "AllocationConfig",
    "Example",
    "Measurement",
    "Progress",
    "TrainConfig",
    "TrainResult",
    "allocate",
    "evaluate_heads",
    "held_out_examples",
    "load_examples",
    "progress_bar",
    "read_jsonl",
    "render",
    "train_heads",
]
