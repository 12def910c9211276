"""Training of retaining heads (Locret, arXiv:2410.01805): prompts with answers in; out come heads for one model, tuned
for a budget, and the share of the budget that each layer needs."""

from locret_stream.training.allocation import allocate, held_out_examples
from locret_stream.training.config import AllocationConfig, TrainConfig, TuneConfig
from locret_stream.training.data import Example, load_examples, read_jsonl, render
from locret_stream.training.first_heads import is_tuned
from locret_stream.training.key_means import store_key_means
from locret_stream.training.loop import evaluate_heads, train_heads
from locret_stream.training.progress import progress_bar
from locret_stream.training.results import Allocation, Measurement, Progress, TrainResult, TuneResult
from locret_stream.training.tuning import tune
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
    "store_key_means",
    "train_heads",
    "tune",
]
