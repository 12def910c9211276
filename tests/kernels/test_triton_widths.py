"""Triton's attention where V is not as wide as K, where units are wider than one tile, and where V is K itself, as in
latents: against the numeric specification, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from locret_stream import kernels
from locret_stream.kernels import reference
from locret_stream.kernels.triton import decode_attention as decode_module
from locret_stream.kernels.triton import prefill_attention as prefill_module
from locret_stream.kernels.triton import tiles as tiles_module
from locret_stream.kernels.triton.decode_attention import decode_attention
from locret_stream.kernels.triton.prefill_attention import prefill_attention
from locret_stream.kernels.triton.tiles import tiles_of
from tests.kernels.test_triton_attention import (
    BF16,
    DEVICE,
    F16,
    F32,
    OUT,
    SUMS,
    check_reduced,
    close,
    described,
    noise,
    options,
    pool,
    rows_of,
    shuffled,
    slot_of,
)

assert described, "a fixture"
TIED = 0  # in place of the width of V: V is K


def cut_at(monkeypatch: pytest.MonkeyPatch, one_tile: int | None) -> None:
    """Two tiles from fewer features on, so that small units have them, too."""
    if one_tile:
        monkeypatch.setattr(tiles_module, "ONE_TILE", one_tile)


@pytest.mark.parametrize(("K", "V", "cut"), [
    (16, 16, (16, 0, 16, 0)), (192, 128, (192, 0, 128, 0)), (256, 12, (256, 0, 12, 0)), (288, TIED, (256, 32, 256, 32)),
    (576, TIED, (512, 64, 512, 64)), (512, 512, (512, 0, 512, 0)), (257, 300, (256, 1, 256, 44)),
])
def test_units_are_cut_into_a_power_of_two_and_what_is_left(K, V, cut):
    keys = noise(1, 2, K)
    values = keys[:] if V == TIED else noise(1, 2, V, seed=1)
    tiles = tiles_of(keys, values)
    assert tuple(tiles[name] for name in ("D", "REST", "V", "V_REST")) == cut and tiles["TIED"] is (V == TIED)
    assert all(tiles[f"BLOCK_{name}"] >= tiles[name] for name in ("D", "REST", "V", "V_REST"))


def test_only_one_memory_seen_in_one_way_is_both_k_and_v():
    keys = noise(2, 9, 9)
    assert tiles_of(keys, keys)["TIED"] and tiles_of(keys[:, :4], keys[:, :4])["TIED"]
    for values in (keys.clone(), keys[..., :8], keys[:, :8], keys.mT, keys.flatten()[9:153].view(2, 8, 9)):
        assert not tiles_of(keys, values)["TIED"]
    assert not tiles_of(keys, keys, whole=True)["TIED"], "keys are rotated as they are read, and values are not"


def check_prefill(T, N, H, G, K, V, dtype, window, softcap, sink_logits):
    q = rows_of(noise(H * G, T, K, dtype=dtype, seed=1))
    k = slot_of(noise(H, N, K, dtype=dtype, seed=2) * 2)
    v = k[:] if V == TIED else slot_of(noise(H, N, V, dtype=dtype, seed=3), turned=True)
    extra = options(G, H, dtype, window, softcap, sink_logits)
    out, lse = prefill_attention(q, k, v, K**-0.5, **extra)
    expected, total = reference.prefill_attention(q, k, v, K**-0.5, **extra)
    assert out.shape == (H * G, T, V or K) and out.transpose(0, 1).is_contiguous()
    close(out, expected, (2 if V == TIED else 1) * OUT[dtype])  # keys, here twice as large, are values
    close(lse, total, SUMS[dtype])


@pytest.mark.parametrize(("T", "N", "H", "G", "K", "V", "dtype", "window", "softcap", "sink_logits", "one_tile"), [
    (20, 70, 2, 2, 24, 16, F32, None, None, False, None),
    (5, 40, 1, 4, 576, TIED, BF16, None, None, False, None),
    (17, 70, 1, 1, 40, TIED, F16, 24, 3.0, True, 32),  # 32 + 8
    (9, 50, 1, 16, 40, TIED, F32, None, None, False, 32),
    (33, 80, 1, 2, 16, 12, F16, 40, None, True, None),
    (35, 90, 1, 2, 12, 24, BF16, None, 3.0, False, 16),  # V is the wider one, 16 + 8
    (18, 100, 2, 1, 192, 128, BF16, None, None, False, None),
    (70, 200, 1, 2, 192, 128, F16, 70, None, True, None),
    (20, 40, 1, 3, 192, 128, F32, None, None, False, None),
    (40, 90, 1, 1, 40, 40, F16, 50, None, False, 32),  # two tensors
    (70, 150, 1, 2, 40, TIED, BF16, None, None, False, 32),
    (20, 80, 1, 4, 288, TIED, F16, None, None, False, None),
    (18, 60, 1, 1, 288, TIED, F32, 30, 5.0, True, None),
    (33, 60, 1, 16, 576, TIED, F16, None, None, False, None),
    (6, 40, 1, 4, 576, TIED, F32, 20, None, False, None),
    (40, 100, 1, 2, 576, TIED, BF16, 60, 5.0, True, None),
    (20, 70, 1, 2, 512, 512, BF16, None, None, False, None),
    (20, 50, 1, 1, 400, 300, F16, None, None, False, None),
])
@pytest.mark.thorough(but=4)
def test_prefill(T, N, H, G, K, V, dtype, window, softcap, sink_logits, one_tile, monkeypatch):
    cut_at(monkeypatch, one_tile)
    check_prefill(T, N, H, G, K, V, dtype, window, softcap, sink_logits)


def test_descriptors_are_for_tiles_that_are_whole_and_loaded_once(described):
    """Keys of 64 and values of 32 have one each; those of MiMo are padded, and latents are tied or of two tiles."""
    check_prefill(9, 140, 1, 2, 64, 32, F16, None, None, False)
    assert [x.shape[2] for x in described] == [64, 32]
    for K, V in ((24, 16), (64, TIED), (512, 64)):
        check_prefill(3, 40, 1, 1, K, V, F16, None, None, False)
    assert len(described) == 2


def test_tall_tiles_of_keys_that_are_wider_than_values():
    """MiMo's: 128 rows where there are enough of them for a card."""
    tiles = {"BLOCK_D": 256, "BLOCK_V": 128, "TIED": False}
    blocks = prefill_module._blocks(prefill_module.dot_dtype(noise(1, dtype=F16)), tiles, 4096, 64, False)
    assert blocks["BLOCK_M"] == 128


def check_decode(lengths, C, H, G, T, K, V, dtype, rope, window, softcap, sink_logits):
    A, S = len(lengths), len(lengths) + 1
    q = noise(A, T, H * G, K, dtype=dtype, seed=1).transpose(1, 2)
    keys = pool((S, H, C, K), dtype)
    values = keys if V == TIED else pool((S, H, C, V), dtype, turned=True)
    slots = torch.arange(A, 0, -1)  # slot 0 stays garbage
    for a, length in enumerate(lengths):
        values[slots[a], :, :length] = noise(H, length, V or K, dtype=dtype, seed=40 + a)
        keys[slots[a], :, :length] = noise(H, length, K, dtype=dtype, seed=20 + a)
    slots, lengths = slots.to(DEVICE), torch.tensor(lengths, device=DEVICE)
    extra = options(G, H, dtype, window, softcap, sink_logits)
    if rope:
        extra |= {"cos": noise(C + 2, K, dtype=dtype, seed=5).cos(), "sin": noise(C + 2, K, dtype=dtype, seed=6).sin()}
    out = decode_attention(q, keys, values, slots, lengths, K**-0.5, **extra)
    expected = reference.decode_attention(q, keys, values, slots, lengths, K**-0.5, **extra)
    assert out.shape == (A, H * G, T, V or K) and out.transpose(1, 2).is_contiguous()
    close(out, expected, OUT[dtype])


@pytest.mark.parametrize("lengths, C, H, G, T, K, V, dtype, rope, window, softcap, sink_logits, programs, one_tile", [
    ([1, 70, 33], 70, 2, 3, 1, 24, 16, F32, False, None, None, False, None, None),
    ([40, 7], 41, 1, 16, 1, 576, TIED, F16, False, None, None, False, None, None),
    ([90, 8], 90, 1, 4, 2, 40, TIED, BF16, False, 50, 3.0, True, 4, 32),  # 32 + 8
    ([1, 9], 9, 1, 4, 1, 40, TIED, F32, False, None, None, True, None, 32),  # one split
    ([101, 100, 1], 101, 1, 5, 1, 40, TIED, F16, False, None, 3.0, True, 1, 32),  # one split of several blocks
    ([70, 3], 70, 1, 2, 1, 24, 16, F16, True, None, None, False, 2, 16),  # rotated: K is one tile, V is its own
    ([60], 60, 1, 2, 1, 12, 24, BF16, True, 20, None, True, None, 16),
    ([60, 5], 60, 1, 1, 1, 40, TIED, F32, True, None, None, False, None, 32),  # as they are read: V is not
    ([131, 66], 131, 4, 2, 1, 16, 12, BF16, False, 70, None, True, 2, None),
    ([200, 1], 200, 1, 16, 1, 192, 128, BF16, False, None, None, False, None, None),
    ([130, 60], 130, 2, 8, 1, 192, 128, F16, False, 128, None, True, None, None),
    ([50], 50, 1, 2, 3, 192, 128, F32, False, None, 5.0, False, 1, None),
    ([90, 60], 90, 1, 4, 1, 288, TIED, BF16, False, None, None, False, None, None),
    ([40, 33], 40, 1, 1, 1, 288, TIED, F32, False, 30, None, False, None, None),
    ([60, 2, 17], 60, 1, 128, 1, 576, TIED, BF16, False, None, None, False, 6, None),  # DeepSeek-V3: two tiles of rows
    ([33, 5], 40, 1, 4, 1, 576, TIED, F32, False, None, None, False, None, None),
    ([80, 9], 80, 1, 20, 1, 576, TIED, F16, False, None, 3.0, True, 1, None),
    ([70, 50], 70, 2, 2, 1, 512, 512, F16, True, None, None, False, None, None),  # Gemma 4
    ([50], 50, 1, 2, 1, 400, 300, F16, False, None, None, False, None, None),
])
@pytest.mark.thorough(but=5)
def test_decode(lengths, C, H, G, T, K, V, dtype, rope, window, softcap, sink_logits, programs, one_tile, monkeypatch):
    cut_at(monkeypatch, one_tile)
    if programs:  # fewer splits of a context than its capacity would get
        monkeypatch.setattr(decode_module, "_PROGRAMS", programs)
    check_decode(lengths, C, H, G, T, K, V, dtype, rope, window, softcap, sink_logits)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("ranks", "N", "H", "G", "D", "dtype", "softcap", "sink_logits", "one_tile"), [
    (list(range(20, 75)), 75, 1, 4, 40, F32, None, True, 32),
    (list(range(30, 50)), 50, 1, 2, 576, BF16, None, False, None),
    (shuffled(70, 37), 70, 2, 3, 24, F16, 3.0, True, 16),
    (list(range(3, 40, 5)), 60, 1, 5, 288, F32, None, False, None),
    (shuffled(50, 20), 50, 1, 16, 576, F16, None, False, None),
    (list(range(4, 30)), 30, 1, 1, 576, F32, 3.0, False, None),
])
@pytest.mark.thorough(but=2)
def test_reduced(ranks, N, H, G, D, dtype, softcap, sink_logits, one_tile, given, monkeypatch):
    cut_at(monkeypatch, one_tile)
    check_reduced(ranks, N, H, G, D, dtype, softcap, sink_logits, given)


@pytest.mark.parametrize(("K", "V", "runs"), [(24, 16, True), (12, 24, True), (576, TIED, True), (512, 512, True),
                                              (577, TIED, False), (64, 640, False)])
def test_units_of_up_to_576_numbers_have_kernels(K, V, runs, monkeypatch):
    """Others are attended to as the specification has it, which waits for the device, so that no graph captures it."""
    used = []
    monkeypatch.setenv("LOCRET_KERNELS", "triton")
    for operation in ("prefill_attention", "decode_attention"):
        monkeypatch.setattr(kernels, f"_{operation}", lambda *args, **kwargs: used.append("kernel"))
        monkeypatch.setattr(reference, operation, lambda *args, **kwargs: used.append("reference"))
    keys = noise(1, 1, 5, K)
    values = keys if V == TIED else noise(1, 1, 5, V)
    kernels.prefill_attention(keys[0], keys[0], values[0], 1.0)
    kernels.decode_attention(keys, keys, values, torch.tensor([0]), torch.tensor([5]), 1.0)
    assert used == [["reference", "kernel"][runs]] * 2


def test_in_torch_only_equal_widths_have_a_quick_way(monkeypatch):
    monkeypatch.setenv("LOCRET_KERNELS", "torch")
    for K, V in ((24, 16), (576, TIED)):
        k = noise(1, 9, K).cpu()
        v: Tensor = k if V == TIED else noise(1, 9, V).cpu()
        out, _ = kernels.prefill_attention(k[:, 4:], k, v, 0.2)
        close(out, reference.prefill_attention(k[:, 4:], k, v, 0.2)[0], 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("H", "G", "K", "V"), [(1, 128, 576, TIED), (4, 16, 192, 128), (1, 40, 288, TIED),
                                                (4, 8, 512, 512)])
def test_a_graph_of_decode_holds_for_other_lengths_and_slots(H, G, K, V):
    """DeepSeek-V3, MiMo-V2-Flash, MiniCPM3 and Gemma 4, at their own sizes."""
    q, keys = noise(2, H * G, 1, K, dtype=BF16), noise(4, H, 500, K, dtype=BF16, seed=1)
    values = keys if V == TIED else noise(4, H, 500, V, dtype=BF16, seed=2)
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
