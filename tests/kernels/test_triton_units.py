"""Triton's kernels of units against the reference: on CUDA where there is one, else in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="triton is not installed")

from locret_stream.kernels.triton import compact_units as compact_file  # noqa: E402
from locret_stream.kernels.triton import rotate_halves as rotate_file  # noqa: E402
from locret_stream.kernels.triton import score_units as score_file  # noqa: E402
from locret_stream.kernels.triton import select_units as select_file  # noqa: E402
from locret_stream.kernels.triton import write_units as write_file  # noqa: E402

select_units, compact_units, score_units, rotate_halves, write_units = (file.__dict__[name] for file, name in (
    (select_file, "select_units"), (compact_file, "compact_units"), (score_file, "score_units"),
    (rotate_file, "rotate_halves"), (write_file, "write_units")))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
awkward = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, -1.0, 1e-45, -1e-45, 3e38])
score = st.one_of(awkward, st.floats(width=32))


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit at random: NaN with payloads, infinities, subnormals, -0."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=noise(seed))
    return raw.view(dtype).to(DEVICE)


# --- select_units


def check_select(scores: torch.Tensor, budget: int, sinks: int = 0, stabilizers: int = 0) -> None:
    found = select_units(scores, budget, sinks, stabilizers)
    expected = reference.select_units(scores, budget, sinks, stabilizers)
    assert found.dtype == torch.int64 and found.shape == expected.shape
    assert torch.equal(found, expected)


@settings(max_examples=25)
@given(st.data())
@pytest.mark.thorough
def test_select_units_of_awkward_scores(data):
    values = data.draw(st.lists(score, min_size=1, max_size=40))
    budget = data.draw(st.integers(1, len(values) + 1))
    sinks = data.draw(st.integers(0, budget))
    stabilizers = data.draw(st.integers(0, budget - sinks))
    other = data.draw(st.permutations(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_file, "_BLOCK", data.draw(st.sampled_from([16, 4096])))
        check_select(torch.tensor([values, other], device=DEVICE), budget, sinks, stabilizers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "N", "B"), [(1, 2, 1), (3, 255, 254), (2, 257, 1), (5, 300, 100), (2, 5003, 4111)])
@pytest.mark.thorough(but=3)
def test_select_units_of_any_bits_and_sizes(dtype: torch.dtype, H: int, N: int, B: int):
    check_select(any_bits((H, N), dtype, N), B, min(3, B // 2), min(5, B // 2))


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.thorough
def test_select_units_takes_the_newest_of_equals(levels: int, monkeypatch):
    """Ties on both sides of a block's edge, and of the protected units."""
    monkeypatch.setattr(select_file, "_BLOCK", 64)
    scores = torch.randint(0, levels, (2, 150), generator=noise(levels)).float().to(DEVICE)
    for budget in (65, 149):
        check_select(scores, budget)
        check_select(scores, budget, sinks=budget // 3, stabilizers=budget // 2)
    check_select(scores[:1], 70, stabilizers=70)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, -0.0])
@pytest.mark.thorough(but=2)
def test_select_units_of_one_score(value: float):
    scores = torch.full((1, 300), value, device=DEVICE)
    check_select(scores, 7, sinks=4, stabilizers=3)
    scores[:, 100:150] = 0.0
    check_select(scores, 60, sinks=1)
    check_select(scores, 200, stabilizers=1)


def test_select_units_finds_a_threshold_at_every_bit():
    """Neighbouring floats of every exponent and sign: each of the 32 bits decides somewhere."""
    bits = torch.arange(0, 2**31, 2**21 + 1, dtype=torch.int64)
    bits = torch.cat([bits, bits + 1, bits + 2**31, bits + 2**31 + 1])
    bits = bits[torch.randperm(len(bits), generator=noise(0))]
    scores = torch.where(bits < 2**31, bits, bits - 2**32).int().view(torch.float32)[None].to(DEVICE)
    for budget in (1, 1023, 2048, 2049, scores.shape[1] - 1):
        check_select(scores, budget)


def test_select_units_reads_strided_scores_and_nothing_else():
    around = torch.full((4, 700), math.inf, device=DEVICE)
    values = torch.randn(2, 300, generator=noise(1)).to(DEVICE)
    views = [around[1:3, 100:400], around[::2, :600:2], around.t()[50:350, 1:3].t()]
    for view in views:
        around.fill_(math.inf)
        view.copy_(values)
        before = around.clone()
        check_select(view, 123, 2, 3)
        assert torch.equal(around, before)


@pytest.mark.parametrize("budget", [5, 6, 100])
def test_select_units_keeps_everything_that_fits(budget: int):
    check_select(torch.randn(3, 5, generator=noise(2)).to(DEVICE), budget, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("H", "N", "B"), [(8, 10_240, 6_144), (3, 100_003, 65_537), (2, 300_001, 299_999)])
def test_select_units_of_many(H: int, N: int, B: int):
    check_select(torch.randn(H, N, generator=noise(N)).to(DEVICE), B, 4, 2500)
    check_select(any_bits((H, N), torch.float32, N), B)
    check_select(torch.randn(H, N, generator=noise(N)).round().to(DEVICE), B)


# --- compact_units


def some_ranks(heads: int, count: int, budget: int) -> torch.Tensor:
    draws = [torch.randperm(count, generator=noise(head))[:budget].sort().values for head in range(heads)]
    return torch.stack(draws).to(DEVICE)


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.dtype.itemsize])


def check_compact(tensors: list[torch.Tensor], keep: torch.Tensor, scratch: torch.Tensor) -> None:
    """Each tensor is a view [1, :, 1:-2] of a pool [S, H, C, ...], of which nothing else may change."""
    budget = keep.shape[1]
    pools, ranks = [pool.clone() for pool in tensors], keep.clone()
    assert compact_units([pool[1, :, 1:-2] for pool in tensors], keep, scratch) is None
    assert torch.equal(keep, ranks)
    for pool, before in zip(tensors, pools, strict=True):
        old = before[1, :, 1:-2]
        expected = torch.stack([as_bits(old[head])[keep[head]] for head in range(keep.shape[0])])
        assert torch.equal(as_bits(pool[1, :, 1:-2])[:, :budget], expected)
        for part in (lambda x: x[0], lambda x: x[2:], lambda x: x[1, :, :1], lambda x: x[1, :, -2:]):
            assert torch.equal(as_bits(part(pool)), as_bits(part(before)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.float64, torch.int32, torch.uint8])
@pytest.mark.parametrize(("H", "N", "D", "B"), [(2, 63, 80, 17), (3, 7, 1, 7), (1, 40, 301, 39), (2, 9, 64, 1)])
def test_compact_units_moves_bits(dtype: torch.dtype, H: int, N: int, D: int, B: int):
    scratch = torch.full((H * B * D * dtype.itemsize + 3,), 0xA5, dtype=torch.uint8, device=DEVICE)
    check_compact([any_bits((3, H, N + 3, D), dtype, N + D)], some_ranks(H, N, B), scratch)


def test_compact_units_of_tensors_of_different_kinds():
    """As the store has them: keys, values, scores, positions; rows of two dimensions, and rows that lie apart."""
    shape = (3, 2, 45)
    tensors = [any_bits((*shape, 6), torch.bfloat16, 0), any_bits((*shape, 2), torch.float32, 1),
               any_bits(shape, torch.float32, 2), any_bits(shape, torch.int64, 3), any_bits(shape, torch.uint8, 4),
               any_bits((*shape, 5, 3), torch.float16, 5), any_bits((*shape, 16), torch.bfloat16, 6)[..., 2:8]]
    scratch = torch.empty(2 * 30 * 30, dtype=torch.uint8, device=DEVICE)
    check_compact(tensors, some_ranks(2, 42, 30), scratch)


def test_compact_units_in_more_programs_than_one_a_head():
    tensors = [any_bits((2, 2, 2603), torch.int16, 0), any_bits((2, 2, 2603, 3), torch.int16, 1)]
    check_compact(tensors, some_ranks(2, 2600, 2100), torch.empty(2 * 2100 * 6, dtype=torch.uint8, device=DEVICE))


def test_compact_units_takes_strided_ranks():
    ranks, scratch = some_ranks(2, 60, 40), torch.empty(2 * 40 * 20, dtype=torch.uint8, device=DEVICE)
    for keep in (ranks[:, ::2], ranks.t().contiguous().t(), ranks[:, 5:], ranks[:1].expand(2, 40), ranks[:, :0]):
        check_compact([any_bits((2, 2, 63, 10), torch.bfloat16, 6)], keep, scratch)


@pytest.mark.parametrize("start", [0, 1, 2, 4, 8])
@pytest.mark.parametrize(("D", "offset"), [(128, 0), (4, 4), (6, 0), (5, 0), (4, 1)])
def test_compact_units_moves_the_widest_words_that_fit(D: int, offset: int, start: int):
    """Rows of D and a pool that begins `offset` elements and a scratch that begins `start` bytes into its storage."""
    store = any_bits((offset + 2 * 2 * 23 * D,), torch.bfloat16, D)
    scratch = torch.empty(2 * 9 * D * 2 + start, dtype=torch.uint8, device=DEVICE)[start:]
    pool = store[offset:].view(2, 2, 23, D)
    limits = (D * 2, offset * 2, start, 8)
    assert compact_file._word(pool[1, :, 1:-2], scratch) == math.gcd(*limits)
    check_compact([pool], some_ranks(2, 20, 9), scratch)


def test_compact_units_addresses_more_than_2_to_the_31():
    """Offsets of head 2 pass 2^31 although no stride does. Only the pages that are touched are ever resident."""
    store = torch.empty(2**31 + 100, dtype=torch.int8, device=DEVICE)
    view = store.as_strided((3, 20, 5), (2**30, 5, 1))
    view.copy_(any_bits((3, 20, 5), torch.int8, 0))
    keep, before = some_ranks(3, 20, 11), view.clone()
    compact_units([view], keep, torch.empty(3 * 11 * 5, dtype=torch.uint8, device=DEVICE))
    assert torch.equal(view[:, :11], torch.stack([before[head][keep[head]] for head in range(3)]))


# --- score_units

# Largest error against float64, in units of the largest score. In half precision what the reference itself may lose:
# the hidden layer (three times in "cublas") and the activation are rounded, and the scores are not.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 1.5e-3}


def head_inputs(dtype: torch.dtype, H: int, G: int, T: int, D: int, W: int):
    random = noise(T + W)
    q, k, v = (torch.randn(T, n, D, generator=random).to(dtype).to(DEVICE).transpose(0, 1) for n in (H * G, H, H))
    fc1, fc2 = torch.randn(W, (G + 2) * H * D, generator=random), torch.randn(H, W, generator=random)
    biases = [torch.randn(n, generator=random).to(dtype).to(DEVICE) for n in (W, H)]
    fc1 /= math.sqrt(fc1.shape[1]) / 2
    return q, k, v, fc1.to(dtype).to(DEVICE), (fc2 / math.sqrt(W)).to(dtype).to(DEVICE), biases


def exactly(q, k, v, fc1, fc2, act, bias1=None, bias2=None) -> torch.Tensor:
    wide = [None if t is None else t.to(fc1.dtype).double() for t in (q, k, v, fc1, fc2, bias1, bias2)]
    x = torch.cat([t.transpose(0, 1).flatten(1) for t in wide[:3]], dim=-1)
    return F.linear(act(F.linear(x, wide[3], wide[5])), wide[4], wide[6]).t()


def check_score(*args) -> None:
    found, expected = score_units(*args), exactly(*args)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[args[3].dtype]


@pytest.fixture(params=["cublas", "fused"])
def variant(request, monkeypatch) -> str:
    monkeypatch.setattr(score_file, "VARIANT", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G", "T", "D", "W"), [(2, 3, 70, 10, 131), (1, 1, 1, 1, 1), (17, 1, 131, 5, 260),
                                                     (2, 4, 19, 80, 33)])
@pytest.mark.thorough(but=4)
def test_score_units_of_any_sizes(dtype: torch.dtype, H: int, G: int, T: int, D: int, W: int, variant: str):
    q, k, v, fc1, fc2, biases = head_inputs(dtype, H, G, T, D, W)
    check_score(q, k, v, fc1, fc2, torch.nn.SiLU(), *biases)


def test_score_units_takes_any_biases(variant: str):
    q, k, v, fc1, fc2, (bias1, bias2) = head_inputs(torch.float32, 2, 2, 9, 8, 70)
    check_score(q, k, v, fc1, fc2, F.silu)
    check_score(q, k, v, fc1, fc2, F.silu, bias1)
    check_score(q, k, v, fc1, fc2, F.silu, None, bias2)


@pytest.mark.parametrize("width", [5, 0])
def test_score_units_of_values_of_another_width_or_none(width: int, variant: str):
    q, k, v, fc1, fc2, biases = head_inputs(torch.float32, 2, 2, 20, 12, 40)
    check_score(q, k, v[..., :width], fc1[:, :6 * 12 + 2 * width], fc2, F.silu, *biases)


def test_score_units_of_strided_inputs(variant: str):
    q, k, v, fc1, fc2, biases = head_inputs(torch.float32, 2, 3, 33, 10, 40)
    every_other = torch.full((33, 6, 20), math.nan, device=DEVICE).transpose(0, 1)[..., ::2]
    part = torch.full((8, 40, 12), math.nan, device=DEVICE)[1:7, 3:36, 1:11]
    for view in (q.contiguous(), every_other.copy_(q), part.copy_(q), q.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        check_score(view, k.contiguous(), v, fc1, fc2, F.silu, *biases)
    weights = torch.full((41, 200), math.nan, device=DEVICE)[1:, 7:107].copy_(fc1), fc2.t().contiguous().t()
    check_score(q, k, v.contiguous(), *weights, F.silu, *biases)
    check_score(q, k, v, fc1.t().contiguous().t(), fc2, F.silu, *biases)


@pytest.mark.parametrize(("dtype", "weights"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
                                                (torch.float16, torch.bfloat16)])
def test_score_units_works_in_the_weights_dtype(dtype: torch.dtype, weights: torch.dtype, variant: str):
    q, k, v, fc1, fc2, _ = head_inputs(torch.float32, 2, 2, 20, 12, 40)
    check_score(*(t.to(dtype) for t in (q, k, v)), fc1.to(weights), fc2.to(weights), F.silu)


@pytest.mark.parametrize("act", [torch.nn.Tanh(), torch.nn.LeakyReLU(0.3), lambda x: x * x.sigmoid() ** 2, torch.sin])
def test_score_units_of_an_activation_it_does_not_know(act, variant: str):
    q, k, v, fc1, fc2, biases = head_inputs(torch.float32, 2, 2, 20, 12, 40)
    assert score_file._name(act) is None
    check_score(q, k, v, fc1, fc2, act, *biases)


def test_fused_score_units_round_less_than_the_reference(monkeypatch):
    """In fp16: Triton's interpreter truncates to bf16 where a GPU rounds."""
    monkeypatch.setattr(score_file, "VARIANT", "fused")
    q, k, v, fc1, fc2, biases = head_inputs(torch.float16, 2, 4, 150, 16, 300)
    args = (q, k, v, fc1, fc2, F.silu, *biases)
    expected = exactly(*args)
    assert (score_units(*args) - expected).std() < (reference.score_units(*args) - expected).std()


def test_score_units_keeps_tokens_apart(variant: str):
    q, k, v, fc1, fc2, biases = head_inputs(torch.float32, 2, 2, 70, 8, 70)
    before = score_units(q, k, v, fc1, fc2, F.silu, *biases)
    assert torch.equal(score_units(q, k, v, fc1, fc2, F.silu, *biases), before)
    v[1, 66, 7] = math.nan
    after = score_units(q, k, v, fc1, fc2, F.silu, *biases)
    assert after[:, 66].isnan().all()
    rest = [*range(66), *range(67, 70)]
    assert torch.allclose(after[:, rest], before[:, rest], rtol=1e-5, atol=1e-6)


ACTIVATIONS = {"silu": ["silu", "swish", F.silu], "relu": ["relu", F.relu, torch.relu],
               "gelu": ["gelu", torch.nn.GELU(), F.gelu],
               "gelu_tanh": ["gelu_pytorch_tanh", torch.nn.GELU(approximate="tanh")]}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch_and_transformers(name: str):
    from transformers.activations import ACT2FN
    grid = torch.cat([torch.linspace(-12, 12, 301), torch.tensor([0.0, -0.0, 1e-30, -90.0, 1000.0, -1000.0, math.nan])])
    hidden = grid[:, None].to(DEVICE)
    found = score_file._project(hidden, torch.ones(1, 1, device=DEVICE), name, None)[0]
    for act in ACTIVATIONS[name]:
        act = ACT2FN[act] if isinstance(act, str) else act
        assert score_file._name(act) == name
        assert torch.allclose(found, act(hidden)[:, 0], rtol=2e-6, atol=2e-6, equal_nan=True)


# --- rotate_halves


def turned_exactly(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return reference.rotate_halves(x.double(), cos.double(), sin.double())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("B", "H", "T", "D"), [(1, 1, 1, 2), (1, 3, 70, 16), (3, 2, 1, 20), (2, 5, 33, 128)])
@pytest.mark.thorough(but=4)
def test_rotate_halves_rounds_once(dtype: torch.dtype, B: int, H: int, T: int, D: int, monkeypatch):
    """With tables of ranks, of contexts and of units; of strided tensors; into one that is given."""
    monkeypatch.setattr(rotate_file, "_TILE", 512)
    x = torch.randn(B, T, H, D, generator=noise(1)).to(DEVICE, dtype).transpose(1, 2)
    out = torch.full((B, T, H, 2 * D), math.nan, device=DEVICE, dtype=dtype).transpose(1, 2)[..., :D]
    for shape in ((1, 1, T, D), (B, 1, 1, D), (B, H, T, D)):
        cos, sin = (torch.randn(shape, generator=noise(seed)).to(DEVICE, dtype) for seed in (2, 3))
        found, exact = rotate_halves(x, cos, sin), turned_exactly(x, cos, sin)
        assert found.dtype == dtype and found.shape == x.shape
        if dtype.itemsize < 4:  # the products of two such numbers are exact in fp32: one rounding, and that of the sum
            truncated = dtype == torch.bfloat16 and DEVICE == "cpu"  # by the interpreter
            rounding = torch.finfo(dtype).eps * (1 if truncated else 0.5)
            torch.testing.assert_close(found.double(), exact, rtol=1.001 * rounding, atol=1e-6)
        else:
            close = 1e-6 if dtype == torch.float32 else 1e-14
            torch.testing.assert_close(found.double(), exact, rtol=close, atol=close)
        assert torch.equal(rotate_halves(x, cos, sin, out), found) and torch.equal(out, found)


def test_rotate_halves_of_one_token_gives_the_bits_of_many():
    x = torch.randn(1, 4, 50, 32, generator=noise(1)).to(DEVICE)
    cos, sin = (torch.randn(1, 1, 50, 32, generator=noise(seed)).to(DEVICE) for seed in (2, 3))
    whole = rotate_halves(x, cos, sin)
    for t in (0, 7, 49):
        one, *turns = (part[:, :, t:t + 1] for part in (x, cos, sin))
        assert torch.equal(rotate_halves(one, *turns), whole[:, :, t:t + 1])


def test_rotate_halves_writes_nothing_else():
    out = torch.full((2, 3, 9, 12), 7.0, device=DEVICE)
    x = torch.randn(2, 3, 5, 6, generator=noise(1)).to(DEVICE)
    table = torch.ones(1, 1, 5, 6, device=DEVICE)
    rotate_halves(x, table, table, out[:, :, 2:7, 3:9])
    out[:, :, 2:7, 3:9] = 7
    assert (out == 7).all()
    assert rotate_halves(x[:, :, :0], table[:, :, :0], table[:, :, :0]).shape == (2, 3, 0, 6)


# --- write_units


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_write_units_moves_bits_and_writes_nothing_else(dtype: torch.dtype, count: int):
    S, H, C, A, dims = 5, 3, 11, 4, (20, 12, 33)[:count]  # V may have another width than K
    tensors = [any_bits((S, H, C, D), dtype, D) for D in dims]
    units = [any_bits((A, 1, H, D), dtype, 10 + D).transpose(1, 2) for D in dims]
    slots, ranks = torch.tensor([[3, 0], [0, 10], [4, 5], [1, 5]], device=DEVICE).unbind(1)
    expected = [x.clone() for x in tensors]
    reference.write_units(expected, units, slots, ranks)
    write_units(tensors, units, slots, ranks)
    word = BITS[dtype.itemsize]
    for found, whole in zip(tensors, expected, strict=True):
        assert torch.equal(found.view(word), whole.view(word))


# --- what only a GPU can say


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_all_can_be_captured():
    """No host synchronisation and nothing that depends on data: a replay on new inputs gives the new results."""
    q, k, v, fc1, fc2, _ = head_inputs(torch.bfloat16, 2, 4, 300, 64, 256)
    scratch, pool = torch.empty(2 * 100 * 64 * 2, dtype=torch.uint8, device=DEVICE), k.contiguous()

    table = torch.rand(1, 1, 300, 64, device=DEVICE, dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        scores = score_units(q, k, v, fc1, fc2, F.silu)
        keep = select_units(scores, 100, 2, 3)
        compact_units([pool], keep, scratch)
        return scores, keep, rotate_halves(k[None], table, table)

    for variant in ("cublas", "fused"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(score_file, "VARIANT", variant)
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
            q.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
            pool.copy_(k)
            graph.replay()
            scores, keep, turned = (t.clone() for t in captured)
            assert torch.equal(turned, rotate_halves(k[None], table, table))
            torch.testing.assert_close(scores, score_units(q, k, v, fc1, fc2, F.silu))
            assert torch.equal(keep, reference.select_units(scores, 100, 2, 3))
            assert torch.equal(pool[:, :100], torch.stack([k[head][keep[head]] for head in range(2)]))
