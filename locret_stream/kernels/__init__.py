"""Dispatch: the only place that decides which implementation of an operation runs. Today: the torch reference.

Every operation has one name; `kernels.reference` is its numeric specification.
"""

from locret_stream.kernels.reference import column_sums, gather_units, select_units

__all__ = ["column_sums", "gather_units", "select_units"]
