"""The random model of the command line's tests."""

from tests.cli.conftest import tiny

__all__ = ["tiny"]
