"""What papers say about eviction, tried again on a model trained for it. Scripts, run as modules from the root of the
repository: `python -m research.findings`; README.md says what each answers."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
