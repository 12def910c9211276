"""Training of retaining heads (Locret, arXiv:2410.01805): prompts with answers in, heads for one model out."""

from locret_stream.training.config import Progress, TrainConfig, TrainResult
from locret_stream.training.data import Example, load_examples, read_jsonl, render
from locret_stream.training.loop import evaluate_heads, train_heads
from locret_stream.training.progress import progress_bar

__all__ = [
    "Example",
    "Progress",
    "TrainConfig",
    "TrainResult",
    "evaluate_heads",
    "load_examples",
    "progress_bar",
    "read_jsonl",
    "render",
    "train_heads",
]
