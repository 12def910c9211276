"""The command line's import of transformers: the same models as anybody's, without what no verb needs."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from locret_stream.cli import quick_imports
from locret_stream.runtime.loading import load_model
from tests.architectures import CONFIGS, make
from tests.context.support import tokenizer
from tests.packings import as_gguf, base, needs, with_adapter
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


def run(code: str, *arguments: object) -> str:
    ran = run_python("-c", code, *arguments)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.thorough
def test_transformers_is_the_same_and_was_listed_once():
    usual = json.loads(run(SHOWN.format(imports="")))
    found = json.loads(run(SHOWN.format(
        imports="from locret_stream.cli.quick_imports import import_quickly; import_quickly()")))
    folders, twice = found.pop("folders"), usual.pop("folders")
    assert found == usual
    assert 0 < folders <= twice / 2 + 2, "transformers lists its models as often as before"


WITHOUT = "import sys; sys.modules['torchao'] = None; "  # which tests install and `make demo` does not; see below
QUICKLY = "from locret_stream.cli.quick_imports import import_quickly; import_quickly(); "


def test_an_answer_needs_neither_the_compiler_nor_what_runs_on_several_machines(tmp_path: Path):
    (notes := tmp_path / "notes.txt").write_text("The door code of falcon is 48213.\n")
    asked = ["locret-stream", "run", str(notes), "--model", "bundled", "--ask", "What is the door code of falcon?"]
    assert run(WITHOUT + f"""
import runpy
sys.argv = {asked!r}
try:
    runpy.run_module("locret_stream", run_name="__main__")
except SystemExit as end:
    print("status", end.code or 0)
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules])
""").split() == ["48213", "status", "0", "[]"]


@pytest.mark.thorough
def test_whoever_compiles_has_the_compiler():
    assert run(WITHOUT + QUICKLY + """
import torch
stock = torch.compiler.disable
assert stock.__module__ == "torch.compiler" and torch.compiler.allow_in_graph.__module__ == "torch.compiler"
from transformers import masking_utils
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
made = masking_utils.TransformGetItemToIndex()
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
print(type(made) is TransformGetItemToIndex, torch._dynamo is sys.modules["torch._dynamo"])
calls = []
@torch.compile(backend=lambda graph, inputs: calls.append(1) or graph)
def twice(x):
    return x * 2
print(twice(torch.ones(2)).tolist(), calls)
""").splitlines() == ["True True", "[2.0, 2.0] [1]"]


@pytest.mark.thorough
def test_every_architecture_gives_the_same(tmp_path: Path):
    usual = {}
    for name in CONFIGS:
        make(name).save_pretrained(tmp_path / name)
        with torch.no_grad():
            logits = load_model(tmp_path / name, "float32", "cpu")(torch.arange(24)[None]).logits
        usual[name] = hashlib.blake2b(logits.numpy().tobytes()).hexdigest()
    assert json.loads(run(WITHOUT + QUICKLY + f"""
import hashlib, json
import torch
from pathlib import Path
from locret_stream.runtime.loading import load_model
torch.set_num_threads({torch.get_num_threads()})
found = {{}}
for name in {list(CONFIGS)!r}:
    with torch.no_grad():
        logits = load_model(Path({str(tmp_path)!r}) / name, "float32", "cpu")(torch.arange(24)[None]).logits
    found[name] = hashlib.blake2b(logits.numpy().tobytes()).hexdigest()
print(json.dumps(found))
""").splitlines()[-1]) == usual


@pytest.mark.thorough
def test_whatever_else_is_asked_of_the_compiler_meanwhile_is_the_real_one():
    """As torchao does, which transformers imports where it is installed."""
    assert run(WITHOUT + """
import torch
from locret_stream.cli import quick_imports
with quick_imports._without_compiler():
    marked = torch._dynamo.disable(len) is len, 'torch._dynamo' in sys.modules
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as deferred, trace_wrapped
    import torch._dynamo.config
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
print(marked, trace_wrapped.__module__, torch._dynamo.config.__name__, isinstance(deferred(), TransformGetItemToIndex))
""").split() == "(True, False) torch._dynamo._trace_wrapped_higher_order_op torch._dynamo.config True".split()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.thorough
def test_one_process_of_several_keeps_what_runs_on_several_machines(several: bool):
    given = "import os; os.environ['WORLD_SIZE'] = '1'; " if several else ""
    assert run(WITHOUT + given + QUICKLY + """
from transformers.utils import is_torch_distributed_available
from transformers.utils.import_utils import is_torch_distributed_available as again
print(is_torch_distributed_available(), again())
""").split() == [str(several)] * 2


@pytest.mark.parametrize("torchao", ["None", "types.ModuleType('torchao')"])
@pytest.mark.thorough
def test_beside_torchao_nothing_is_left_out(torchao: str):
    """It brings along all of it."""
    assert run(f"""
import sys, types
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
sys.modules["torchao"] = {torchao}
if sys.modules["torchao"]:
    sys.modules["torchao"].__spec__ = ModuleSpec("torchao", None)
from locret_stream.cli import quick_imports
quick_imports._say_not_distributed = lambda: print("not distributed")
quick_imports._without_compiler = lambda: print("no compiler") or nullcontext()
quick_imports.import_quickly()
""").splitlines() == (["no compiler", "not distributed"] if torchao == "None" else [])


@pytest.mark.parametrize("change", ["del torch.compiler.assume_constant_result", ""])
@pytest.mark.thorough
def test_a_version_without_what_is_changed_is_imported_as_it_is(change: str):
    assert run(WITHOUT + f"import torch; {change}\n" + QUICKLY + """
from transformers import LlamaForCausalLM
from transformers.utils import is_torch_distributed_available
print(is_torch_distributed_available(), "torch._dynamo" in sys.modules)
""").split() == [str(bool(change))] * 2


WAYS = """
import hashlib, json
from pathlib import Path
import torch
from transformers import BitsAndBytesConfig
from locret_stream.runtime.loading import load_model
def shown(path, device="cpu", quantization=None):
    with torch.no_grad():
        logits = load_model(path, "float32", device, quantization)(torch.arange(24)[None]).logits
    return hashlib.blake2b(logits.numpy().tobytes()).hexdigest()
torch.set_num_threads(1)
root = Path(sys.argv[1])
print(json.dumps({
    "gguf": shown(root / "tiny.Q8_0.gguf"), "adapter": shown(root / "adapter"), "spread": shown(root / "base", "auto"),
    "8": shown(root / "base", quantization=BitsAndBytesConfig(load_in_8bit=True)),
    "4": shown(root / "base", quantization=BitsAndBytesConfig(load_in_4bit=True)),
    "quick": "torch._dynamo" not in sys.modules}))
"""


@pytest.mark.thorough
def test_packed_adapted_and_spread_models_give_the_same(tmp_path: Path):
    for package in ("bitsandbytes", "accelerate", "peft"):
        needs(package)
    as_gguf(base(), tokenizer(), tmp_path / "tiny.Q8_0.gguf")
    base().save_pretrained(tmp_path / "base")
    with_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    usual, found = (json.loads(run(WITHOUT + imports + WAYS, tmp_path).splitlines()[-1]) for imports in ("", QUICKLY))
    assert len(set(usual.values())) == 6, "some way changes nothing"
    assert found == usual | {"quick": found["quick"]}


@pytest.mark.thorough
def test_a_version_that_the_changes_do_not_suit_is_imported_as_it_is():
    assert run(WITHOUT + """
import sys
from locret_stream.cli import quick_imports
class Once:
    met = 0
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.masking_utils":
            Once.met += 1
            if Once.met == 1:
                raise NameError("DTensor")
sys.meta_path.insert(0, Once())
quick_imports.import_quickly()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_torch_distributed_available
small = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
print(Once.met, LlamaForCausalLM(small)(torch.arange(8)[None]).logits.shape[1], is_torch_distributed_available())
""").split() == ["2", "8", "True"]


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
