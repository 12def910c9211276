"""Importing the adapter and making a model is light: weights and their libraries are loaded by the first call."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_python

PROGRAM = """
import asyncio
import sys
def heavy():
    return [name for name in ("torch", "transformers", "triton") if name in sys.modules]
import langchain_locret
assert "langchain_core" not in sys.modules
from langchain_locret import LateWarning, LocretChatModel, RebuildWarning, StateLost, ToolsWarning
model = LocretChatModel(model="bundled", store=sys.argv[1], tool_prompt="auto", budget=512, temperature=0.5)
model.bind_tools([{"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}])
model.with_config(configurable={"thread_id": "x"}), model.model_copy(update={"max_tokens": 4})
model.with_structured_output({"title": "T", "description": "t", "type": "object", "properties": {}})
assert not model.save_thread("x") and not asyncio.run(model.asave_thread("x")) and model.profile["tool_calling"]
model.close()
print(heavy())
"""


def test_importing_the_adapter_and_making_a_model_loads_neither_torch_nor_transformers(tmp_path: Path):
    done = run_python("-c", PROGRAM, tmp_path, timeout_s=120)
    assert done.stdout.split("\n")[0] == "[]", done.stdout + done.stderr
