"""Stored sessions: `run --session`, and `snapshots`, which manages them."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from locret_stream.runtime import as_saved
from locret_stream.snapshot import Store
from tests.cli.command import invoke, mistake, start, wait_for, wait_until_idle
from tests.processes import PIPE


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
    code, out, _ = invoke("snapshots", "verify", *store, "--replay", *small[:2])  # all else is the session's
    assert code == 0 and "builds: agrees with its log" in out
    code, out, _ = invoke("snapshots", "verify", *store, "--replay", *small, "--budget", "90", "--json")
    assert code == 1 and "other budgets" in json.loads(out)["replays"]["builds"]
    page = next((tmp_path / "store").glob("s-*/pages/*"))
    page.write_bytes(page.read_bytes()[:-1])
    code, out, _ = invoke("snapshots", "verify", *store)
    assert code == 1 and "0 of 1" in out and page.name in out
    assert "--yes" in mistake("snapshots", "forget", "builds", *store, "--json")
    code, out, _ = invoke("snapshots", "forget", "builds", *store, "--yes")
    assert code == 0 and not list((tmp_path / "store").rglob("*.snap"))


def test_sessions_of_several_settings_are_replayed_each_with_its_own(small: list[str], tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch):
    """Policies, budgets, chunk sizes and bits; an option that is given counts instead."""
    store, model = ["--store", str(tmp_path)], small[:2]
    others = {"a": [], "b": [], "c": ["--policy", "h2o"], "d": ["--store-bits", "8,4", "--budget", "112"],
              "e": ["--policy", "streaming_llm", "--chunk-size", "32"], "f": ["--store-bits", "2", "--exact", "host"],
              "g": ["--policy", "h2o", "--by-head"]}
    for name, more in others.items():
        code, _, err = invoke("run", "--session", name, *store, *small, *more, "--ask", "What?", "--max-new-tokens", 3,
                              text="The pass key of falcon is 48213.\n" * 20)
        assert code == 0, err
    code, out, _ = invoke("snapshots", "verify", *store, *model, "--replay", "--json")
    assert code == 0 and json.loads(out)["replays"] == dict.fromkeys(others, "")
    code, out, _ = invoke("snapshots", "verify", *store, *model, "--replay", "--policy", "h2o", "--json")
    replays = json.loads(out)["replays"]
    assert code == 1 and not replays["c"] and not replays["g"]
    assert all("other policy" in replays[name] for name in "abdef")
    for more in ["--by-head"], ["--budget", "96"], ["--by-head", "--budget", "96"]:
        code, out, _ = invoke("snapshots", "verify", "g", *store, *model, "--replay", *more)
        assert code == 0, out
    code, out, _ = invoke("snapshots", "verify", "c", *store, *model, "--replay", "--by-head")
    assert code == 1 and "other budgets" in out
    settings_of = as_saved.settings_of
    monkeypatch.setattr(as_saved, "settings_of", lambda identity: settings_of(identity) | (
        {"policy": "of_my_own"} if identity.policy == "h2o" else {}))
    code, out, _ = invoke("snapshots", "verify", *store, *model, "--replay", "--json")
    replays = json.loads(out)["replays"]
    for name in "cg":
        assert code == 1 and "cannot be replayed: unknown policy 'of_my_own'" in replays.pop(name), replays
    assert set(replays.values()) == {""}, "what a policy of the user's own read leaves the others to be replayed"


def test_an_empty_store_is_sound_and_says_so(tmp_path: Path):
    for more in (), ("--replay",):
        code, out, err = invoke("snapshots", "verify", "--store", tmp_path, *more)
        assert (code, out) == (0, "") and f"nothing is stored in {tmp_path}" in err


def test_a_question_to_a_new_session_is_answered_where_there_is_no_other(small: list[str], tmp_path: Path):
    """As a first `make chat ARGS='--ask ...'` is; no name can be mistyped, and nothing is saved."""
    asked = ["run", "--session", "me", "--store", str(tmp_path), *small, "--ask", "What?", "--max-new-tokens", "3"]
    code, out, err = invoke(*asked, text="")
    assert code == 0 and out and "Session 'me' is new. Nothing was read: the model answers alone" in err
    assert not list(tmp_path.rglob("*.snap"))
    assert "is not in" not in invoke(*asked, text="The pass key of falcon is 48213.\n")[2]
    assert f"session 'you' is not in {tmp_path}, which has 'me'" in mistake(
        *["you" if word == "me" else word for word in asked], text="")


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
    assert f"session 'bulids' is not in {tmp_path / 'store'}, which has 'builds'; expected" in complaint
    assert "'builds'" in mistake("run", "--session", "nothing like it", *store, *small, *ask, text="")
    code, _, err = invoke("run", "--session", "bulids", *store, *small, *ask, text="Some text.\n" * 9)
    assert code == 0 and "Session 'bulids' is new; the store has 'builds'." in err
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
@pytest.mark.thorough
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
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == status and f"{word}: " in err and "Traceback" not in err, err
    [one] = Store(tmp_path).list()
    assert one.name == "a" and one.tokens > 200 * 20


@pytest.mark.thorough
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


@pytest.mark.thorough
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
