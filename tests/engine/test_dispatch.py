"""The same engine on Triton's kernels (under its interpreter, where there is no GPU): the laws hold there too.

Small on purpose, as the interpreter is slow. `-m slow` runs the whole of test_laws.py and test_decoding.py there.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
import torch

from locret_stream import kernels
from locret_stream.engine import Engine, NextToken
from locret_stream.errors import ConfigError
from locret_stream.models import attached, expect_gradients
from tests.architectures import make
from tests.kit import DEVICE, assert_same, build, feed, ids_of, model, stock_logits
from tests.limits import SLOW_LIMIT_S
from tests.processes import run_python

pytest.importorskip("triton", reason="triton is published for Linux only")
pytestmark = pytest.mark.skipif(torch.cuda.is_available() and DEVICE == "cpu", reason="one process has Triton's "
                                "compiler or its interpreter; LOCRET_TEST_DEVICE=cuda runs this on the GPU")
ROOT = Path(__file__).resolve().parents[2]
CHUNK, UNITS = 8, 12
MATRIX = [("llama", "locret"), ("llama", "h2o"), ("gemma3", "keydiff"), ("gpt-oss", "locret"), ("gemma2", "h2o"),
          ("phi3-partial", "streaming_llm"), ("llama4", "keydiff"), ("hunyuan", "h2o"), ("deepseek-v3", "h2o"),
          ("mimo", "h2o")]
OTHERWISE = ("gpt-oss", "phi3-partial", "llama4", "hunyuan", "deepseek-v3", "mimo")  # RoPE is no rotation of halves


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setenv("LOCRET_KERNELS", "triton")


def engine_of(policy: str, on: str) -> Engine:
    return build(policy, on=model(on), units=UNITS, chunk_size=CHUNK, slots=3)


@pytest.mark.parametrize("on", ["llama", "olmo2"])
@pytest.mark.thorough(but=1)
def test_gradients_pass_where_kernels_rotate(on: str, triton):
    """Also in a model that rotates in fp32 and casts back."""
    with attached(make(on).bfloat16()) as attachment:
        expect_gradients(attachment)
    x, table = torch.ones(1, 2, 3, 4, device=DEVICE, requires_grad=True), torch.rand(1, 1, 3, 4, device=DEVICE)
    assert torch.autograd.grad(kernels.rotate_halves(x, table, table).sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize(("on", "policy"), MATRIX)
@pytest.mark.thorough(but=1)
def test_both_dispatches_keep_the_same_units(on: str, policy: str, monkeypatch):
    """The kernels round in other places than torch: the same units stay, and their tensors agree to 1e-4."""
    states, ids = {}, ids_of(3 * CHUNK + 3)
    for dispatch in ("torch", "triton"):
        monkeypatch.setenv("LOCRET_KERNELS", dispatch)
        engine = engine_of(policy, on)
        state = engine.open(1)
        feed(engine, state, ids)
        states[dispatch] = engine.export(state), engine.logits(state)
        stored = [rotates for rotates, pair in zip(engine.pool.rope, engine.layout.tables.layers, strict=True) if pair]
        assert all(stored) == (dispatch == "torch" or on in OTHERWISE), "halves are rotated on load"
        assert engine.pool.bytes_resident == engine.pool.formula_bytes()
    (expected, expected_logits), (found, logits) = states["torch"], states["triton"]
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: name + m)
        else:
            assert torch.equal(found[name], tensor), name
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.thorough
def test_both_dispatches_keep_the_same_units_in_few_bits(bits: int, monkeypatch):
    """A channel between two codes may get either of them."""
    states, ids = {}, ids_of(4 * CHUNK + 3)
    for dispatch in ("torch", "triton"):
        monkeypatch.setenv("LOCRET_KERNELS", dispatch)
        engine = build("locret", on=model("llama"), units=UNITS, chunk_size=CHUNK, slots=2, store_bits=bits)
        state, again = engine.open(1), engine.open(0)
        feed(engine, state, ids)
        states[dispatch] = engine.export(state), engine.logits(state)
        for start in range(0, len(ids), 5):
            feed(engine, again, ids[start:start + 5])
            engine.logits(again)
        assert_same(engine.export(again), engine.export(state))
    (expected, expected_logits), (found, logits) = states["torch"], states["triton"]
    for layer, budget in enumerate(engine.budgets):
        assert torch.equal(found[f"{layer}.positions"], expected[f"{layer}.positions"])
        codes = [one[f"{layer}.values"][:, :, :-8].int() for one in (found, expected)]  # behind them are scale and zero
        differ = (codes[0] != codes[1]).float().mean()
        assert differ < 0.02, f"{differ:.3f} of the codes of {budget} units"
    torch.testing.assert_close(logits, expected_logits, rtol=0.05, atol=0.05)


@pytest.mark.thorough
def test_law_2_the_committed_state_is_a_function_of_the_tokens(triton):
    """Bit for bit: in pieces, with answers between, beside a neighbour, in another slot."""
    engine, ids = engine_of("h2o", "llama"), ids_of(3 * CHUNK + 2)
    whole, pieces, other = (engine.open(slot) for slot in range(3))
    feed(engine, whole, ids)
    for start in range(0, len(ids), 5):
        feed(engine, pieces, ids[start:start + 5])
        engine.logits(pieces)
        feed(engine, other, ids_of(4, seed=start))
    assert_same(engine.export(pieces), engine.export(whole))


@pytest.mark.parametrize("on", ["llama", "gpt-oss"])
@pytest.mark.thorough(but=1)
def test_law_3_exact_while_it_fits(triton, on: str):
    ids = ids_of(UNITS)
    engine = engine_of("locret", on)
    state, rows = engine.open(0), []
    for start in (0, 5, 6, 7):  # in pieces of 5, 1, 1 and the rest
        feed(engine, state, ids[start:{0: 5, 5: 6, 6: 7}.get(start, UNITS)])
        rows.append(engine.logits(state))
    expected = stock_logits(model(on), ids)[[4, 5, 6, UNITS - 1]]
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", ["lfm2", "deepseek-v3", "mimo", "gemma4-e2b", "gemma4-moe"])
@pytest.mark.thorough(but=1)
def test_other_kinds_of_layers_are_exact_while_it_fits(triton, on: str, monkeypatch):
    """Layers that share units, carry a state, keep latents, or values less wide than keys, also where kernels rotate
    keys as they load them: what is committed, and tokens one by one behind it. All of it by kernels, as no CUDA graph
    captures what the specification does."""
    for operation in ("prefill_attention", "decode_attention"):
        monkeypatch.setattr(kernels.reference, operation, None)
    ids = ids_of(UNITS)
    engine = engine_of("streaming_llm", on)
    state, rows = engine.open(0), []
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
        feed(engine, state, ids[start:stop])
        rows.append(engine.logits(state))
    expected = stock_logits(model(on), ids)[[8, 9, 10, 11]]
    torch.testing.assert_close(torch.stack(rows), expected, rtol=2e-5, atol=2e-5)


def test_a_latent_is_loaded_once_for_k_and_v(triton, monkeypatch):
    """The kernels see by their memory that V is K: of a chunk, of some tokens, and of one."""
    cut: list[dict[str, int]] = []
    for operation in ("prefill_attention", "decode_attention"):
        module = importlib.import_module(f"locret_stream.kernels.triton.{operation}")
        monkeypatch.setattr(module, "tiles_of", lambda *args, real=module.tiles_of, **more: cut.append(
            real(*args, **more)) or cut[-1])
    engine = engine_of("streaming_llm", "deepseek-v3")
    state = engine.open(0)
    feed(engine, state, ids_of(CHUNK))
    for count in (3, 1):
        feed(engine, state, ids_of(count))
        engine.logits(state)
    assert len(cut) == 3 * engine.shape.layers and all(tiles["TIED"] for tiles in cut)


@pytest.mark.parametrize("on", ["llama", "gpt-oss"])
@pytest.mark.thorough
def test_a_focus_stands_in_front(triton, on: str):
    """Exact while it fits; the state is the same for any pieces, after a replacement, and when loaded."""
    engine, query, ids = engine_of("h2o", on), ids_of(4, seed=7), ids_of(2 * CHUNK + 3)
    states = [engine.open(slot) for slot in range(3)]
    for state, step in zip(states, (5, 3), strict=False):
        engine.focus(state, query)
        for start in range(0, len(ids), step):
            feed(engine, state, ids[start:start + step])
        engine.focus(state, query[:2])
        feed(engine, state, ids[:CHUNK])
        engine.logits(state)
    assert states[0].focus == query[:2]
    assert_same(engine.export(states[1]), engine.export(states[0]))
    assert_same(engine.export(engine.load(engine.export(states[0]), 2)), engine.export(states[0]))
    if on == "llama":
        state = engine.open(1)
        engine.focus(state, query)
        feed(engine, state, ids[:UNITS - len(query)])
        expected = stock_logits(model(on), query + ids[:UNITS - len(query)])[-1]
        torch.testing.assert_close(engine.logits(state), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("on", "policy"), [("llama", "locret"), ("gemma3", "locret"), ("deepseek-v3", "keydiff"),
                                            ("mimo", "keydiff")])
@pytest.mark.thorough
def test_law_2_a_step_together_agrees_with_steps_alone(triton, on: str, policy: str):
    engine = engine_of(policy, on)
    states, alone = [], []
    for slot, length in ((2, 3), (0, 26)):
        single = engine.open(1)
        feed(engine, single, ids_of(length))
        rows = []
        for token in (7, 8, 9):
            rows.append(engine.logits(single))
            feed(engine, single, [token])
        alone.append((torch.stack(rows), engine.export(single)))
        states.append(engine.open(slot))
        feed(engine, states[-1], ids_of(length))
    seen: list[list[torch.Tensor]] = [[], []]
    for token in (7, 8, 9):
        asked = [NextToken(state, lambda logits, n=n, token=token: seen[n].append(logits.clone()) or token)
                 for n, state in enumerate(states)]
        assert engine.decode(asked) == [token, token]
        for state in states:
            feed(engine, state, [])
    for n, (rows, export) in enumerate(alone):
        torch.testing.assert_close(torch.stack(seen[n]), rows, rtol=1e-5, atol=1e-5)
        assert_same(engine.export(states[n]), export)


@pytest.mark.parametrize(("kernels_say", "interpret", "said"), [("cuda", "1", "expected 'torch', 'triton'"),
                                                                ("triton", "0", "TRITON_INTERPRET=1")])
def test_a_dispatch_that_cannot_be_is_refused(monkeypatch, kernels_say: str, interpret: str, said: str):
    monkeypatch.setenv("LOCRET_KERNELS", kernels_say)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(ConfigError, match=said):
        kernels.select_units(torch.zeros(1, 4), 2)


# Policies that need no kernel which locret, scissorhands or full does not need as well.
ALIKE = ("h2o", "streaming_llm", "[random]", "keydiff", "sirllm", "nacl", "snapkv", "tova", "infllm", "kvzap", "trimkv")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_laws.py", "test_decoding.py"])
def test_every_law_holds_in_triton(file: str):
    env = os.environ | {"LOCRET_KERNELS": "triton", "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT),
                        "OMP_NUM_THREADS": "1", "LOCRET_TEST_FEWER": "10"}
    done = run_python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(ALIKE)})",
                      Path(__file__).parent / file, env=env, timeout_s=SLOW_LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
