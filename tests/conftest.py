"""For every test: one thread (models this small only lose time to a second), one hypothesis profile, and, where there
is no GPU, Triton's interpreter. Under `pytest -n` the processes that tests start have one thread as well."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # teams of threads on too few cores wait for each other for ever

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which transformers does too

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")
