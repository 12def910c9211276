"""Scripts, each run by its path: `python benchmarks/recall.py`. A package so that `research` can import `record`."""
