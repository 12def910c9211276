"""`locret-stream train-heads`: heads trained, divided, tuned and used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from locret_stream.text import TextCodec
from tests.cli.command import invoke, mistake, start
from tests.processes import start_python


def test_heads_are_trained_resumed_and_used(tiny: Path, tmp_path: Path):
    data, heads = pairs(tmp_path), tmp_path / "heads"
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 3, "--width", 16, "--json"]
    code, out, err = invoke(*train)
    assert code == 0, err
    found = json.loads(out)
    assert found["steps"] == 3 and found["out"] == str(heads)
    means = (heads / "key_means.safetensors").read_bytes()
    assert json.loads(invoke(*train)[1]) == found  # finished runs are not run again
    (heads / "key_means.safetensors").unlink()  # as in a folder of an earlier version
    assert json.loads(invoke(*train)[1]) == found and (heads / "key_means.safetensors").read_bytes() == means
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
    (heads / "key_means.safetensors").write_bytes(b"of another run")
    assert invoke(*train, "--restart")[0] == 0 and (heads / "key_means.safetensors").read_bytes() == means


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


@pytest.mark.thorough
def test_heads_learn_what_each_layer_needs(tiny: Path, tmp_path: Path):
    data, heads = pairs(tmp_path), tmp_path / "heads"
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 3, "--width", 16,
             "--held-out", 0.4]
    units = ["--allocate-units", 16, "--allocate-chunk", 16]
    assert "expected --allocate" in mistake(*train, *units)
    assert "6000 units + chunk_size 32: the model knows 512" in mistake(*train, "--allocate", "--allocate-units", 6000)
    assert "of 1 held-out examples" in mistake(*train, *units, "--allocate", "--held-out", 0.01)
    assert not heads.exists(), "told before anything is trained"
    log = tmp_path / "service.log"
    log.write_text("a line of a log\n" * 3)
    assert "expected a longer text" in mistake(*train, *units, "--allocate", "--background", log)
    assert "seed is 99999999999999; expected a whole number, 0 to" in mistake(*train, "--seed", 99999999999999)
    assert not heads.exists(), "told before anything is trained"
    code, out, err = invoke(*train, "--label", "logprob", "--out", tmp_path / "labelled", "--json")
    assert code == 0 and json.loads((tmp_path / "labelled" / "heads.json").read_text())["label"] == "logprob", err
    code, out, err = invoke(*train, *units, "--allocate", "--allocate-examples", 4, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["steps"] == 3 and sum(found["budget_shares"]) == 2 == len(found["allocation"]["units"])
    assert found["allocation"]["loss"].keys() == {"full", "even", "divided"} and "dividing the budget" in err
    assert json.loads((heads / "heads.json").read_text())["budget_shares"] == found["budget_shares"]
    code, out, err = invoke(*train, *units, "--allocate", "--allocate-examples", 4)
    assert code == 0 and "budget by layer: " in out and "--budget 16 --chunk-size 16" in out, err
    assert "differs in units: stored 16, now 17" in mistake(*train, "--allocate", "--allocate-units", 17,
                                                          "--allocate-chunk", 16, "--allocate-examples", 4)


def test_heads_are_tuned_for_a_budget(tiny: Path, tmp_path: Path):
    data, heads = pairs(tmp_path), tmp_path / "heads"
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 2, "--width", 16,
             "--held-out", 0.4]
    units = ["--tune-units", 16, "--tune-chunk", 16]
    assert "expected --tune STEPS" in mistake(*train, *units)
    assert "tune: 6000 units + chunk_size 32: the model knows 512" in mistake(*train, "--tune", 2, "--tune-units", 6000)
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
    assert "differs in steps: stored 2, now 3" in mistake(*train, *units, "--tune", 3)
    for alone, needed in (("--restart-tuning",), "--tune STEPS"), (
            ("--allocate-examples", 4), "--allocate"), (("--query-tokens", 5), "--query-aware"), (
            ("--horizon", 9), "--output retention"):
        assert f"found {alone[0]} and no {needed}; expected {needed} with it" in mistake(*train, *alone)
    assert "--query-tokens is 0; expected at least 1" in mistake(*train, "--query-aware", "--query-tokens", 0)
    before = (heads / "metrics.jsonl").read_bytes()
    code, out, err = invoke(*train, *units, "--tune", 3, "--restart-tuning", "--json")
    assert code == 0 and json.loads(out)["tuning"]["steps"] == 3, err
    assert (heads / "metrics.jsonl").read_bytes() == before, "the first stage is kept"


@pytest.mark.thorough
def test_heads_learn_to_rank_against_a_text_and_are_tuned_afterwards(tiny: Path, tmp_path: Path, monkeypatch):
    """What tuning reads of the text is no part of the first stage, which is therefore not made again."""
    monkeypatch.setattr("locret_stream.cli.train_heads.PLAIN_TOKENS", 500)
    data, heads, log = pairs(tmp_path), tmp_path / "heads", tmp_path / "service.log"
    log.write_text("".join(f"service {n} answers in {n % 7} ms\n" for n in range(400)))
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 2, "--width", 16,
             "--held-out", 0.4, "--background", log, "--label", "attention", "--kernel", 3, "--layers", "1,0",
             "--device", "cpu", "--dtype", "float32", "--json"]
    code, out, err = invoke(*train)
    assert code == 0, err
    config = json.loads((heads / "heads.json").read_text())
    assert (config["label"], config["kernel"], config["trained_layers"]) == ("attention", 3, [0, 1])
    first = json.loads(out)
    ids = torch.tensor(TextCodec(AutoTokenizer.from_pretrained(tiny)).encode_text(log.read_text())[:500])
    digest = hashlib.blake2b(ids.numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()
    assert json.loads((heads / "run.json").read_text())["data"].endswith(f" background {digest}")
    code, out, err = invoke(*train, "--tune", 2, "--tune-units", 16, "--tune-chunk", 16)
    assert code == 0, err
    assert json.loads(out)["seconds"] == first["seconds"] and json.loads(out)["tuning"]["behind"] > 1000
    assert "--layers is 'all but one'; expected numbers" in mistake(*train, "--layers", "all but one")


def test_a_background_may_be_conversations(tiny: Path, tmp_path: Path, monkeypatch):
    """They are read as the chat template writes them, with its control tokens."""
    monkeypatch.setattr("locret_stream.cli.train_heads.PLAIN_TOKENS", 300)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    heads, plain = tmp_path / "heads", tmp_path / "plain.jsonl"
    talks = [[{"role": "user", "content": f"Line {n} of a log.\nOne more."}, {"role": "assistant", "content": "OK."}]
             for n in range(40)]
    plain.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    train = ["train-heads", "--model", tiny, "--data", pairs(tmp_path), "--out", heads, "--steps", 1, "--width", 16,
             "--held-out", 0.4, "--background", plain, "--label", "attention", "--json"]
    code, _, err = invoke(*train)
    assert code == 0, err
    ids = [number for talk in talks for number in tokenizer.apply_chat_template(talk, return_dict=False)][:300]
    assert set(ids) & set(tokenizer.all_special_ids)
    digest = hashlib.blake2b(torch.tensor(ids).numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()
    assert json.loads((heads / "run.json").read_text())["data"].endswith(f" background {digest}")
    plain.write_text('{"messages": "none"}\n')
    assert f"{plain}:1: " in mistake(*train)


@pytest.mark.thorough
def test_heads_are_tuned_behind_a_text(tiny: Path, tmp_path: Path):
    data, heads, log = pairs(tmp_path), tmp_path / "heads", tmp_path / "service.log"
    log.write_text("".join(f"service {n} answers in {n % 7} ms\n" for n in range(100)) + "no newline at the end")
    train = ["train-heads", "--model", tiny, "--data", data, "--out", heads, "--steps", 2, "--width", 16,
             "--held-out", 0.4, "--background", log]
    tune = ["--tune", 2, "--tune-units", 16, "--tune-chunk", 16]
    assert "found --background and no --label attention, --tune or --allocate; expected --label attention, " in mistake(
        *train)
    code, out, err = invoke(*train, *tune, "--json")
    assert code == 0, err
    assert json.loads(out)["tuning"]["steps"] == 2
    behind = json.loads(out)["tuning"]["behind"]
    assert behind > 1000 and behind % 16 == 0
    assert json.loads(invoke(*train, *tune, "--json")[1]) == json.loads(out)
    assert f"tuned for 16 units on average, behind {behind:,} tokens of text: " in invoke(*train, *tune)[1]
    log.write_text(log.read_text().replace("answers", "asks"))
    assert "contains another tuning, which differs in data" in mistake(*train, *tune)
    assert "found --background and --tune with --output retention" in mistake(*train, *tune, "--output", "retention")
    divided = [*train, "--out", tmp_path / "fading", "--output", "retention", "--allocate", "--allocate-units", 16,
               "--allocate-chunk", 16, "--allocate-examples", 4]
    code, out, err = invoke(*divided)
    assert code == 0 and "; with space for an example in every layer " in out, err
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


@pytest.mark.thorough
def test_train_heads_reads_its_data_once(tiny: Path, tmp_path: Path):
    """As of `--data <(...)`, whatever is made of the heads then."""
    pipe, data = tmp_path / "pipe", pairs(tmp_path)
    os.mkfifo(pipe)
    process = start("train-heads", "--model", tiny, "--data", pipe, "--out", tmp_path / "heads", "--steps", 2,
                    "--width", 8, "--held-out", 0.4, "--allocate", "--allocate-units", 16, "--allocate-chunk", 16,
                    "--json")
    start_python("-c", f"open({str(pipe)!r}, 'w').write(open({str(data)!r}).read())")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and json.loads(out)["steps"] == 2, err
