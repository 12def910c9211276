"""Scripts, each run by its path: `python examples/quickstart.py`. This folder is a package so that tests can import the
parts of `bundled_model`."""
