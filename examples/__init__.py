"""Scripts, each run by its path: `python examples/quickstart.py`. A package so that the parts of `bundled_model` can be
imported."""
