"""A model for which nobody made heads: what is taken where no policy is named, and what becomes of its sessions."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from transformers import PreTrainedModel

from langchain_locret import LocretChatModel
from locret_stream import ConfigError, SnapshotMismatch, SyncContext
from locret_stream.cli import serve as serving_verb
from locret_stream.models import attached
from locret_stream.policies import POLICIES, usual_policy
from locret_stream.runtime import Runtime
from locret_stream.runtime.told import without_heads
from locret_stream.training import TrainConfig
from locret_stream.training.loop import _new_heads
from tests.architectures import CONFIGS, make
from tests.cli.command import invoke
from tests.cli.conftest import tiny as folder_of_a_model  # noqa: F401  # a fixture
from tests.context.support import TEXT, model, tiny, tokenizer
from tests.kit import saved_heads
from tests.processes import run_python

SMALL = {"budget": 96, "chunk_size": 32}
SAID = "no retaining heads were given, and no policy: 'keydiff' is taken"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "retaining heads" in record.getMessage()]


def of_kind(name: str) -> PreTrainedModel:
    """A random model of that kind which knows the ids of the tokenizer."""
    config = CONFIGS[name]()
    config.vocab_size = len(tokenizer())
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = config.vocab_size
    return make(name, config=config)


def test_what_is_taken_needs_no_heads():
    kinds = {with_heads: POLICIES[usual_policy(with_heads=with_heads)] for with_heads in (True, False)}
    assert kinds[True].name == "locret" and kinds[False]().bounded


@pytest.mark.parametrize("kind", ["llama", "lfm2", "deepseek-v3", "gemma4-e2b", *(
    pytest.param(name, marks=pytest.mark.thorough) for name in ("mimo", "qwen3.5", "falcon-h1", "deepseek-v3.2",
                                                                "gemma3", "gpt-oss", "ministral3"))])
async def test_every_kind_of_model_has_a_memory_without_a_word_of_policy(kind: str, caplog: pytest.LogCaptureFixture):
    """It evicts, behind a focus, too, and says in one line what was taken and, where there can be any, how heads are
    made."""
    async with tiny(on=of_kind(kind), policy=None, units=24) as runtime:
        assert runtime.engine.policy.name == "keydiff" == runtime.identity.policy
        async with runtime.open(focus="falcon") as ctx:
            await ctx.feed(TEXT)
            assert ctx.memory.tokens > 2 * max(ctx.memory.units) and ctx.memory.focus
            assert isinstance(await ctx.ask("falcon?", max_new_tokens=2), str)
        alike = runtime.attachment.shape.alike
    [line] = told(caplog)
    assert line.startswith(SAID) and "\n" not in line
    assert ("locret-stream train-heads --model" in line) is alike is (kind not in ("gemma4-e2b", "mimo"))


async def test_heads_and_policies_that_are_named_are_taken_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    heads = saved_heads(model(), tmp_path / "heads")
    async with tiny(policy=None, heads=heads) as runtime:
        assert runtime.engine.policy.name == "locret"
    async with tiny(policy="h2o") as runtime:
        assert runtime.engine.policy.name == "h2o"
        async with runtime.beside("tova") as other:
            assert other.engine.policy.name == "tova"
    with pytest.raises(ConfigError, match="'locret' needs retaining heads"):
        async with tiny(policy="locret"):
            pass
    with pytest.raises(ConfigError, match="those of policy 'kvzap'"):
        async with tiny(policy=None, heads=saved_heads(model(), tmp_path / "zap", "kvzap")):
            pass
    assert not told(caplog)


@pytest.mark.parametrize(("kind", "more"), [("llama", {}), ("deepseek-v3", {}), ("gemma4-e2b", {}), ("inkling", {
    "num_key_value_heads": 4}), ("recurrent-gemma", {})])
def test_the_line_names_a_command_only_where_that_can_make_heads(kind: str, more: dict):
    """`train-heads` begins with the same shape."""
    config = CONFIGS[kind]()
    vars(config).update(more)  # Inkling's layers are alike then, but for their windows
    with attached(make(kind, config=config)) as attachment:
        assert attachment.shape.alike == (kind != "gemma4-e2b")
        said = without_heads(attachment.shape, "MODEL")
        features = "hidden" if "--features hidden" in said else "qkv"
        try:
            _new_heads(attachment, TrainConfig(steps=1, features=features))
        except ConfigError:
            assert "train-heads" not in said
        else:
            assert ("train-heads" in said) == (not all(attachment.shape.sliding))


async def test_a_session_goes_on_after_heads_were_made_or_says_how(tmp_path: Path):
    """The policy belongs to the session. Under heads it is refused by name, and stays as it was."""
    heads, store = saved_heads(model(), tmp_path / "heads"), tmp_path / "store"
    plain, with_heads = {"policy": None}, {"policy": None, "heads": heads}
    async with tiny(store=store, **plain) as runtime, runtime.open("notes") as ctx:
        await ctx.feed(TEXT)
        tokens = ctx.memory.tokens
    async with tiny(store=store, **with_heads) as runtime:
        with pytest.raises(SnapshotMismatch, match=r"made with other heads: found none, expected \w+; open it with "
                                                   r"policy='keydiff' \(--policy keydiff\) and no heads.*rebuild"
                           ) as caught:
            async with runtime.open("notes"):
                pass
        assert caught.value.field == "heads"
        async with runtime.open("others") as ctx:
            await ctx.feed(TEXT)
    for options in (plain, {"policy": "keydiff"}):
        async with tiny(store=store, **options) as runtime, runtime.open("notes") as ctx:
            assert ctx.resumed and ctx.memory.tokens == tokens
    async with tiny(store=store, **plain) as runtime:
        with pytest.raises(SnapshotMismatch, match=r"open it with policy='locret' \(--policy locret\) and those heads"):
            async with runtime.open("others"):
                pass
    async with tiny(store=store, policy="h2o") as runtime:
        with pytest.raises(SnapshotMismatch, match=r"found keydiff, expected h2o.* and no heads") as caught:
            async with runtime.open("notes"):
                pass
        assert caught.value.field == "policy"
    async with tiny(store=store, **with_heads) as runtime, runtime.open("notes", on_mismatch="rebuild") as ctx:
        assert ctx.rebuilt and ctx.memory.tokens == tokens


@pytest.mark.thorough
def test_the_command_line_says_it_once_on_stderr(folder_of_a_model: Path, tmp_path: Path):  # noqa: F811
    """And what it names makes heads for this model."""
    run = ["run", "--model", folder_of_a_model, "--budget", 96, "--chunk-size", 32, "--session", "s", "--store",
           tmp_path / "store", "--ask", "What?", "--max-new-tokens", 2, "--json"]
    (tmp_path / "notes.txt").write_text("The pass key of falcon is 48213.\n" * 20)
    done = run_python("-m", "locret_stream", *run, tmp_path / "notes.txt")
    assert done.returncode == 0 and len(json.loads(done.stdout)["answers"]) == 1, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "heads" in line]
    assert line.startswith(SAID) and "policy keydiff, budget 96" in done.stderr
    command = shlex.split(line.partition("this makes them: locret-stream ")[2])
    assert command[:3] == ["train-heads", "--model", str(folder_of_a_model)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({
        "prompt": f"The code is {code}. What is the code?", "answer": f"{code}."}) + "\n" for code in range(12)))
    pairs, out = command.index("pairs.jsonl"), command.index("heads", 1)
    command[pairs], command[out] = tmp_path / "pairs.jsonl", tmp_path / "heads"
    code, _, err = invoke(*command, "--steps", 2, "--width", 8, "--held-out", 0.5)
    assert code == 0, err
    code, _, err = invoke(*run)
    assert code == 0 and "Session 's' goes on" in err, err
    code, _, err = invoke(*run, "--heads", tmp_path / "heads")
    assert code == 2 and "open it with policy='keydiff' (--policy keydiff) and no heads" in err


def test_inspect_and_serve_take_it_too(folder_of_a_model: Path, tmp_path: Path,  # noqa: F811
                                       monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    options = ["--model", folder_of_a_model, "--budget", 96, "--chunk-size", 32]
    code, out, err = invoke("inspect", "--json", *options)
    assert code == 0 and json.loads(out)["policy"] == "keydiff", err

    def looked_at(*given: object, make: Callable[..., Runtime] = serving_verb.make_runtime, **more: object) -> Runtime:
        runtime = make(*given, **more)
        taken = runtime.engine.policy.name
        asyncio.run(runtime.aclose())
        raise ConfigError(f"it would serve with {taken}")

    monkeypatch.setattr(serving_verb, "make_runtime", looked_at)
    caplog.clear()
    code, _, err = invoke("serve", *options, "--store", tmp_path / "store", "--port", 0)
    assert code == 2 and "it would serve with keydiff" in err
    [line] = told(caplog)
    assert line.startswith(SAID)


def test_langchain_takes_it_too(folder_of_a_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):  # noqa: F811
    thread = {"configurable": {"thread_id": "a"}}
    for day in (1, 2):
        with LocretChatModel(model=str(folder_of_a_model), store=tmp_path / "store", max_tokens=2, **SMALL) as chat:
            answer = chat.invoke([HumanMessage("one")] if day == 1 else [HumanMessage("two")], thread,
                                 append=day == 2)
            assert chat.shared.runtime.engine.policy.name == "keydiff"
            receipt = answer.response_metadata["locret"]
            assert receipt["source"] == ("new" if day == 1 else "snapshot"), receipt
    assert [line.startswith(SAID) for line in told(caplog)] == [True, True]
    with pytest.raises(ValueError, match="without heads="):
        LocretChatModel(model=str(folder_of_a_model), policy="locret")


def test_heads_for_latents_read_the_hidden_state(tmp_path: Path):
    """Told before anything is trained; those that the line names fit."""
    with attached(make("deepseek-v3")) as attachment:
        assert "--features hidden" in without_heads(attachment.shape, "./model")
        with pytest.raises(ConfigError, match=r"latents.*--features hidden"):
            _new_heads(attachment, TrainConfig(width=8))
        attachment.check_heads(_new_heads(attachment, TrainConfig(width=8, features="hidden")))


def test_python_takes_it_too(folder_of_a_model: Path, caplog: pytest.LogCaptureFixture):  # noqa: F811
    with SyncContext(str(folder_of_a_model), **SMALL) as ctx:
        ctx.feed(TEXT)
        assert ctx.memory.tokens > 96
    [line] = told(caplog)
    assert f"train-heads --model {folder_of_a_model}" in line
