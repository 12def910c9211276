"""The shape of the project, read off its sources: who imports whom, what is public, what an import may touch."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

import locret_stream
from locret_stream import errors
from tests import processes

ROOT = Path(__file__).resolve().parents[1]
ADAPTERS = {"langchain_locret": ROOT / "adapters" / "langchain" / "langchain_locret",
            "locret_serve": ROOT / "adapters" / "ray_serve" / "locret_serve"}

# A row imports only rows below it; a module may import within its own room.
TABLE = (
    ("__main__",),
    ("langchain_locret", "cli"),
    ("locret_serve",),
    ("making", "serving"),
    ("training", "evaluation"),
    ("shorthand", "conversation"),
    ("runtime",),
    ("context",),
    ("worker",),
    ("engine", "recall", "constraints"),
    ("models", "sampling", "text"),
    ("policies", "snapshot"),
    ("heads", "cache"),
    ("kernels",),
    ("named_models",),
    ("charsets", "config", "files"),
    ("budgets", "host_tier"),
    ("errors", "version"),
)
ROW = {room: row for row, rooms in enumerate(TABLE) for room in rooms}

# Third parties by the name they are imported under: where they may be imported, None for anywhere in the library.
THIRD_PARTIES: dict[str, set[str] | None] = {
    "asyncio_throttle": {"runtime", "context", "worker"},
    "cryptography": {"snapshot"},
    "fsspec": {"snapshot"},
    "jinja2": None,
    "langchain": {"langchain_locret"},
    "langchain_core": {"langchain_locret"},
    "langgraph": {"langchain_locret"},
    "llguidance": {"constraints"},
    "matplotlib": {"evaluation"},
    "msgspec": None,
    "numpy": None,
    "prometheus_client": {"serving"},
    "pydantic": {"langchain_locret"},
    "ray": {"locret_serve"},
    "rich": {"cli", "training", "evaluation"},
    "safetensors": None,
    "starlette": {"serving", "locret_serve"},
    "tokenizers": {"text", "models"},
    "torch": None,
    "transformers": None,
    "triton": {"kernels"},
    "typer": {"cli"},
    "uvicorn": {"serving"},
    "xxhash": {"snapshot"},
}
DISTRIBUTIONS = {"asyncio_throttle": "asyncio-throttle", "langchain_core": "langchain-core",
                 "prometheus_client": "prometheus-client"}
COMES_WITH = {"numpy": "transformers"}


def sources() -> Iterator[tuple[str, str, Path]]:
    """(room, dotted module name, file) of every library and adapter module, the face `__init__` left out."""
    for package, folder in {"locret_stream": ROOT / "locret_stream", **ADAPTERS}.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if package == "locret_stream" and not parts:
                continue
            yield parts[0] if package == "locret_stream" else package, ".".join((package, *parts)), path


@cache
def imports(module: str, path: Path) -> list[tuple[int, str]]:
    return [*_imports(module, path)]


def _imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import wherever it stands: at the top, inside a function, or importlib's."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, resolve_name(node.args[0].value, package)


def room_of(name: str) -> str | None:
    """The room a dotted name lies in; "" for the face of the library, None outside of the project."""
    first, _, rest = name.partition(".")
    if first in ADAPTERS:
        return first
    if first != "locret_stream":
        return None
    head = rest.partition(".")[0]
    return head if head in ROW else ""


def test_every_room_is_in_the_table():
    assert {room for room, _, _ in sources()} <= ROW.keys()


def test_a_row_imports_only_rows_below_it():
    wrong = []
    for room, module, path in sources():
        for line, name in imports(module, path):
            target = room_of(name)
            if target is None or target == room:
                continue
            if target == "":  # the face re-exports runtime and context: only what stands above them goes through it
                allowed = ROW[room] <= ROW["cli"]
            else:
                allowed = ROW[room] < ROW[target]
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} ({room}) imports {name}")
    assert not wrong, "\n".join(wrong)


def graph() -> dict[str, set[str]]:
    """Which files each file imports, those that only type checkers see included; by module name."""
    files = {module: path for _, module, path in sources()}
    out: dict[str, set[str]] = {}
    for module, path in files.items():
        out[module] = set()
        for _, name in imports(module, path):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                out[module].add(name)
    return out


def test_no_files_import_each_other_in_a_circle():
    """A package's `__init__` gives out what its files hold, so that files of it import one another, never it."""
    links, left = graph(), set(graph())
    while free := {module for module in left if not links[module] & left}:
        left -= free
    on_circles = {module for module in left if any(module in links[other] for other in left)}
    assert not left, f"{sorted(on_circles)} import each other"


def attributes_set_in(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned to, deleted or augmented."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load))


def test_the_fields_of_a_session_are_set_by_its_own_transitions_alone():
    """No file of `context` but `session_state.py` sets one; attributes that other classes set on `self` are theirs."""
    folder = ROOT / "locret_stream" / "context"
    state = next(node for node in ast.parse((folder / "session_state.py").read_text()).body
                 if isinstance(node, ast.ClassDef) and node.name == "SessionState")
    fields = {node.attr for node in attributes_set_in(state) if ast.unparse(node.value) == "self"}
    assert {"_note", "branch", "frame", "saved_at", "swap_generations", "turn"} <= fields
    wrong = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        others = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "Session"]
        theirs = {node for each in others for node in attributes_set_in(each) if ast.unparse(node.value) == "self"}
        wrong += [f"{path.name}:{node.lineno} sets {ast.unparse(node)}" for node in attributes_set_in(tree)
                  if node.attr in fields and node not in theirs and path.name != "session_state.py"]
    assert not wrong, "\n".join(wrong)


def test_nothing_inside_imports_the_face():
    inside = [(module, line) for room, module, path in sources() if ROW[room] > ROW["cli"]
              for line, name in imports(module, path) if room_of(name) == ""]
    assert not inside, inside


def test_third_parties_are_declared_and_stay_in_their_rooms():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]}
    extras = {re.match(r"[\w.-]+", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    wrong = []
    for room, module, path in sources():
        for line, name in imports(module, path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or room_of(name) is not None:
                continue
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            rooms = THIRD_PARTIES.get(top, set())
            if rooms is not None and room not in rooms:
                wrong.append(f"{where}: not a library of room {room!r}")
            distribution = COMES_WITH.get(top, DISTRIBUTIONS.get(top, top))
            if distribution not in declared and not (distribution in extras and rooms is not None):
                wrong.append(f"{where}: {distribution} is not declared in pyproject.toml")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_adapters():
    assert not list((ROOT / "adapters").glob("__init__.py"))
    wrong = []
    for folder in ("locret_stream", "adapters", "tests", "examples", "benchmarks", "research"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "adapters" not in path.read_text(encoding="utf-8"):
                continue  # to parse all of them takes seconds
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for line, name in imports(module, path):
                if name.partition(".")[0] == "adapters" and folder != "adapters":
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


PUBLIC = [
    "Answer", "Budget", "BudgetExceeded", "Collected", "ConfigError", "ContextBusy", "ContextClosed", "ContextError",
    "EmptySource", "Feed", "FeedReport", "Generation", "HeadsMismatch", "HostTier", "InputError", "InvalidText",
    "InvalidTokens",
    "LocretError", "Memory", "ModelError", "NoSlot", "Recall", "Recalled", "Receipts", "Replay", "Runtime",
    "RuntimeMemory", "Sampling", "Snapshot", "SnapshotCorrupt", "SnapshotError", "SnapshotMismatch", "SnapshotNotFound",
    "SnapshotTooNew", "SourceError", "StaleOwner", "StateLost", "Store", "StoreError", "StreamConfig",
    "StreamingContext", "SyncContext", "SyncGeneration", "Token", "UnknownPolicy", "UnsupportedModel", "Verified",
    "WindowExceeded",
    "__version__", "open_context",
]  # fmt: skip


def test_all_is_sorted_and_is_what_it_was_agreed_to_be():
    assert locret_stream.__all__ == sorted(locret_stream.__all__)
    assert locret_stream.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str):
    assert getattr(locret_stream, name) is not None
    assert name in dir(locret_stream)


def test_every_public_error_is_exported_and_drawn():
    tree = errors.__doc__
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in PUBLIC and re.search(rf"\b{name}\b", tree), f"{name} is not public or not in the drawing"


def test_unknown_names_raise_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        locret_stream.Nonsense  # noqa: B018


def test_the_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "locret_stream" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(PUBLIC) - {"__version__"}


def run_python(code: str) -> str:
    done = processes.run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_light():
    heavy = run_python(
        "import sys, locret_stream\n"
        "print([m for m in ('torch', 'transformers', 'triton', 'langchain_core', 'typer') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_importing_all_of_it_touches_neither_langchain_nor_cuda():
    """Of Triton only our own imports are ours to answer for (THIRD_PARTIES): transformers looks for it by itself."""
    found = run_python(
        "import sys, locret_stream\n"
        "from locret_stream import *\n"
        "import torch\n"
        "own = [m for m in sys.modules if m.partition('.')[0] in ('langchain_core', 'langchain', 'langchain_locret')]\n"
        "print(own, torch.cuda.is_initialized())"
    )
    assert found == "[] False"
