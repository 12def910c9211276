"""Triton's attention against the numeric specification: under Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="triton is not installed")

from locret_stream.kernels import reference  # noqa: E402
from locret_stream.kernels.triton import decode_attention as decode_module  # noqa: E402
from locret_stream.kernels.triton import prefill_attention as prefill_module  # noqa: E402
from locret_stream.kernels.triton.decode_attention import decode_attention  # noqa: E402
from locret_stream.kernels.triton.prefill_attention import prefill_attention  # noqa: E402
from locret_stream.kernels.triton.reduced_attention import reduced_attention  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Outputs are rounded to the dtype, and so are the weights on their way into the product with V; to bf16 the
# interpreter truncates.
OUT = {F32: 1e-5, F16: 2e-3, BF16: 1e-2 if DEVICE == "cuda" else 2e-2}
# Log-sum-exps and column sums stay in fp32 behind exact products.
SUMS = {F32: 1e-5, F16: 1e-4, BF16: 1e-4}


def noise(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.to(DEVICE, dtype)


def pool(shape: tuple[int, int, int, int], dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    """[S, H, C, D] full of NaN; `turned`: [S, C, H, D] in memory."""
    S, H, C, D = shape
    if turned:
        return torch.full((S, C, H, D), float("nan"), dtype=dtype, device=DEVICE).transpose(1, 2)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def slot_of(x: Tensor, *, turned: bool = False) -> Tensor:
    """x [H, N, D] as a view of the middle slot of a larger pool, NaN all around."""
    H, N, D = x.shape
    big = pool((3, H, N + 3, D), x.dtype, turned=turned)
    view = big[1, :, :N]
    view.copy_(x)
    return view


def rows_of(x: Tensor) -> Tensor:
    """x [H*G, T, D] with the memory of a projection: [T, H*G, D]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def options(G: int, H: int, dtype: torch.dtype, window: int | None, softcap: float | None, sink_logits: bool) -> dict:
    return {"window": window, "softcap": softcap,
            "sink_logits": noise(H * G, dtype=dtype, seed=9) * 2 if sink_logits else None}


def check_prefill(T, N, H, G, D, dtype, window, softcap, sink_logits):
    q = rows_of(noise(H * G, T, D, dtype=dtype, seed=1))
    k = slot_of(noise(H, N, D, dtype=dtype, seed=2) * 2)
    v = slot_of(noise(H, N, D, dtype=dtype, seed=3), turned=True)
    extra = options(G, H, dtype, window, softcap, sink_logits)
    out, lse = prefill_attention(q, k, v, D**-0.5, **extra)
    expected, total = reference.prefill_attention(q, k, v, D**-0.5, **extra)
    assert out.shape == q.shape and out.transpose(0, 1).is_contiguous()
    close(out, expected, OUT[dtype])
    close(lse, total, SUMS[dtype])


@pytest.mark.parametrize(("T", "N", "H", "G", "D", "dtype", "window", "softcap", "sink_logits"), [
    (1, 1, 1, 1, 1, F32, None, None, False),
    (1, 65, 1, 4, 8, F32, None, None, True),
    (35, 101, 2, 2, 20, F32, None, None, False),
    (33, 97, 1, 1, 33, F32, 7, None, False),
    (40, 133, 1, 1, 16, F32, 70, 3.0, True),
    (34, 66, 1, 5, 5, F32, 1, None, False),
    (64, 128, 1, 1, 16, F32, 32, None, False),
    (18, 40, 1, 2, 130, F32, 24, None, True),
    (67, 200, 1, 1, 80, BF16, None, 5.0, False),
    (66, 210, 1, 3, 24, BF16, 100, None, True),
    (9, 140, 1, 2, 40, F16, 66, None, False),
    (20, 70, 1, 2, 136, F16, None, None, False),
])
@pytest.mark.thorough(but=2)
def test_prefill(T, N, H, G, D, dtype, window, softcap, sink_logits):
    check_prefill(T, N, H, G, D, dtype, window, softcap, sink_logits)


@pytest.mark.parametrize("D", [16, 128])
@pytest.mark.slow
def test_tall_tiles_of_prefill(D: int):
    """132 heads: blocks of 128 rows on the fast path."""
    check_prefill(130, 200, 66, 2, D, BF16, 150, None, False)
    check_prefill(130, 700, 66, 2, D, BF16, None, None, False)


@pytest.fixture
def described(monkeypatch) -> list[Tensor]:
    """Tiles are loaded by descriptors, as on a Hopper, also by the interpreter; the tensors that were described."""
    seen: list[Tensor] = []
    real = prefill_module.TensorDescriptor.from_tensor
    monkeypatch.setattr(prefill_module.TensorDescriptor, "from_tensor", staticmethod(
        lambda x, *args: seen.append(x) or real(x, *args)))
    if DEVICE == "cpu":
        monkeypatch.setattr(prefill_module, "_copy_engine", lambda device: True)
    elif torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this card has no copy engine that reads tiles")
    return seen


@pytest.mark.parametrize(("T", "N", "H", "G", "D", "dtype", "window", "softcap", "sink_logits"), [
    (40, 233, 2, 2, 16, F16, None, None, False),
    (67, 300, 1, 2, 64, BF16, 150, None, True),
    (30, 170, 2, 1, 32, F16, None, 4.0, False),
    (9, 200, 3, 1, 128, BF16, None, None, False),
])
@pytest.mark.thorough(but=2)
def test_prefill_by_descriptors(T, N, H, G, D, dtype, window, softcap, sink_logits, described):
    check_prefill(T, N, H, G, D, dtype, window, softcap, sink_logits)
    assert len(described) == 2


def test_units_that_no_descriptor_can_describe_are_loaded_by_pointers(described):
    def views(seed: int) -> tuple[Tensor, ...]:
        between = noise(2, 100, 24, dtype=F16, seed=seed)[..., 4:20]  # rows 16 bytes apart, and none at such an address
        return (noise(2, 100, 20, dtype=F16, seed=seed), noise(2, 100, 17, dtype=F16, seed=seed)[..., 1:],
                noise(2, 16, 100, dtype=F16, seed=seed).mT, noise(2, 100, 16, seed=seed), between)

    for k, v in zip(views(2), views(3), strict=True):
        q = noise(2, 5, k.shape[2], dtype=k.dtype, seed=1)
        close(prefill_attention(q, k, v, 0.2)[0], reference.prefill_attention(q, k, v, 0.2)[0], 5e-3)
    assert not described


@pytest.mark.parametrize(("major", "memory", "has"), [(9, 227, True), (8, 227, False), (12, 99, False)])
def test_only_cards_with_a_copy_engine_and_room_for_its_tiles_use_descriptors(major, memory, has, monkeypatch):
    card = SimpleNamespace(major=major, shared_memory_per_block_optin=memory << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    decide = prefill_module._copy_engine.__wrapped__
    assert decide(torch.device("cuda:0")) is has and not decide(torch.device("cpu"))


def test_prefill_of_a_negative_scale_and_of_none():
    q, k = noise(2, 40, 16, dtype=F16, seed=1), noise(2, 200, 16, dtype=F16)
    for scale in (-0.25, 0.0):
        for found, expected in zip(prefill_attention(q, k, k, scale), reference.prefill_attention(q, k, k, scale),
                                   strict=True):
            close(found, expected, 2e-3)


def check_decode(lengths, C, H, G, T, D, dtype, rope, window, softcap, sink_logits):
    A, S = len(lengths), len(lengths) + 1
    q = noise(A, T, H * G, D, dtype=dtype, seed=1).transpose(1, 2)
    keys, values = pool((S, H, C, D), dtype), pool((S, H, C, D), dtype, turned=True)
    slots = torch.arange(A, 0, -1)  # slot 0 stays garbage
    for a, length in enumerate(lengths):
        keys[slots[a], :, :length] = noise(H, length, D, dtype=dtype, seed=20 + a)
        values[slots[a], :, :length] = noise(H, length, D, dtype=dtype, seed=40 + a)
    slots, lengths = slots.to(DEVICE), torch.tensor(lengths, device=DEVICE)
    extra = options(G, H, dtype, window, softcap, sink_logits)
    if rope:
        extra |= {"cos": noise(C + 2, D, dtype=rope, seed=5).cos(), "sin": noise(C + 2, D, dtype=rope, seed=6).sin()}
    out = decode_attention(q, keys, values, slots, lengths, D**-0.5, **extra)
    expected = reference.decode_attention(q, keys, values, slots, lengths, D**-0.5, **extra)
    assert out.shape == q.shape
    close(out, expected, OUT[dtype])


@pytest.mark.parametrize("lengths, C, H, G, T, D, dtype, rope, window, softcap, sink_logits, programs", [
    ([1, 70, 33], 70, 2, 1, 1, 20, F32, None, None, None, False, None),
    ([1, 70, 33], 70, 1, 3, 1, 20, F32, F32, None, None, False, None),
    ([600], 600, 1, 1, 1, 4, F32, None, None, None, False, None),  # more splits than are combined at a time
    ([1, 9], 9, 1, 2, 1, 7, F32, None, None, None, True, None),  # one split
    ([101, 100, 1], 101, 1, 5, 1, 33, F32, None, None, 3.0, True, 1),  # one split of several blocks
    ([3, 150, 80], 150, 1, 2, 3, 16, F32, F32, None, None, True, 6),  # two splits of several blocks
    ([90, 8], 90, 1, 2, 8, 12, F32, None, 5, None, False, None),
    ([150, 64], 150, 1, 1, 4, 80, F32, F32, 71, 3.0, True, 4),
    ([8, 40], 40, 1, 9, 8, 4, F32, None, None, None, False, None),  # 72 rows: two tiles
    ([40, 5], 41, 1, 2, 1, 136, F32, F32, None, None, False, None),
    ([130, 1], 130, 2, 2, 1, 24, BF16, None, None, 5.0, True, None),
    ([1, 131], 131, 1, 4, 1, 40, BF16, BF16, None, None, False, None),
    ([131, 66], 131, 1, 2, 2, 16, BF16, F32, 70, None, True, 2),
    ([200, 3], 200, 1, 3, 2, 16, F16, F16, None, None, False, 3),
])
@pytest.mark.thorough(but=3)
def test_decode(lengths, C, H, G, T, D, dtype, rope, window, softcap, sink_logits, programs, monkeypatch):
    if programs:  # fewer splits of a context than its capacity would get
        monkeypatch.setattr(decode_module, "_PROGRAMS", programs)
    check_decode(lengths, C, H, G, T, D, dtype, rope, window, softcap, sink_logits)


@pytest.mark.parametrize("programs", [None, 3])
def test_decode_has_a_window_of_each_context(programs, monkeypatch):
    """As where layers see blocks of a stream, and contexts stand in other places of theirs."""
    if programs:
        monkeypatch.setattr(decode_module, "_PROGRAMS", programs)
    q, keys, values = noise(3, 4, 1, 16, dtype=F32, seed=1), pool((4, 2, 90, 16), F32), pool((4, 2, 90, 16), F32)
    for each in (keys, values):
        each.copy_(noise(4, 2, 90, 16, dtype=F32, seed=2))
    slots, lengths, windows = (torch.tensor(each, device=DEVICE) for each in ([2, 0, 3], [90, 7, 40], [1, 5, 33]))
    close(decode_attention(q, keys, values, slots, lengths, 0.3, window=windows),
          reference.decode_attention(q, keys, values, slots, lengths, 0.3, window=windows), OUT[F32])


@pytest.mark.parametrize("programs", [None, 3])
@pytest.mark.parametrize("extra", [{}, {"sinks": True}, {"rope": True}])
def test_decode_begins_at_the_row_of_each_context(programs, extra, monkeypatch):
    """As where the heads of a layer share its units: each is a context of one head, which begins anywhere in a slot."""
    if programs:
        monkeypatch.setattr(decode_module, "_PROGRAMS", programs)
    q, keys, values = noise(3, 4, 1, 16, dtype=F32, seed=1), pool((2, 1, 200, 16), F32), pool((2, 1, 200, 16), F32)
    slots, firsts, lengths = (torch.tensor(each, device=DEVICE) for each in ([1, 0, 1], [95, 30, 0], [90, 7, 40]))
    for slot, first, length in zip(slots.tolist(), firsts.tolist(), lengths.tolist(), strict=True):
        for each, seed in ((keys, 2), (values, 3)):
            each[slot, :, first:first + length] = noise(1, length, 16, dtype=F32, seed=seed + length)
    more = {"firsts": firsts}
    if "sinks" in extra:
        more["sink_logits"] = noise(3, 4, dtype=F32, seed=9)
    if "rope" in extra:
        more |= {"cos": noise(100, 16, dtype=F32, seed=5).cos(), "sin": noise(100, 16, dtype=F32, seed=6).sin()}
    close(decode_attention(q, keys, values, slots, lengths, 0.3, **more),
          reference.decode_attention(q, keys, values, slots, lengths, 0.3, **more), OUT[F32])


def test_decode_rounds_turned_keys_as_stored_ones():
    """cos = 1 + 2^-10 is lost in bf16: two equal logits, not 1024 and 1025."""
    q = torch.tensor([1024.0, 0.0], device=DEVICE, dtype=BF16).view(1, 1, 1, 2)
    keys = torch.tensor([1.0, 0.0], device=DEVICE, dtype=BF16).repeat(1, 1, 2, 1)
    values = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=DEVICE, dtype=BF16).view(1, 1, 2, 2)
    cos = torch.tensor([[1.0, 1.0], [1 + 2**-10, 1.0]], device=DEVICE)
    out = decode_attention(q, keys, values, torch.tensor([0], device=DEVICE), torch.tensor([2], device=DEVICE), 1.0,
                           cos=cos, sin=torch.zeros_like(cos))
    assert out.flatten().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("programs", [None, 1])
def test_decode_of_queries_that_see_nothing_is_zero(programs, monkeypatch):
    """Padding of a batch has length 0, or fewer units than queries."""
    if programs:
        monkeypatch.setattr(decode_module, "_PROGRAMS", programs)
    q, units = noise(2, 1, 2, 8), pool((2, 1, 40, 8), F32)
    units[1, :, :1] = 3.0
    out = decode_attention(q, units, units, torch.tensor([0, 1], device=DEVICE),
                           torch.tensor([0, 1], device=DEVICE), 0.4)
    assert out.flatten(1, 2).tolist() == [[[0.0] * 8] * 2, [[0.0] * 8, [3.0] * 8]]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_of_decode_holds_for_other_lengths_and_slots():
    q, keys, values = noise(2, 8, 1, 64, dtype=BF16), *(noise(4, 2, 500, 64, dtype=BF16, seed=s) for s in (1, 2))
    slots, lengths = (torch.tensor(x, device=DEVICE) for x in ([0, 1], [500, 3]))
    decode_attention(q, keys, values, slots, lengths, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, keys, values, slots, lengths, 0.1)
    for now in (([0, 1], [500, 3]), ([3, 2], [1, 257])):
        slots.copy_(torch.tensor(now[0]))
        lengths.copy_(torch.tensor(now[1]))
        graph.replay()
        close(out, reference.decode_attention(q, keys, values, slots, lengths, 0.1), OUT[BF16])


def check_reduced(ranks, N, H, G, D, dtype, softcap, sink_logits, given):
    R = len(ranks)
    q = rows_of(noise(H * G, R, D, dtype=dtype, seed=1))
    k = slot_of(noise(H, N, D, dtype=dtype, seed=2) * 2)
    ranks = torch.tensor(ranks, device=DEVICE, dtype=torch.int64)
    extra = {"softcap": softcap, "sink_logits": noise(H * G, dtype=dtype, seed=9) * 2 if sink_logits else None}
    lse = None
    if given:
        lse = reference.attention(q, k, torch.zeros_like(k), D**-0.5, ranks, **extra)[1]
        lse = torch.cat([lse, torch.full_like(lse, float("nan"))], 1)[:, :R]
    found = reduced_attention(q, k, D**-0.5, ranks, lse, **extra)
    close(found, reference.reduced_attention(q, k, D**-0.5, ranks, lse, **extra), SUMS[dtype])
    assert torch.equal(found, reduced_attention(q, k, D**-0.5, ranks, lse, **extra))
    counted = reduced_attention(q, k, D**-0.5, ranks, lse, above_mean=True, **extra)
    expected = reference.reduced_attention(q, k, D**-0.5, ranks, lse, above_mean=True, **extra)
    # Whole numbers; a row that pays just about its mean may be counted or not.
    assert torch.equal(counted, counted.round())
    assert float((counted - expected).abs().sum()) <= (0 if dtype == F32 else 0.01 * R * H * G * N)


def shuffled(N: int, R: int) -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(N))[:R].tolist()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("ranks", "N", "H", "G", "D", "dtype", "softcap", "sink_logits"), [
    (list(range(20, 75)), 75, 2, 1, 20, F32, None, True),
    ([0], 1, 1, 1, 1, F32, None, False),
    (shuffled(70, 37), 70, 1, 3, 33, F32, 3.0, False),
    (list(range(3, 60, 7)), 101, 1, 5, 7, F32, None, False),  # columns that nobody sees
    (shuffled(130, 9), 130, 1, 2, 16, F32, None, True),
    ([r % 20 for r in range(300)], 20, 1, 1, 4, F32, None, False),  # more rows than are looked through at a time
    ([4, 4, 30], 37, 1, 1, 136, F32, None, False),
    (list(range(60, 130)), 130, 1, 2, 24, BF16, None, True),
    (shuffled(90, 40), 90, 1, 2, 80, F16, None, False),
])
@pytest.mark.thorough(but=2)
def test_reduced(ranks, N, H, G, D, dtype, softcap, sink_logits, given):
    check_reduced(ranks, N, H, G, D, dtype, softcap, sink_logits, given)


def test_operands_of_different_dtypes():
    q, k, v = noise(2, 5, 16), noise(1, 40, 16, dtype=BF16), noise(1, 40, 16, dtype=F16, seed=1)
    out, lse = prefill_attention(q, k, v, 0.4)
    expected, total = reference.prefill_attention(q, k, v, 0.4)
    close(out, expected, OUT[F16])
    close(lse, total, SUMS[F32])
    ranks = torch.arange(35, 40, device=DEVICE)
    close(reduced_attention(q, k, 0.4, ranks), reference.reduced_attention(q, k, 0.4, ranks), SUMS[F32])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "window"), [(F32, None), (BF16, 200), (F16, None)])
@pytest.mark.parametrize("D", [96, 256])
def test_sizes_of_real_models(D, dtype, window):
    check_prefill(150, 500, 2, 4, D, dtype, window, None, True)
    check_decode([500, 1, 313], 500, 2, 4, 1, D, dtype, dtype, window, None, True)
    check_decode([500, 8, 313], 500, 2, 4, 8, D, dtype, None, window, 30.0, False)
    check_reduced(shuffled(500, 100), 500, 2, 4, D, dtype, None, True, given=False)
