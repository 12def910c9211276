"""Files and stdin whose bytes are not all UTF-8: refused by their place, or read and counted."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from tests.cli.command import invoke, mistake
from tests.processes import run_python

BEFORE, BEHIND = "The door code of falcon is 48213.\n", "The port of otter is 3390.\n"
ASK = ["--ask", "What is the port of otter?", "--max-new-tokens", 4, "--json"]


def test_a_log_with_bad_bytes_in_the_middle_is_read_when_they_are_to_be_replaced(small: list[str], tmp_path: Path):
    log, other = tmp_path / "raw.log", tmp_path / "other.log"
    data = BEFORE.encode() + b"caf\xe9 \xf0\x9f\x98\n" + BEHIND.encode()
    log.write_bytes(data)
    other.write_bytes(b"\xff\n")
    told = mistake("run", log, *ASK, *small)
    assert f"raw.log: byte {data.index(233)} is not UTF-8" in told and "--errors replace" in told
    code, out, err = invoke("run", log, other, *ASK, "--errors", "replace", *small)
    assert code == 0, err
    found, text = json.loads(out), f"{BEFORE}caf\ufffd \ufffd\n{BEHIND}\ufffd\n"
    assert found["tokens_fed"] == len(text.encode()), "bytes are tokens here"
    assert (found["replaced"], found["bytes_replaced"]) == (3, 5)
    assert f"{log}: 4 bytes are not UTF-8 and were read as 2 U+FFFD." in err
    assert f"{other}: 1 bytes are not UTF-8 and were read as 1 U+FFFD." in err
    store = ["--session", "a", "--store", tmp_path / "store"]
    assert invoke("run", log, *ASK, "--errors", "replace", *store, *small)[0] == 0
    code, out, err = invoke("snapshots", "show", "a", "--store", tmp_path / "store", "--model", small[1])
    assert code == 0 and "caf\ufffd" in out and "otter is 3390" in out, err
    assert "replaced" not in json.loads(invoke("run", "-", *ASK, *small, text=BEFORE)[1])


def test_bytes_are_the_same_text_across_the_blocks_in_which_a_file_is_read(small: list[str], tmp_path: Path,
                                                                           monkeypatch):
    from locret_stream.cli import text_input
    log = tmp_path / "raw.log"
    log.write_bytes("ä€🦉".encode() * 5 + b"\xf0\x9f" + b"x\xe2\x82")
    found = []
    for size in (1 << 16, 1, 3):
        monkeypatch.setattr(text_input, "PIECE_BYTES", size)
        code, out, err = invoke("run", log, *ASK, "--errors", "replace", *small)
        assert code == 0, err
        found.append([json.loads(out)[name] for name in ("tokens_fed", "replaced", "bytes_replaced", "answers")])
    assert found[0] == found[1] == found[2]
    assert found[0][:3] == [len(("ä€🦉" * 5 + "\ufffdx\ufffd\n").encode()), 2, 4]


def test_what_powershell_wrote_is_named_and_can_be_read(small: list[str], tmp_path: Path):
    log = tmp_path / "wide.log"
    log.write_bytes(codecs.BOM_UTF16_LE + (BEFORE + BEHIND).encode("utf-16-le"))
    for errors in ("strict", "replace"):
        told = mistake("run", log, *ASK, *small, "--errors", errors)
        assert "wide.log is UTF-16 (PowerShell's > writes it)" in told and "--encoding utf-16" in told
    code, out, err = invoke("run", log, *ASK, "--encoding", "utf-16", *small)
    assert code == 0 and json.loads(out)["tokens_fed"] == len(BEFORE + BEHIND), err
    bare = tmp_path / "bare.log"
    bare.write_bytes((BEFORE + BEHIND).encode("utf-16-le"))
    code, out, err = invoke("run", bare, *ASK, *small)
    assert code == 0 and "--encoding utf-16-le" in json.loads(out)["warnings"][0]
    assert "Beware: " in err and "NUL" in err
    code, out, err = invoke("run", bare, *ASK, "--encoding", "utf-16-le", *small)
    assert code == 0 and json.loads(out)["tokens_fed"] == len(BEFORE + BEHIND) and "Beware" not in err


def test_a_byte_order_mark_is_no_text(small: list[str], tmp_path: Path):
    log = tmp_path / "mark.log"
    log.write_bytes(codecs.BOM_UTF8 + BEFORE.encode())
    code, out, err = invoke("run", log, log, *ASK, *small)
    assert code == 0 and json.loads(out)["tokens_fed"] == 2 * len(BEFORE), err


@pytest.mark.thorough
def test_stdin_is_read_the_same_way(tiny: Path, small: list[str]):
    code = ("import sys, io; from locret_stream.cli import app; sys.stdin = io.TextIOWrapper(io.BytesIO("
            r"b'caf\xe9\n')); app(sys.argv[1:])")
    done = run_python("-c", code, "run", "-", *ASK, "--errors", "replace", *small)
    assert done.returncode == 0 and "stdin: 1 bytes are not UTF-8" in done.stderr, done.stderr
    assert json.loads(done.stdout)["replaced"] == 1


def test_what_is_no_encoding_is_a_mistake_before_a_model_is_loaded(tmp_path: Path):
    log, nowhere = tmp_path / "x.log", ["--model", tmp_path / "no-such-model"]
    log.write_text("x")
    told = mistake("run", log, *ASK, "--encoding", "utf-7", *nowhere)
    assert "--encoding is 'utf-7'; expected one of utf-8, " in told
    told = mistake("run", log, *ASK, "--errors", "ignore", *nowhere)
    assert "--errors is 'ignore'; expected strict or replace" in told


def test_other_verbs_that_read_texts_have_the_same_options(tmp_path: Path, tiny: Path):
    raw, heads = tmp_path / "raw.log", tmp_path / "heads"
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    raw.write_bytes(b"caf\xe9\n" * 50)
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads]
    assert "--background" in mistake(*train, "--errors", "replace")
    demo = ["demo", "--no-restart", "--no-compare", "--model", tiny, "--policy", "keydiff", "--budget", 96,
            "--chunk-size", 32]
    assert "found --encoding and no --stream" in mistake(*demo, "--encoding", "utf-16")
    assert "raw.log: byte 3 is not UTF-8; expected UTF-8 text, or --errors replace" in mistake(*demo, "--stream", raw)
    _, _, err = invoke(*demo, "--stream", raw, "--errors", "replace")
    assert "raw.log: 50 bytes are not UTF-8 and were read as 50 U+FFFD." in err, err
    book = ["make-data", "--model", tiny, "--text", raw, "--out", tmp_path / "made.jsonl"]
    assert "byte 3 is not UTF-8" in mistake(*book) and "found 1 sentences" in mistake(*book, "--errors", "replace")
