"""`locret-stream run` and `inspect`: answers from files and stdin, chat, and what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor
from transformers import AutoTokenizer
from typer.testing import CliRunner

from locret_stream.cli.answering import Stripped, answer
from locret_stream.context import streams
from locret_stream.conversation.replies import Reply, response_template
from tests.cli import command
from tests.cli.command import invoke, mistake
from tests.processes import run_python


def test_run_answers_from_files_and_stdin(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.")
    code, out, err = invoke("run", note, "-", "--ask", "What?", "--ask", "And?", "--json", "--max-new-tokens", 4,
                            *small, text="More of it, from a pipe.\n")
    assert code == 0, err
    found = json.loads(out)
    assert [a["question"] for a in found["answers"]] == ["What?", "And?"]
    assert [a["finish_reason"] for a in found["answers"]] == ["length", "length"], "a random model never ends"
    assert found["tokens_fed"] == len("The door code of falcon is 48213.\nMore of it, from a pipe.\n")
    assert "memory:" in err


def test_run_reads_stdin_when_nothing_is_named(small: list[str]):
    code, out, err = invoke("run", "--ask", "What?", "--max-new-tokens", 4, "--json", *small, text="abc\n")
    assert code == 0, err
    assert json.loads(out)["tokens_fed"] == 4
    code, _, err = invoke("run", "--ask", "What?", "--max-new-tokens", 4, "--focus", "What?", *small, text="abc\n")
    assert code == 0 and "a focus of 5 tokens" in err
    assert err.count("The answer was cut off at 4 tokens; --max-new-tokens allows more.") == 1


def test_run_chats_until_the_input_ends(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("Hello.\n")
    code, _, err = invoke("run", note, "--max-new-tokens", 4, *small, text="Who?\n\nWhy?")
    assert code == 0, err
    assert err.count("The answer was cut off at 4 tokens") == 2
    read = int(re.search(r"At the end: ([\d,]+) tokens", err)[1].replace(",", ""))
    assert read > len("Hello.\nWho?Why?")


@pytest.mark.parametrize("pieces", [["", " \n", " It ", "is ", "", "48213", " ", " \n"], ["It is 48213"],
                                    [" It is", " 48213\n"], ["\nI", "t is 4", "8213"]])
def test_an_answer_is_printed_as_it_comes_without_white_space_at_its_ends(pieces: list[str], capsys):
    line, shown = Stripped(), ""
    for number, piece in enumerate(pieces, 1):
        line.add(piece)
        shown += capsys.readouterr().out
        assert shown == "".join(pieces[:number]).strip(), "nothing that is certain waits"
    assert shown == "It is 48213"


def test_lines_of_an_answer_below_its_question_are_indented(capsys):
    line = Stripped(indent="  ")
    for piece in (" \n It is\n", "\n so", ".\nYes", "\n\n"):
        line.add(piece)
    assert capsys.readouterr().out == "  It is\n  \n   so.\n  Yes"


def apart() -> tuple[Reply, list[int]]:
    class Known:
        chat_template, added_tokens_decoder = "", {}  # type: ignore[var-annotated]

    return Reply(response_template(Known, None, "", "plain"), "", ()), []


THOUGHT = "<think>\nA door.\n</think>\n\nIt is 48213."


def test_thoughts_are_told_apart_from_answers(small: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    plan = list[int]()

    def sample(logits: Tensor, *_: object) -> int:
        nonlocal plan
        plan = plan or [*tokenizer.encode(THOUGHT, add_special_tokens=False), tokenizer.eos_token_id]
        token, *plan = plan
        return token

    monkeypatch.setattr(streams, "sample", sample)
    asked = ["run", "--ask", "What?", "--max-new-tokens", 200, *small]
    code, out, err = invoke(*asked, text="abc\n")
    assert (code, out) == (0, "It is 48213.\n") and "A door.\n" in err, err
    code, out, err = invoke(*asked, "--ask", "And?", text="abc\n")
    assert (code, out) == (0, "What?\n  It is 48213.\nAnd?\n  It is 48213.\n"), out
    code, out, err = invoke(*asked, "--json", text="abc\n")
    (found,) = json.loads(out)["answers"]
    assert (found["answer"], found["reasoning"]) == ("It is 48213.", "A door.") and "A door" not in err
    note = tiny.parent / "note.txt"
    note.write_text("abc\n")
    code, out, err = invoke("run", note, "--max-new-tokens", 200, *small, text="Who?\n")
    assert code == 0 and out.strip() == "It is 48213." and "A door." in err
    asked[asked.index(200)] = 12
    code, out, err = invoke(*asked, text="abc\n")
    assert code == 0 and not out.strip() and "\nThe thought was cut off at 12 tokens" in err, (out, err)


async def test_a_part_of_an_answer_does_not_look_like_a_whole_one(capsys):
    class Cut:
        memory = None

        async def ask(self, question: str, *, sampling: object, skip_special: object,
                      on_token: Callable[[object], None]) -> str:
            if question == "Which?":
                on_token(SimpleNamespace(text=" It is 482"))
            raise asyncio.CancelledError

    for question, printed in (("Which?", "It is 482 …\n"), ("Who?", "")):
        with pytest.raises(asyncio.CancelledError):
            await answer([question], Cut(), None, None, False, recall=False, evicts=True,
                         apart=apart)
        assert capsys.readouterr().out == printed


def test_what_was_read_again_is_said(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.\n" + "All work and no play.\n" * 8)
    code, out, err = invoke("run", note, "--recall", "--ask", "Which falcon?", "--ask", "Who?", "--max-new-tokens", 1,
                            *small)
    assert code == 0 and re.search(r"Read again for it: 1 passage, \d+ tokens\.", err), err
    assert "Nothing was read again for it: no passage of what is committed has" in err and "Read again" not in out
    note.write_text("Falcon: 48213.\n")
    for more, why in ((small, "less than a chunk"), ([*small, "--policy", "full"], "evicts nothing")):
        code, out, err = invoke("run", note, "--recall", "--ask", "Which falcon?", "--max-new-tokens", 1, *more)
        assert code == 0 and re.search(f"Nothing was read again for it: .*{why}", err), err


def test_a_blank_question_is_refused(small: list[str]):
    for blank in ("", "  ", "\n"):
        assert "--ask is empty" in mistake("run", "--ask", blank, *small)


def test_several_answers_stand_below_their_questions(small: list[str]):
    code, out, err = invoke("run", "--ask", "What?", "--ask", "And?", "--max-new-tokens", 4, *small, text="abc\n")
    assert code == 0, err
    assert out.startswith("What?\n  ") and "\nAnd?\n  " in out and out.endswith("\n")


def test_json_tells_what_an_answer_read_again(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.\n" + "All work and no play.\n" * 8)
    ask = ("run", note, "--recall", "--json", "--ask", "Which door code?", "--max-new-tokens", 1, *small)
    for policy, found in (("keydiff", 1), ("full", 0)):  # a memory that never evicts reads nothing again
        code, out, err = invoke(*ask, "--policy", policy, "--budget", 300)
        assert code == 0 and len(json.loads(out)["answers"][0]["recalled"]) == found, err


def test_without_stdin(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As of a job of cron's, or after `<&-`."""
    note = tmp_path / "note.txt"
    note.write_text("Hello.\n")
    with monkeypatch.context() as patch:
        patch.setattr(command, "CliRunner", lambda: WithoutStdin())
        assert invoke("run", note, "--ask", "Who?", "--max-new-tokens", 1, *small)[0] == 0
        assert "there is no stdin to chat on; expected --ask" in mistake("run", note, *small)
        assert 'found "-" and no stdin; expected the names of files' in mistake("run", "-", "--ask", "Who?", *small)


class WithoutStdin(CliRunner):
    """Runs a command with no stdin at all."""

    @contextlib.contextmanager
    def isolation(self, *arguments: object, **options: object):
        with super().isolation(*arguments, **options) as streams:
            stdin, sys.stdin = sys.stdin, None
            try:
                yield streams
            finally:
                sys.stdin = stdin


def test_inspect_prints_the_formula(small: list[str]):
    code, out, err = invoke("inspect", "--json", *small)
    assert code == 0, err
    found = json.loads(out)
    assert found["budgets"] == [96, 96] and found["bytes_resident"] == found["formula_bytes"]
    code, out, err = invoke("inspect", *small)
    assert code == 0 and "bytes" in out, err


def test_units_in_few_bits(small: list[str]):
    code, out, err = invoke("inspect", "--json", "--store-bits", 4, *small)
    assert code == 0, err
    found = json.loads(out)
    assert found["store_bits"] == [4, 4] and found["bytes_resident"] == found["formula_bytes"]
    assert sum(found["layer_bytes"]) == found["slot_bytes"]
    code, out, _ = invoke("inspect", "--store-bits", 4, *small)
    assert code == 0 and "D · bits / 8, and for each group of at most 32 channels" in out
    code, out, _ = invoke("inspect", "--policy", "h2o", "--by-head", "--store-bits", 2, "--exact", "host", *small)
    assert code == 0 and "which the heads of a layer share: at most 192 of one" in out, out
    assert "min(residual, b_l)" in out and "a token fetches 256 of each layer and KV head" in out, out
    code, out, _ = invoke("inspect", "--json", "--policy", "h2o", "--by-head", *small)
    assert json.loads(out)["by_head"] and json.loads(out)["exact"] is None
    code, out, _ = invoke("inspect", "--json", "--store-bits", "8,4", *small)
    assert code == 0 and json.loads(out)["store_bits"] == [8, 4]
    code, out, err = invoke("run", "--store-bits", 4, *small, "--ask", "What?", "--max-new-tokens", 3, "--json",
                            text="The pass key of falcon is 48213.\n" * 20)
    assert code == 0 and json.loads(out)["answers"], err
    for wrong, said in (("5", "5"), ("8,", "(8, '')"), ("four", "'four'"), ("9" * 5000, "'999")):
        assert f"store_bits is {said}" in mistake("inspect", "--store-bits", wrong, *small)


@pytest.mark.thorough
def test_output_in_an_encoding_that_lacks_characters(small: list[str], tmp_path: Path):
    """What it lacks is written out; JSON stays JSON."""
    note = tmp_path / "note.txt"
    note.write_text("Zwölf 🦉.\n", encoding="utf-8")
    latin, ascii_only = ({**os.environ, "PYTHONIOENCODING": name, "PYTHONUTF8": "1"} for name in ("latin-1", "ascii"))
    done = run_python("-m", "locret_stream", "inspect", *small, env=latin, encoding="latin-1")
    assert done.returncode == 0 and "slots · \\u03a3 H" in done.stdout, done.stderr
    done = run_python("-m", "locret_stream", "run", note, "--ask", "Zwölf 🦉?", "--json", "--max-new-tokens", 4, *small,
                      env=ascii_only)
    assert done.returncode == 0 and done.stdout.isascii(), done.stderr
    assert json.loads(done.stdout)["answers"][0]["question"] == "Zwölf 🦉?"


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_half_of_a_surrogate_pair_is_printed_as_an_escape_whatever_the_console(encoding: str):
    """Bytes of a command line that are no UTF-8 come as such halves, and no encoding has these."""
    code = ("from locret_stream.cli import app, output\nfrom locret_stream.cli.answering import Stripped\n"
            "try: app(['--version'])\n"
            "finally:\n"
            "    Stripped().add('a\\ud800b\\n'); print()\n"
            "    output.out.print('c\\ud800d'); output.err.print('e\\ud800f')\n"
            "    output.print_json({'said': 'g\\ud800h\\udcffé'})")
    done = run_python("-c", code, env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    _, plain, rich, line = done.stdout.splitlines()
    assert (plain, rich, done.stderr.strip()) == ("a\\ud800b", "c\\ud800d", "e\\ud800f")
    assert json.loads(line) == {"said": "g\ud800h\udcffé"}
