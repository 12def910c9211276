"""What a snapshot says of its settings, untrusted as it is, is read as far as it can be."""

from __future__ import annotations

from typing import Any

import pytest

from locret_stream.config import Budget
from locret_stream.host_tier import HostTier
from locret_stream.runtime.as_saved import settings_of
from locret_stream.snapshot import Identity

FIELDS = dict.fromkeys(Identity.__struct_fields__, "") | {
    "policy": "h2o", "knobs": "{}", "chunk_size": "8", "dtype": "float32",
    "budgets": "[20, 30], sinks and stabilizers [(2, 9), (2, 12)]"}


def said(**fields: str) -> dict[str, Any]:
    return settings_of(Identity(**FIELDS | fields))


def test_a_budget_by_layer_and_bits_are_read():
    assert said(dtype="bfloat16, stored in 8 and 4 bits") == {
        "policy": "h2o", "knobs": {}, "chunk_size": 8, "store_bits": (8, 4),
        "budget": Budget(units=25, sinks=2, stabilizers=9, allocation=(20.0, 30.0))}


def test_a_host_tier_is_read():
    """As far as it decides what is committed; a residual that no memory has is left out."""
    told = "float32, stored in 2 and 2 bits, exact in the host's memory"
    assert said(dtype=told)["exact"] == HostTier()
    assert said(dtype=f"{told}, codes are read but of 3")["exact"] == HostTier(prefill="codes", residual=3)
    saved = said(dtype=f"{told}, codes are read but of 3, saved as codes")["exact"]
    assert saved == HostTier(prefill="codes", residual=3, saves="codes")
    assert said(dtype="float32, stored in 2 and 2 bits").get("exact") is None
    assert said(dtype=f"{told}, codes are read but of {'9' * 9}")["exact"] == HostTier()


def test_where_windows_cut_layers_short_all_were_given_as_many_as_the_largest():
    found = said(budgets="[8, 33], sinks and stabilizers [(0, 0), (2, 3)]")
    assert found["budget"] == Budget(units=33, sinks=2, stabilizers=3, allocation="uniform")


@pytest.mark.parametrize("fields", [
    {"budgets": "[ ], sinks and stabilizers [(2, 3)]"}, {"budgets": f"[{'9' * 400}], sinks and stabilizers [(2, 3)]"},
    {"budgets": "[0], sinks and stabilizers [(2, 3)]"}, {"budgets": "20, 30"}, {"budgets": "[1,,], sinks and "
     "stabilizers [(2, 3)]"}, {"knobs": "[]"}, {"knobs": "{"}, {"chunk_size": "many"}, {"chunk_size": "9" * 5000}])
def test_what_cannot_be_read_is_left_out(fields: dict[str, str]):
    [name] = fields
    assert name.removesuffix("s") not in said(**fields) and name not in said(**fields)
