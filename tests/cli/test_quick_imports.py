"""The command line's import of transformers: the same modules and models as anybody's, listed once."""

from __future__ import annotations

import json
import sys

import pytest

from locret_stream.cli import quick_imports
from tests.processes import run_python

SHOWN = """
import hashlib, json, sys
folders = []
sys.addaudithook(lambda name, args: name == "os.scandir" and folders.append(str(args[0])))
{imports}
import torch, transformers, transformers.models
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import import_utils
lists = [sorted((name, str(module)) for name, module in part._class_to_module.items())
         for part in (transformers, transformers.models)]
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config).eval()
made = model.generate(torch.arange(8)[None], max_new_tokens=8, do_sample=False)
print(json.dumps({{
    "lists": hashlib.blake2b(json.dumps(lists).encode()).hexdigest(), "classes": [len(part) for part in lists],
    "made": made.tolist(), "type": type(model).__name__,
    "lister": import_utils.create_import_structure_from_path.__module__,
    "folders": sum("/transformers/models" in folder.replace(chr(92), "/") for folder in folders)}}))
"""


def run(code: str) -> str:
    ran = run_python("-c", code)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_transformers_is_the_same_and_was_listed_once():
    usual = json.loads(run(SHOWN.format(imports="")))
    found = json.loads(run(SHOWN.format(
        imports="from locret_stream.cli.quick_imports import import_quickly; import_quickly()")))
    folders, twice = found.pop("folders"), usual.pop("folders")
    assert found == usual
    assert 0 < folders <= twice / 2 + 2, "transformers lists its models as often as before"


def test_another_version_of_transformers_is_imported_as_it_is():
    assert run("""
import sys, types
from locret_stream.cli import quick_imports
from tests.processes import run_python
other, utils = types.ModuleType("transformers"), types.ModuleType("transformers.utils")
other.__file__, other.__path__, utils.__path__, utils.import_utils = "x/__init__.py", [], [], types.ModuleType("u")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            import importlib.machinery
            return importlib.machinery.ModuleSpec(name, self, origin="x/__init__.py", is_package=True)
    def create_module(self, spec):
        return other
    def exec_module(self, module):
        sys.modules["transformers.utils"] = utils
sys.meta_path.insert(0, Finder())
quick_imports.import_quickly()
print(sorted(name for name in sys.modules if name.startswith("transformers")))
""").strip() == "['transformers', 'transformers.utils']"


def test_a_process_that_has_imported_transformers_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """Such as one that runs the command line's functions beside others."""
    from transformers.utils import import_utils

    monkeypatch.delitem(sys.modules, "transformers.models")
    quick_imports.import_quickly()
    assert "transformers.models" not in sys.modules
    assert import_utils.create_import_structure_from_path.__module__ == "transformers.utils.import_utils"
