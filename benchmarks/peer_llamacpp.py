"""llama.cpp's side of llamacpp.py, which starts it in an environment that has llama-cpp-python: `--case llama.cpp`, or
`answers`. It needs neither torch nor this library."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import Llama

ANSWER = 32  # tokens, as long_memory.py has


class Reader:
    """A context of llama.cpp that never ends: when it is full, half of what is behind the first `sinks` goes."""

    def __init__(self, settings: dict[str, Any]):
        self.size, self.sinks, self.chunk = settings["budget"] + settings["chunk"], settings["sinks"], settings["chunk"]
        self.llama = Llama(settings["gguf"], n_ctx=self.size, n_batch=self.chunk, n_ubatch=self.chunk,
                           n_threads=settings["threads"], n_threads_batch=settings["threads"], flash_attn=True,
                           verbose=False)
        self._memory = llama_cpp.llama_get_memory(self.llama.ctx)

    @property
    def held(self) -> int:
        return self.llama.n_tokens

    def read(self, ids: Sequence[int]) -> None:
        """Chunk by chunk."""
        for at in range(0, len(ids), self.chunk):
            part = ids[at:at + self.chunk]
            self.make_room(len(part))
            self.llama.eval(part)

    def cut_back(self, held: int) -> None:
        """Forget what came behind the first `held` units."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, held, -1)
        self.llama.n_tokens = held

    def sampled(self) -> int:
        """The likeliest token, chosen by llama.cpp's own greedy sampler."""
        return self.llama.sample(temp=0.0, top_k=1, repeat_penalty=1.0)

    def make_room(self, count: int) -> None:
        """Shift where so many more units would not fit."""
        if self.held + count <= self.size:
            return
        gone = (self.held - self.sinks) // 2
        llama_cpp.llama_memory_seq_rm(self._memory, 0, self.sinks, self.sinks + gone)
        llama_cpp.llama_memory_seq_add(self._memory, 0, self.sinks + gone, -1, -gone)
        self.llama.n_tokens -= gone


def times(settings: dict[str, Any]) -> dict[str, Any]:
    reader = Reader(settings)
    ids = settings["ids"]
    question = ids[:settings["question"]]
    measured: dict[str, Any] = {"load_s": time.time() - settings["started"]}
    reader.read(ids[:reader.chunk])  # warm
    reader.cut_back(0)
    for name, part in (("fill", ids[:reader.size]), ("read", ids[reader.size:])):
        began = time.perf_counter()
        reader.read(part)
        measured[f"{name}_tok_per_s"] = len(part) / (time.perf_counter() - began)
    reader.read(question)
    token = reader.sampled()
    began = time.perf_counter()
    for _ in range(settings["decode"]):
        reader.read([token])
        token = reader.sampled()
    measured["decode_ms"] = 1e3 * (time.perf_counter() - began) / settings["decode"]
    with tempfile.TemporaryDirectory(prefix="llamacpp-") as folder:
        path, held = Path(folder) / "state", reader.held
        tokens = (llama_cpp.llama_token * held)(*[0] * held)  # it keeps them beside the state; which ones costs nothing
        began = time.perf_counter()
        if not llama_cpp.llama_state_seq_save_file(reader.llama.ctx, str(path).encode(), 0, tokens, held):
            sys.exit("the state could not be saved")
        measured["save_s"], measured["saved_mib"] = time.perf_counter() - began, path.stat().st_size / 2**20
        reader.cut_back(0)
        count, began = ctypes.c_size_t(), time.perf_counter()
        if not llama_cpp.llama_state_seq_load_file(reader.llama.ctx, str(path).encode(), 0, tokens, held, count):
            sys.exit("the state could not be restored")
        reader.llama.n_tokens = held
        reader.read(question)
        reader.sampled()
        measured["turn_s"] = time.perf_counter() - began
    return measured | {"peer": {"llama_cpp_python": llama_cpp.__version__,
                                "system": llama_cpp.llama_print_system_info().decode()}}


def answers(settings: dict[str, Any]) -> dict[str, Any]:
    """What it answers to each question, asked from the same state."""
    reader, found = Reader(settings), []
    reader.read(settings["ids"])
    reader.make_room(max(map(len, settings["questions"])) + ANSWER)
    held = reader.held
    for question in settings["questions"]:
        reader.read(question)
        said: list[int] = []
        while len(said) < ANSWER and (token := reader.sampled()) != reader.llama.token_eos():
            said.append(token)
            reader.read([token])
        found.append(reader.llama.detokenize(said).decode(errors="replace"))
        reader.cut_back(held)
    return {"answers": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("llama.cpp", "answers"), required=True)
    case = {"llama.cpp": times, "answers": answers}[parser.parse_args().case]
    with contextlib.redirect_stdout(sys.stderr):
        measured = case(json.load(sys.stdin))
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
