"""Two threads and one hypothesis profile for every test; a result must not depend on the machine's cores."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(2)
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")
