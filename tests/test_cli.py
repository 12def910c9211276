"""The command line as a user meets it: exit codes, one-line mistakes, JSON, Ctrl-C, pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from locret_stream.cli import app
from locret_stream.cli.common import Reader, file_text
from locret_stream.cli.demo import blocks, count, cut_lines, is_right, read_facts
from locret_stream.errors import InputError, InvalidText
from locret_stream.snapshot import Store
from tests.processes import PIPE, Popen, run_python, start_python

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEMO_KEYS = [
    "tokens_fed", "budget_units", "chunk_size", "peak_units", "bytes_resident", "bytes_full_cache", "recall",
    "recall_recent", "tok_per_s", "answers", "restored",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of 2 layers over bytes, with a chat template; needs no training and no network."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE,
                                        extra_special_tokens=["<|im_start|>"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def small(tiny: Path) -> list[str]:
    return ["--model", str(tiny), "--policy", "keydiff", "--budget", "96", "--chunk-size", "32"]


def invoke(*args: object, text: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args], input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def mistake(*args: object, text: str | None = None) -> str:
    """The one line of a user's mistake."""
    code, out, err = invoke(*args, text=text)
    assert (code, out) == (2, ""), (code, out, err)
    *before, line = err.splitlines()
    known = ("reading ", "training heads ", "tuning heads ", "dividing the budget ", "Session ")
    assert all(progress.startswith(known) for progress in before), err
    assert line.startswith("locret-stream: "), err
    return line


# -- help ---------------------------------------------------------------------------------------------------------


def test_without_arguments_it_says_where_to_start():
    code, out, _ = invoke()
    assert code == 0 and "locret-stream demo" in out


@pytest.mark.parametrize("verb", ["demo", "run", "snapshots", "train-heads", "eval", "inspect"])
def test_help_teaches_with_examples(verb: str):
    code, out, _ = invoke(verb, "--help")
    assert code == 0 and "Examples:" in out and f"locret-stream {verb}" in out and "--json" in out


def test_the_command_starts_without_torch():
    code = "import sys; from locret_stream.cli import app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = run_python("-c", code)
    assert done.stdout.strip() == "False False", done.stderr


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line_and_two(small: list[str], tiny: Path, tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.\n")
    ask = ["--ask", "What?"]
    assert "dmo" in mistake("dmo")
    assert "--tokns" in mistake("demo", "--tokns", 3)
    assert "--tokens" in mistake("demo", "--tokens", "many")
    assert "missing.txt" in mistake("run", tmp_path / "missing.txt", *ask, *small)
    assert "folder" in mistake("run", tmp_path, *ask, *small)
    assert "more than once" in mistake("run", "-", "-", *ask, *small)
    assert "--ask" in mistake("run", note, "--json", *small)
    assert "temperature" in mistake("run", note, *ask, *small, "--temperature", -1)
    assert "the focus has" in mistake("run", note, *ask, *small, "--focus", "which one? " * 500)
    assert "keydiff" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydif", "--budget", 96,
                                "--chunk-size", 32)
    assert "positions" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydiff")
    assert "heads" in mistake("run", note, *ask, "--model", tiny, "--policy", "locret", "--budget", 96,
                              "--chunk-size", 32)
    assert "no-such-model" in mistake("run", note, *ask, "--model", tmp_path / "no-such-model", "--policy", "keydiff")
    assert "budget" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydiff", "--budget", "96 parsecs")
    assert "number of 5,000 digits" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydiff", "--budget",
                                               "9" * 5000)
    assert "--ask is empty" in mistake("run", note, "--ask", "", *small)
    assert "--ask is empty" in mistake("run", note, *ask, "--ask", "", "--session", "a", "--store", tmp_path, *small)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"], "told before anything is read"


def test_text_that_is_not_utf8_is_named(small: list[str], tmp_path: Path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine so far\n" + b"\xff\xfe")
    assert "bad.txt: byte 12 is not UTF-8" in mistake("run", bad, "--ask", "What?", *small)


@pytest.mark.parametrize(("lines", "complaint"), [
    ("", "no facts"),
    ('{"fact": "a", "question": "b"}\n', "line 1"),
    ('{"fact": "a", "question": "b", "answer": "c"}\nnonsense\n', "line 2"),
    ('{"fact": " ", "question": "b", "answer": "c"}\n', "empty"),
    ('{"fact": "a", "question": "b\\u0000", "answer": "c"}\n', "line 1: a NUL character in the question"),
])
def test_facts_files_are_checked(tmp_path: Path, lines: str, complaint: str):
    path = tmp_path / "facts.jsonl"
    path.write_text(lines)
    with pytest.raises(InputError, match=complaint):
        read_facts(path)
    assert complaint in mistake("demo", "--facts", path)


def test_facts_may_hold_other_line_ends_and_begin_with_a_mark(tmp_path: Path):
    path = tmp_path / "facts.jsonl"
    said = "The note says a\u2028b\u2029c\x85d."
    line = json.dumps({"fact": said, "question": "What?", "answer": "b"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n\r\n{line}".encode())
    assert [fact.sentence for fact in read_facts(path)] == [said, said]


# -- demo ---------------------------------------------------------------------------------------------------------


def test_demo_json_is_the_contract(small: list[str]):
    code, out, err = invoke("demo", "--json", "--tokens", 3000, *small)
    assert code == 0, err
    found = json.loads(out)
    assert list(found) == DEMO_KEYS
    assert found["tokens_fed"] >= 3000 and found["budget_units"] == 96 and found["chunk_size"] == 32
    assert 96 <= found["peak_units"] <= 96 + 32
    assert found["bytes_resident"] > 0 and found["bytes_full_cache"] > 0 and found["tok_per_s"] > 0
    assert 0 <= found["recall"] <= 1 and 0 <= found["recall_recent"] <= 1
    assert len(found["answers"]) == 12
    for answer in found["answers"]:
        assert list(answer) == ["question", "expected", "answer", "position"]
        assert 0 <= answer["position"] <= found["tokens_fed"]
    assert "facts and 110 decoys" in err
    again = found["restored"]
    assert again["answers"] == [one["answer"] for one in found["answers"]] and again["same"] == 12
    assert again["snapshot_bytes"] > 2 * 2 * 2 * 96 * 8 * 4  # layers, K and V, KV heads, units, dimensions, fp32


def test_demo_takes_own_facts_and_text(small: list[str], tmp_path: Path):
    facts, text = tmp_path / "facts.jsonl", tmp_path / "text.txt"
    facts.write_text('{"fact": "The moon is made of rock.", "question": "What is it made of?", "answer": "rock"}\n')
    text.write_text("Nothing to see here.\n" * 60)
    code, out, err = invoke("demo", "--json", "--facts", facts, "--stream", text, "--no-compare",
                            "--no-restart", *small)
    assert code == 0, err
    found = json.loads(out)
    assert found["recall_recent"] is None and found["restored"] is None
    assert [a["expected"] for a in found["answers"]] == ["rock"]
    assert found["tokens_fed"] > 60 * 21  # bytes are tokens here: the text, the fact and the decoys


def test_demo_asks_several_questions_about_one_fact(small: list[str], tmp_path: Path):
    facts, text = tmp_path / "facts.jsonl", tmp_path / "text.txt"
    fact = "The moon is made of rock."
    facts.write_text("".join(json.dumps({"fact": f"{fact}{end}", "question": f"{word} is it?", "answer": "rock"}) + "\n"
                             for word, end in (("What", ""), ("Which", "\n"))))
    text.write_text("Nothing to see here.\n" * 60)
    code, out, err = invoke("demo", "--json", "--facts", facts, "--stream", text, "--no-compare", "--no-restart",
                            "--seed", 3, *small)
    assert code == 0 and "1 facts and 110 decoys" in err, err
    first, second = json.loads(out)["answers"]
    assert (first["question"], second["question"]) == ("What is it?", "Which is it?")
    assert first["position"] == second["position"] > 0


def test_demo_takes_no_stream_that_can_be_read_only_once(small: list[str], tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is a pipe or a device" in mistake("demo", "--stream", tmp_path / "pipe", *small)


def test_demo_starts_its_new_process_without_another_stores_key(small: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCRET_KEY", "5a" * 32)
    monkeypatch.setenv("LOCRET_STORE", "s3://nowhere/memories")
    code, out, err = invoke("demo", "--json", "--tokens", 1000, "--no-compare", *small)
    assert code == 0 and json.loads(out)["restored"]["same"] == 12, err


def test_demo_refuses_a_budget_without_room_for_a_fact(small: list[str], tmp_path: Path):
    facts = tmp_path / "facts.jsonl"
    lines = [json.dumps({"fact": "o" * size, "question": "What?", "answer": "o"}) for size in (90, 30)]
    facts.write_text("\n".join(lines))
    for budget in (2, 20, 37):
        complaint = mistake("demo", "--tokens", 1000, "--facts", facts, *small, "--budget", budget)
        assert f"of a budget of {budget} units" in complaint and "expected --budget 40 or more" in complaint
    code, _, err = invoke("demo", "--tokens", 1000, "--facts", facts, "--no-restart", *small, "--budget", 40)
    assert code == 0, err
    assert "fact has" in mistake("demo", "--budget", 2)


def test_demo_prints_answers_beside_the_truth(small: list[str]):
    code, out, err = invoke("demo", "--tokens", 2000, *small)
    assert code == 0, err
    assert "truth" in out and "sinks + recent at the same budget" in out
    assert "a new process opened it and gave 12 of 12 answers the same" in out


def test_own_answers_count_as_words():
    assert is_right(" 48213.\n", "48213") and is_right("Rock", "rock")
    assert not is_right("It is 48213.", "48213") and is_right("It is 48213, I think", "48213", whole=False)
    for whole in (True, False):
        assert not is_right("148213", "48213", whole) and not is_right("", "48213", whole)
        assert not is_right(None, "1", whole)


def test_blocks_begin_with_facts_and_lose_nothing():
    pieces = ["a\n", "b\n", "FACT\n", "c\n" * 20_000, "d\n", "\nOTHER\n", "e"]
    found = list(blocks(pieces, ["OTHER", "FACT"]))
    assert "".join(text for text, _ in found) == "".join(pieces)
    assert [(text.strip().split("\n")[0], begins) for text, begins in found if begins is not None] == [
        ("FACT", 1), ("OTHER", 0)]


def test_lines_are_cut_without_loss():
    text = "one\r\ntwo\n" + "x" * 10_000 + "\n\nlast"
    for size in (1, 3, 4096):
        lines = list(cut_lines(text[i : i + size] for i in range(0, len(text), size)))
        assert "".join(lines) == text and max(map(len, lines)) <= 4096
        assert lines[-1] == "last"
    for text in ("one\rtwo\x0cthree\n", "a\u2028b\u2029c\x85d\x1ce\vf", "\r", "\n\r\n\r", "x" * 4096 + "\r\n"):
        for size in (1, 2, 9):
            lines = list(cut_lines(text[i : i + size] for i in range(0, len(text), size)))
            assert "".join(lines) == text and all("\n" not in line[:-1] for line in lines)
    assert count(["aa", "b"], len, None) == 3 and count(iter(["aa", "b", "c"]), len, 2) == 2


# -- run ----------------------------------------------------------------------------------------------------------


def test_run_answers_from_files_and_stdin(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.")
    code, out, err = invoke("run", note, "-", "--ask", "What?", "--ask", "And?", "--json", "--max-new-tokens", 4,
                            *small, text="More of it, from a pipe.\n")
    assert code == 0, err
    found = json.loads(out)
    assert [a["question"] for a in found["answers"]] == ["What?", "And?"]
    assert found["tokens_fed"] == len("The door code of falcon is 48213.\nMore of it, from a pipe.\n")
    assert "memory:" in err


def test_run_reads_stdin_when_nothing_is_named(small: list[str]):
    code, out, err = invoke("run", "--ask", "What?", "--max-new-tokens", 4, "--json", *small, text="abc\n")
    assert code == 0, err
    assert json.loads(out)["tokens_fed"] == 4
    code, _, err = invoke("run", "--ask", "What?", "--max-new-tokens", 4, "--focus", "What?", *small, text="abc\n")
    assert code == 0 and "a focus of 5 tokens" in err


def test_run_chats_until_the_input_ends(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("Hello.\n")
    code, _, err = invoke("run", note, "--max-new-tokens", 4, *small, text="Who?\n\nWhy?")
    assert code == 0, err
    read = int(re.search(r"Held at the end: ([\d,]+) tokens", err)[1].replace(",", ""))
    assert read > len("Hello.\nWho?Why?")


def test_inspect_prints_the_formula(small: list[str]):
    code, out, err = invoke("inspect", "--json", *small)
    assert code == 0, err
    found = json.loads(out)
    assert found["budgets"] == [96, 96] and found["bytes_resident"] == found["formula_bytes"]
    code, out, err = invoke("inspect", *small)
    assert code == 0 and "bytes" in out, err


# -- train-heads --------------------------------------------------------------------------------------------------


def test_heads_are_trained_resumed_and_used(tiny: Path, tmp_path: Path):
    data, heads = pairs(tmp_path), tmp_path / "heads"
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 3, "--width", 16, "--json"]
    code, out, err = invoke(*train)
    assert code == 0, err
    found = json.loads(out)
    assert found["steps"] == 3 and found["out"] == str(heads)
    assert json.loads(invoke(*train)[1]) == found  # finished runs are not run again
    heads = heads.rename(tmp_path / "moved")
    train[train.index("--out") + 1] = heads
    assert json.loads(invoke(*train)[1]) == found | {"out": str(heads)}
    whole = (heads / "heads.safetensors").read_bytes()
    (heads / "heads.safetensors").write_bytes(whole[:-9])
    assert "its heads are damaged: remove heads.safetensors" in mistake(*train)
    (heads / "heads.safetensors").write_bytes(whole)
    whole = (heads / "result.json").read_bytes()
    (heads / "result.json").write_bytes(whole[:-9])
    assert "result.json cannot be read" in mistake(*train)
    (heads / "result.json").write_bytes(whole)
    assert "differs in lr" in mistake(*train, "--lr", 0.1)
    assert "label" in mistake(*train, "--label", "nonsense", "--restart")
    code, out, err = invoke("run", "--model", tiny, "--heads", heads, "--budget", 96, "--chunk-size", 32, "--ask",
                            "What?", "--max-new-tokens", 3, "--json", text="The code of 3 is 111. " * 20)
    assert code == 0, err
    assert json.loads(out)["units"] == 96


def pairs(folder: Path) -> Path:
    """A file of twenty prompts with answers."""
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"The code of {n} is {n * 37}. What is it?", "answer": str(n * 37)})
                            + "\n" for n in range(20)))
    return data


def test_examples_that_do_not_fit_are_told(tiny: Path, tmp_path: Path):
    data = pairs(tmp_path)
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "Say it all.", "answer": "all of it " * 99}) + "\n")
    code, out, err = invoke("train-heads", "--model", tiny, "--data", data, "--out", tmp_path / "heads", "--steps", 1,
                            "--width", 16, "--max-tokens", 40)
    assert code == 0 and "; 1 more did not fit, as a reply alone takes too much; " in out and " were cut" in out, err


def test_heads_learn_what_each_layer_needs(tiny: Path, tmp_path: Path):
    data, heads = pairs(tmp_path), tmp_path / "heads"
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 3, "--width", 16,
             "--held-out", 0.4]
    units = ["--allocate-units", 16, "--allocate-chunk", 16]
    assert "expected --allocate" in mistake(*train, *units)
    assert "6000 units + chunk_size 1024: the model knows 512" in mistake(*train, "--allocate")
    assert "of 1 held-out examples" in mistake(*train, *units, "--allocate", "--held-out", 0.01)
    assert not heads.exists(), "told before anything is trained"
    assert "rule is 'size'" in mistake(*train, "--allocate", "--allocate-by", "size")
    scores = [*train, *units, "--allocate", "--allocate-by", "scores"]
    assert "found heads of label 'zscore'; expected 'logprob' in all layers" in mistake(*scores)
    log = tmp_path / "service.log"
    log.write_text("a line of a log\n" * 200)
    assert "rule 'scores' counts the units of examples alone" in mistake(*scores, "--background", log)
    log.write_text("a line of a log\n" * 3)
    assert "expected a longer text" in mistake(*train, *units, "--allocate", "--background", log)
    assert "seed is 99999999999999; expected a whole number, 0 to" in mistake(*train, "--seed", 99999999999999)
    assert not heads.exists(), "told before anything is trained"
    code, out, err = invoke(*scores, "--label", "logprob", "--out", tmp_path / "comparable", "--json")
    assert code == 0 and json.loads((tmp_path / "comparable" / "heads.json").read_text())["label"] == "logprob", err
    code, out, err = invoke(*train, *units, "--allocate", "--allocate-examples", 4, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["steps"] == 3 and sum(found["budget_shares"]) == 2 == len(found["allocation"]["units"])
    assert found["allocation"]["loss"].keys() == {"full", "even", "divided"} and "dividing the budget" in err
    assert json.loads((heads / "heads.json").read_text())["budget_shares"] == found["budget_shares"]
    code, out, err = invoke(*train, *units, "--allocate", "--allocate-examples", 4)
    assert code == 0 and "budget by layer: " in out and "--budget 16 --chunk-size 16" in out, err
    assert "differs in units: there 16, now 17" in mistake(*train, "--allocate", "--allocate-units", 17,
                                                          "--allocate-chunk", 16, "--allocate-examples", 4)


def test_heads_are_tuned_for_a_budget(tiny: Path, tmp_path: Path):
    data, heads = pairs(tmp_path), tmp_path / "heads"
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 2, "--width", 16,
             "--held-out", 0.4]
    units = ["--tune-units", 16, "--tune-chunk", 16]
    assert "expected --tune STEPS" in mistake(*train, *units)
    assert "tune: 6000 units + chunk_size 1024: the model knows 512" in mistake(*train, "--tune", 2)
    code, out, err = invoke(*train, *units, "--tune", 2, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["steps"] == 2 and found["tuning"]["steps"] == 2 and found["tuning"]["budgets"] == [16, 16]
    assert found["tuning"]["loss"].keys() == {"before", "after"} and "tuning heads" in err
    assert found["tuning"]["better"] == (heads / "heads.first.safetensors").is_file()
    code, out, err = invoke(*train, *units, "--tune", 2)
    assert code == 0 and "tuned for 16 units on average: answer loss" in out, err
    assert "--budget 16 --chunk-size 16" in out
    both = [*train, *units, "--tune", 2, "--allocate", "--allocate-units", 16, "--allocate-chunk", 16,
            "--allocate-examples", 4, "--json"]
    code, out, err = invoke(*both)  # tuned before it was divided: what is done is not done again
    assert code == 0 and json.loads(out)["tuning"] == found["tuning"] and "allocation" in json.loads(out), err
    assert "differs in steps: there 2, now 3" in mistake(*train, *units, "--tune", 3)
    for alone, needed in (("--restart-tuning",), "--tune STEPS"), (("--allocate-by", "scores"), "--allocate"), (
            ("--allocate-examples", 4), "--allocate"), (("--query-tokens", 5), "--query-aware"), (
            ("--horizon", 9), "--output retention"):
        assert f"found {alone[0]} and no {needed}; expected {needed} with it" in mistake(*train, *alone)
    assert "--query-tokens is 0; expected at least 1" in mistake(*train, "--query-aware", "--query-tokens", 0)
    before = (heads / "metrics.jsonl").read_bytes()
    code, out, err = invoke(*train, *units, "--tune", 3, "--restart-tuning", "--json")
    assert code == 0 and json.loads(out)["tuning"]["steps"] == 3, err
    assert (heads / "metrics.jsonl").read_bytes() == before, "the first stage is kept"


def test_heads_are_tuned_behind_a_text(tiny: Path, tmp_path: Path):
    data, heads, log = pairs(tmp_path), tmp_path / "heads", tmp_path / "service.log"
    log.write_text("".join(f"service {n} answers in {n % 7} ms\n" for n in range(400)) + "no newline at the end")
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 2, "--width", 16,
             "--held-out", 0.4, "--background", log]
    tune = ["--tune", 2, "--tune-units", 16, "--tune-chunk", 16]
    assert "found --background and no --tune or --allocate; expected --tune or --allocate with it" in mistake(*train)
    code, out, err = invoke(*train, *tune, "--json")
    assert code == 0, err
    assert json.loads(out)["tuning"]["steps"] == 2
    behind = json.loads(out)["tuning"]["behind"]
    assert behind > 1000 and behind % 16 == 0
    assert json.loads(invoke(*train, *tune, "--json")[1]) == json.loads(out)
    assert f"tuned for 16 units on average, behind {behind:,} tokens of text: " in invoke(*train, *tune)[1]
    log.write_text(log.read_text().replace("answers", "asks"))
    assert "holds another tuning, which differs in data" in mistake(*train, *tune)
    assert "found --background and --tune with --output retention" in mistake(*train, *tune, "--output", "retention")
    divided = [*train, "--out", tmp_path / "fading", "--output", "retention", "--allocate", "--allocate-units", 16,
               "--allocate-chunk", 16, "--allocate-examples", 4]
    code, out, err = invoke(*divided)
    assert code == 0 and "; with room for an example in every layer " in out, err
    assert "found --background and --query-aware" in mistake(*train, *tune, "--query-aware")
    log.write_text("short\n")
    before = {path.name: path.read_bytes() for path in heads.iterdir()}
    assert "expected a longer text" in mistake(*train, *tune, "--restart-tuning")
    assert {path.name: path.read_bytes() for path in heads.iterdir()} == before
    assert "expected a longer text" in mistake(*train, *tune, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists(), "told before anything is trained"
    log.write_bytes(b"\xff\n")
    assert "service.log" in mistake(*train, *tune, "--restart-tuning")
    assert "--background" in mistake(*train[:-1], tmp_path, *tune)


# -- Ctrl-C and pipes ---------------------------------------------------------------------------------------------


def start(*args: object, **more: object) -> Popen[str]:
    return start_python("-m", "locret_stream", *args, **more)


def wait_until_idle(process: Popen) -> None:
    """Until it has used no CPU for half a second: whatever it was given is read."""
    used, still = None, 0
    for _ in range(600):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        now = int(fields[11]) + int(fields[12])
        still = still + 1 if now == used else 0
        if still >= 5:
            return
        used = now
        time.sleep(0.1)
    raise AssertionError("the process never came to rest")


def wait_for(process: Popen[str], word: str) -> None:
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"{word!r} never came; exit {process.wait()}")


def test_ctrl_c_while_a_stream_is_read_ends_with_a_summary(small: list[str]):
    process = start("run", "-", "--ask", "What?", *small, stdin=PIPE)
    try:
        wait_for(process, "reading stdin")
        process.stdin.write("All work and no play.\n" * 2000)
        process.stdin.flush()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert re.search(r"Interrupted: [\d,]+ tokens read, .* held", err) and out == "" and "Traceback" not in err, err


def test_ctrl_c_during_the_demo_and_at_the_prompt(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("Hello.\n")
    for args, word in ((["demo", "--tokens", 2_000_000], "decoys"), (["run", note], "Ask away")):
        process = start(*args, *small, stdin=PIPE)
        try:
            wait_for(process, word)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130 and "Interrupted: " in err and "Traceback" not in err, err


def test_the_reader_waits_for_a_pipe_without_a_thread():
    import asyncio

    async def both() -> list[str | None]:
        read, write = os.pipe()
        reader = Reader("pipe", os.fdopen(read, "rb"))
        os.write(write, "eins\nzwö".encode()[:-1])  # ends inside of a character
        lines = [await reader.line()]
        async with asyncio.timeout(30):
            waiting = asyncio.create_task(reader.line())
            await asyncio.sleep(0)
            os.write(write, "ö".encode()[1:] + b"lf\r\nrest")
            lines.append(await waiting)
            os.close(write)
            lines += [await reader.line(), await reader.line()]
        reader._file.close()
        return lines

    assert asyncio.run(both()) == ["eins", "zwölf", "rest", None]


def test_files_are_read_in_pieces_that_join_and_end_in_a_newline(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(("ä€🦉" * 30_000).encode())
    assert "".join(file_text(path)) == "ä€🦉" * 30_000 + "\n"
    path.write_bytes(b"")
    assert "".join(file_text(path)) == ""
    path.write_bytes("ä".encode()[:1])
    with pytest.raises(InvalidText, match="byte 0"):
        list(file_text(path))


def test_a_named_pipe_is_read_as_it_comes(small: list[str], tmp_path: Path):
    pipe, after = tmp_path / "pipe", tmp_path / "after.txt"
    os.mkfifo(pipe)
    after.write_text("More.\n")
    process = start("run", pipe, after, "--ask", "What?", "--max-new-tokens", 2, "--json", *small)
    start_python("-c", f"open({str(pipe)!r}, 'w').write('All work and no play.' * 9)")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["tokens_fed"] == 21 * 9 + len("\nMore.\n")


@pytest.mark.parametrize("begun", [False, True])
def test_signals_end_the_wait_for_a_named_pipe(small: list[str], tmp_path: Path, begun: bool):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start("run", pipe, "--ask", "What?", *small)
    try:
        wait_for(process, "reading ")
        if begun:
            writer = pipe.open("w")  # waits for the reader
            writer.write("All work and no play.\n")
            writer.flush()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        if begun:
            writer.close()
    finally:
        process.kill()
    assert process.returncode == 143 and "Terminated: " in err and "Traceback" not in err, err


def test_train_heads_reads_its_data_once(tiny: Path, tmp_path: Path):
    """As of `--data <(...)`, whatever is made of the heads then."""
    pipe, data = tmp_path / "pipe", pairs(tmp_path)
    os.mkfifo(pipe)
    process = start("train-heads", "--model", tiny, "--data", pipe, "--out", tmp_path / "heads", "--steps", 2,
                    "--width", 8, "--held-out", 0.4, "--allocate", "--allocate-units", 16, "--allocate-chunk", 16,
                    "--json")
    start_python("-c", f"open({str(pipe)!r}, 'w').write(open({str(data)!r}).read())")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and json.loads(out)["steps"] == 2, err


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


# -- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_goes_on_in_the_next_run_and_is_looked_after(small: list[str], tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("The pass key of falcon is 48213.\n" * 20)
    store = ["--store", str(tmp_path / "store")]
    here = ["run", "--session", "builds", *store, *small, "--ask", "What?", "--max-new-tokens", "3", "--json"]
    code, out, _ = invoke(*here, text)
    first = json.loads(out)
    assert code == 0 and first["tokens_fed"] > 600
    code, out, err = invoke(*here, text="")  # nothing piped in: only the question
    again = json.loads(out)
    assert code == 0 and again["tokens_fed"] == 0 and again["answers"] == first["answers"]
    assert "Session 'builds' goes on:" in err

    code, out, _ = invoke("snapshots", "list", *store, "--json")
    [one] = json.loads(out)["snapshots"]
    assert (one["name"], one["generation"]) == ("builds", 1) and one["tokens"] > first["tokens_fed"]
    code, out, _ = invoke("snapshots", "verify", *store)
    assert code == 0 and "1 of 1 snapshots are sound" in out
    code, out, _ = invoke("snapshots", "verify", *store, "--replay", *small)
    assert code == 0 and "builds: holds what its log gives" in out
    code, out, _ = invoke("snapshots", "verify", *store, "--replay", *small, "--budget", "90", "--json")
    assert code == 1 and "other budgets" in json.loads(out)["replays"]["builds"]
    page = next((tmp_path / "store").glob("s-*/pages/*"))
    page.write_bytes(page.read_bytes()[:-1])
    code, out, _ = invoke("snapshots", "verify", *store)
    assert code == 1 and "0 of 1" in out and page.name in out
    assert "--yes" in mistake("snapshots", "forget", "builds", *store, "--json")
    code, out, _ = invoke("snapshots", "forget", "builds", *store, "--yes")
    assert code == 0 and not list((tmp_path / "store").rglob("*.snap"))


def test_a_session_of_another_budget_is_refused_or_read_again(small: list[str], tmp_path: Path):
    here = ["run", "--session", "a", "--store", str(tmp_path), *small, "--ask", "What?", "--max-new-tokens", "3"]
    invoke(*here, text="The pass key of falcon is 48213.\n" * 20)
    other = [{"96": "80"}.get(word, word) for word in here]
    assert "other budgets" in mistake(*other, text="")
    code, _, err = invoke(*other, "--on-mismatch", "rebuild", text="")
    assert code == 0 and "Session 'a' goes on:" in err
    assert "expected raise or rebuild" in mistake(*here, "--on-mismatch", "maybe", text="")


@pytest.mark.parametrize("words", [["info", "nobody"], ["verify", "nobody"], ["delete", "nobody"],
                                   ["forget", "nobody", "--yes"], ["list", "--key", "short"]])
def test_mistakes_about_sessions_are_one_line(tmp_path: Path, words: list[str]):
    assert mistake("snapshots", *words, "--store", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_session_that_was_never_told_anything_is_a_mistyped_name(small: list[str], tmp_path: Path):
    store, ask = ["--store", str(tmp_path / "store")], ["--ask", "What?", "--max-new-tokens", "2"]
    code, _, err = invoke("run", "--session", "builds", *store, *small, *ask, text="Some text.\n" * 9)
    assert code == 0 and "Session 'builds' is new." in err
    complaint = mistake("run", "--session", "bulids", *store, *small, *ask, text="")
    assert f"session 'bulids' is not in {tmp_path / 'store'}; stored there is 'builds'; expected" in complaint
    assert "'builds'" in mistake("run", "--session", "nothing like it", *store, *small, *ask, text="")
    code, _, err = invoke("run", "--session", "bulids", *store, *small, *ask, text="Some text.\n" * 9)
    assert code == 0 and "Session 'bulids' is new; stored there is 'builds'." in err
    code, out, _ = invoke("snapshots", "list", *store, "--json")
    assert [one["name"] for one in json.loads(out)["snapshots"]] == ["builds", "bulids"]


def test_a_thread_of_langchain_is_not_gone_on_with_as_plain_text(tmp_path: Path, small: list[str]):
    line = mistake("run", *small, "--session", "langchain/alice", "--store", tmp_path, "--ask", "What?")
    assert "thread of LocretChatModel" in line and "thread_id='alice'" in line
    assert not list(tmp_path.iterdir())


def test_what_a_memory_holds_is_shown_as_text(tmp_path: Path, tiny: Path, small: list[str]):
    store = ["--store", tmp_path / "store"]
    code, _, _ = invoke("run", *small, "--session", "a", *store, "--ask", "What?", text="The code is 48213.\x1b[2J")
    assert code == 0
    code, out, _ = invoke("snapshots", "show", "a", *store, "--model", tiny)
    assert code == 0 and "The code is 48213.\\x1b[2J" in out and "100%]" in out and "\x1b[2J" not in out
    code, out, _ = invoke("snapshots", "show", "a", *store, "--model", tiny, "--json")
    found = json.loads(out)
    assert code == 0 and "48213" in found["passages"][0]["text"] and found["passages"][0]["share"] == 1.0
    assert "another tokenizer" in mistake("snapshots", "show", "a", *store)
    assert "no session 'b'" in mistake("snapshots", "show", "b", *store, "--model", tiny)


def test_names_are_listed_whole(tmp_path: Path, small: list[str]):
    name = "a-name/" + "0123456789" * 14
    store = ["--store", tmp_path / "store"]
    code, _, _ = invoke("run", *small, "--session", name, *store, "--ask", "What?", text="some text to read")
    assert code == 0
    for verb in (["list"], ["info", name]):
        code, out, _ = invoke("snapshots", *verb, *store)
        assert code == 0 and name in out and "encrypted" in out


def test_what_cannot_be_saved_is_said_before_anything_is_read(small: list[str], tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    complaint = mistake("run", "--session", "a", "--store", tmp_path / "file", *small, "--ask", "What?",
                        text="Some text.\n" * 9)
    assert str(tmp_path / "file") in complaint and "reading" not in complaint
    assert "expected a folder or a URL" in mistake("snapshots", "list", "--store", " ")


def test_one_damaged_snapshot_hides_no_other(small: list[str], tmp_path: Path):
    store = ["--store", str(tmp_path / "store")]
    for name in ("a", "b\nc"):
        invoke("run", "--session", name, *store, *small, "--ask", "What?", "--max-new-tokens", "2", text="Text.\n" * 9)
    code, out, err = invoke("snapshots", "list", *store)
    assert code == 0 and "b\\nc" in out and err == ""
    manifest = min((tmp_path / "store").glob("s-*/m/*/*.snap"), key=lambda path: path.stat().st_mtime_ns)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    code, out, err = invoke("snapshots", "list", *store)
    assert code == 1 and "b\\nc" in out and "--on-mismatch rebuild" in err and "found" in err
    code, out, err = invoke("snapshots", "info", "a", *store)
    assert code == 1 and "a" in err
    for verb in (["list"], ["info", "a"]):
        code, out, err = invoke("snapshots", *verb, *store, "--json")
        assert code == 1 and err == "" and any(one["problem"] for one in json.loads(out)["snapshots"])


@pytest.mark.parametrize("number, status, word, ignored", [
    pytest.param(signal.SIGTERM, 143, "Terminated", (), id="terminated"),
    pytest.param(signal.SIGINT, 130, "Interrupted", (), id="ctrl-c"),
    pytest.param(signal.SIGTERM, 143, "Terminated", ("INT",), id="terminated in the background of a script")])
def test_a_session_is_saved_when_it_is_stopped(small: list[str], tmp_path: Path, number: int, status: int, word: str,
                                               ignored: tuple[str, ...]):
    process = start("run", "-", "--session", "a", "--store", tmp_path, "--ask", "What?", *small, stdin=PIPE,
                    ignored=ignored)
    try:
        wait_for(process, "reading stdin")
        process.stdin.write("All work and no play.\n" * 200)
        process.stdin.flush()
        wait_until_idle(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status and f"{word}: " in err and "Traceback" not in err, err
    [one] = Store(tmp_path).list()
    assert one.name == "a" and one.tokens > 200 * 20


def test_a_session_is_saved_while_it_reads(small: list[str], tmp_path: Path):
    """What a kill leaves is what the last of these saves held."""
    process = start("run", "-", "--session", "a", "--store", tmp_path, "--ask", "What?", "--save-every", "0.2", *small,
                    stdin=PIPE)
    store, deadline = Store(tmp_path), time.monotonic() + 60
    try:
        wait_for(process, "reading stdin")
        while time.monotonic() < deadline and not (store.has("a") and store.info("a")[-1].generation > 1):
            process.stdin.write("All work and no play.\n" * 50)
            process.stdin.flush()
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    first, *_, last = store.info("a")
    assert last.generation > 1 and last.tokens > first.tokens > 0
    assert not [one.problem for one in store.verify() if one.problem]


def test_reading_ends_when_another_owner_takes_the_session(small: list[str], tmp_path: Path):
    arguments = ["run", "-", "--session", "a", "--store", tmp_path, "--ask", "What?", "--save-every", "0.2", *small]
    process, store = start(*arguments, stdin=PIPE), Store(tmp_path)
    try:
        wait_for(process, "reading stdin")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if store.has("a") and store.info("a")[-1].generation < 1000:
                session_folder = store.branch("a").session_folder
                path = session_folder.manifest_path("a", 1000)
                Path(store.url, session_folder.folder, path).touch()  # another owner's
            process.stdin.write("All work and no play.\n")
            process.stdin.flush()
            time.sleep(0.1)
    except BrokenPipeError:
        pass
    finally:
        process.kill()
        _, err = process.communicate()
    assert process.returncode == 2 and "was saved elsewhere" in err and "Traceback" not in err, err
    rescued = re.search(r"kept as session 'a \(2\)', ([\d,]+) tokens", err)
    assert rescued and store.info("a (2)")[0].tokens == int(rescued[1].replace(",", "")) > 0


def test_only_asking_saves_nothing_and_needs_nothing_to_write_to(small: list[str], tmp_path: Path):
    store = ["--store", str(tmp_path / "store")]
    here = ["run", "--session", "a", *store, *small, "--ask", "What?", "--max-new-tokens", "2"]
    invoke(*here, text="Some text without an end\n" * 9 + "and held")
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    code, _, err = invoke(*here, text="")
    assert code == 0 and "goes on" in err and "reading" not in err
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before


def test_a_store_whose_sessions_are_locked_is_not_called_damaged(small: list[str], tmp_path: Path):
    store, ask = ["--store", str(tmp_path)], ["--ask", "What?", "--max-new-tokens", "2"]
    invoke("run", "--session", "plain", *store, *small, *ask, text="Some text.\n" * 9)
    invoke("run", "--session", "secret", "--key", "5a" * 32, *store, *small, *ask, text="Some text.\n" * 9)
    code, out, _ = invoke("snapshots", "verify", *store)
    assert code == 0 and "1 of 2 snapshots are sound, 1 not checked" in out
    code, out, err = invoke("snapshots", "list", *store)
    assert code == 0 and "plain" in out and "is encrypted" in err and "delete" not in err
    complaint = mistake("run", "--session", "plain", "--key", "5a" * 32, *store, *small, *ask, text="More.\n")
    assert "stored without encryption" in complaint  # before anything was read
    assert [one.generation for one in Store(tmp_path).info("plain")] == [1]
    code, _, err = invoke("snapshots", "verify", "--store", tmp_path / "nothere")
    assert code == 1 and "nothing is stored" in err
    assert "no folder" in mistake("snapshots", "list", "--store", next(tmp_path.rglob("*.snap")))


def test_deleting_all_of_a_name_is_asked_about(small: list[str], tmp_path: Path):
    store = ["--store", str(tmp_path)]
    invoke("run", "--session", "a", *store, *small, "--ask", "What?", "--max-new-tokens", "2", text="Some text.\n" * 9)
    for verb in ("delete", "forget"):
        assert "expected --yes" in mistake("snapshots", verb, "a", *store)
    assert invoke("snapshots", "delete", "a", "--yes", *store)[0] == 0 and Store(tmp_path).list() == []


LEFT_BEHIND = """
import sys, threading, time
import torch
import locret_stream.cli as cli
def app(**_):
    def spin():
        x = torch.rand(300, 300)
        while True:
            x = x @ x
            x = x / x.norm()
    for _ in range(3):
        threading.Thread(target=spin, daemon=True).start()
    time.sleep(0.3)
    print("said")
    raise SystemExit(143)
cli.app = app
from locret_stream.__main__ import main
main()
"""


def test_a_signal_while_a_model_loads_ends_with_its_own_status():
    """The thread that loads is inside torch, and would abort the process when the interpreter goes."""
    done = run_python("-c", LEFT_BEHIND, timeout_s=120)
    assert (done.returncode, done.stdout) == (143, "said\n") and "terminate called" not in done.stderr
