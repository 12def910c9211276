"""Training of retaining heads (Locret, arXiv:2410.01805): prompts with answers in, heads for one model out, tuned to a
budget, and what each layer needs of it."""

from locret_stream.training.allocation import allocate, held_out_examples
from locret_stream.training.config import (
    Allocation,
    AllocationConfig,
    Measurement,
    Progress,
    TrainConfig,
    TrainResult,
    TuneConfig,
    TuneResult,
)
from locret_stream.training.data import Example, load_examples, read_jsonl, render
from locret_stream.training.loop import evaluate_heads, train_heads
from locret_stream.training.progress import progress_bar
from locret_stream.training.tuning import is_tuned, tune
from locret_stream.training.validation import policy_for

__all__ = [
    "Allocation",
    "AllocationConfig",
    "Example",
    "Measurement",
    "Progress",
    "TrainConfig",
    "TrainResult",
    "TuneConfig",
    "TuneResult",
    "allocate",
    "evaluate_heads",
    "held_out_examples",
    "is_tuned",
    "load_examples",
    "policy_for",
    "progress_bar",
    "read_jsonl",
    "render",
    "train_heads",
    "tune",
]
