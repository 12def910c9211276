"""Retaining heads: files round-trip, published weights convert, and what does not fit is refused by name and shape."""

from __future__ import annotations

import json
import os
import pickle

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from locret_stream.config import Budget, ModelShape
from locret_stream.errors import ConfigError, HeadsMismatch
from locret_stream.heads import HeadsConfig, RetainingHeads

LAYERS, QUERY, KV, DIM, WIDTH = 3, 4, 2, 8, 12
FEATURES = (QUERY + 2 * KV) * DIM


def shape_of(**others: int) -> ModelShape:
    return ModelShape.even(**dict(layers=LAYERS, kv_heads=KV, groups=QUERY // KV, head_dim=DIM, vocab=50, window=64,
                                  item_bytes=4) | others)


SHAPE = shape_of()


def published(dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {f"model.layers.{n}.self_attn.{fc}.weight": torch.randn(*size, generator=noise).to(dtype)
            for n in range(LAYERS) for fc, size in (("fc1", (WIDTH, FEATURES)), ("fc2", (KV, WIDTH)))}


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(published(), path)
    return path


def inputs(tokens: int = 5) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, tokens, DIM, generator=noise) for heads in (QUERY, KV, KV)]


def by_hand(tensors, layer: int, act, q, k, v) -> torch.Tensor:
    """One token at a time: concatenate all heads of q, then k, then v; two matrices with the activation between."""
    one, two = (tensors[f"model.layers.{layer}.self_attn.{fc}.weight"].float() for fc in ("fc1", "fc2"))
    out = torch.empty(q.shape[0], KV, q.shape[2])
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            x = torch.cat([part[b, h, t] for part in (q, k, v) for h in range(part.shape[1])])
            out[b, :, t] = two @ act(one @ x)
    return out


@pytest.mark.parametrize("given", [
    dict(head_dim=DIM), dict(query_heads=QUERY), dict(query_heads=QUERY, kv_heads=KV, head_dim=DIM), dict(shape=SHAPE),
])
def test_published_weights_convert_and_round_trip(weights, tmp_path, given):
    heads = RetainingHeads.from_published(weights, **given, fingerprint="f")
    assert heads.config == HeadsConfig(layers=LAYERS, query_heads=QUERY, kv_heads=KV, head_dim=DIM, width=WIDTH,
                                       label="logit", fingerprint="f")
    heads.save(tmp_path / "heads")
    again = RetainingHeads.load(tmp_path / "heads")
    assert again.config == heads.config and not again.training
    for layer in range(LAYERS):
        expected = by_hand(published(), layer, torch.nn.functional.silu, *inputs())
        for made in (heads, again):
            found = made.score(layer, *inputs())
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected)


def test_activation_is_the_callers_and_folders_and_safetensors_work(weights, tmp_path):
    gelu = RetainingHeads.from_published(weights.parent, head_dim=DIM, act="gelu_pytorch_tanh")
    expected = by_hand(published(), 1, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), *inputs())
    torch.testing.assert_close(gelu.score(1, *inputs()), expected)
    save_file(published(), tmp_path / "second.safetensors")
    again = RetainingHeads.from_published(tmp_path / "second.safetensors", head_dim=DIM)
    assert all(torch.equal(a, b) for a, b in zip(gelu.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(HeadsMismatch, match="found 2 weight files; expected one"):
        RetainingHeads.from_published(weights.parent, head_dim=DIM)
    with pytest.raises(ConfigError, match="activation 'none'"):
        RetainingHeads.from_published(weights, head_dim=DIM, act="none")


def changed(**changes) -> dict:
    tensors: dict = published()
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


FC1, FC2 = "model__layers__1__self_attn__fc1__weight", "model__layers__1__self_attn__fc2__weight"


@pytest.mark.parametrize("tensors, message", [
    (changed(**{FC1: None}), r"1 tensors are missing, first 'model\.layers\.1\.self_attn\.fc1\.weight'"),
    (changed(**{FC1: None, FC2: None}), r"2 tensors are missing, first 'model\.layers\.1\.self_attn\.fc1\.weight'"),
    (changed(model__layers__1__self_attn__fc1__bias=torch.zeros(WIDTH)), r"found 'model\.layers\.1\.self_attn\.fc1\.b"),
    (changed(lm_head__weight=torch.zeros(2, 2)), r"found 'lm_head\.weight'; expected only"),
    (changed(model__layers__01__self_attn__fc1__weight=torch.zeros(2, 2)), r"found 'model\.layers\.01\."),
    (changed(**{FC1: torch.zeros(WIDTH, FEATURES + 1)}), r"'fc1\.1\.weight': found \(12, 65\), expected \(12, 64\)"),
    (changed(**{FC2: torch.zeros(KV + 1, WIDTH)}), r"'fc2\.1\.weight': found \(3, 12\), expected \(2, 12\)"),
    (changed(**{FC1: torch.zeros(FEATURES)}), r"fc1\.weight' is \(64,\) torch\.float32; expected a matrix"),
    (changed(**{FC1: torch.zeros(WIDTH, FEATURES, dtype=torch.int8)}), "int8; expected a matrix of floats"),
    (changed(**{FC1: "text"}), "is str; expected a matrix"),
    (changed(**{FC2: torch.full((KV, WIDTH), float("nan"))}), "not finite"),
    ({}, "expected a dict of tensors"),
    ([1, 2], "found list; expected a dict"),
    ({3: torch.zeros(2, 2)}, "found 3; expected only"),
])
def test_any_other_layout_is_refused_by_name_and_shape(tmp_path, tensors, message):
    torch.save(tensors, tmp_path / "heads.bin")
    with pytest.raises(HeadsMismatch, match=message):
        RetainingHeads.from_published(tmp_path / "heads.bin", head_dim=DIM)


@pytest.mark.parametrize("given, message", [
    (dict(head_dim=DIM, kv_heads=4), r"fc2\.weight': found \(2, 12\), expected \(4, 12\) for 4 KV heads"),
    (dict(head_dim=9), r"fc1\.weight': found \(12, 64\), expected \(12, 63\) for 3 query and 2 KV heads of 9"),
    (dict(query_heads=5), r"fc1\.weight': found \(12, 64\), expected \(12, 63\)"),
    (dict(query_heads=QUERY, head_dim=4), r"found \(12, 64\), expected \(12, 32\)"),
    (dict(head_dim=64), "for -3 query"),
    (dict(shape=shape_of(layers=4)), r"found 3 layers, expected 4: .*layers\.3\..* is missing"),
    (dict(shape=shape_of(layers=2)), r"found 3 layers, expected 2: .*layers\.2\..* is too many"),
])
def test_sizes_that_disagree_with_the_shapes_are_refused(weights, given, message):
    with pytest.raises(HeadsMismatch, match=message):
        RetainingHeads.from_published(weights, **given)


def test_sizes_that_shapes_cannot_tell_are_asked_for(weights):
    with pytest.raises(ConfigError, match="expected query_heads or head_dim"):
        RetainingHeads.from_published(weights)


class Bomb:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new_format", [True, False])
def test_code_in_a_pickle_is_never_run(tmp_path, new_format):
    bomb = {**published(), "model.layers.3.self_attn.fc1.weight": Bomb(str(tmp_path / "boom"))}
    torch.save(bomb, tmp_path / "heads.bin", _use_new_zipfile_serialization=new_format)
    with pytest.raises(HeadsMismatch, match="code in a pickle is never run"):
        RetainingHeads.from_published(tmp_path / "heads.bin", head_dim=DIM)
    (tmp_path / "heads.bin").write_bytes(pickle.dumps(bomb))
    with pytest.raises(HeadsMismatch, match="code in a pickle is never run"):
        RetainingHeads.from_published(tmp_path / "heads.bin", head_dim=DIM)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("damage", [lambda b: b[:-200], lambda b: b[:10], lambda b: b"", lambda b: b"garbage " * 9])
def test_damaged_files_are_refused(weights, damage):
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(HeadsMismatch, match="cannot be read as plain tensors"):
        RetainingHeads.from_published(weights, head_dim=DIM)
    with pytest.raises(HeadsMismatch, match="no such file"):
        RetainingHeads.from_published(weights.with_name("none.bin"), head_dim=DIM)


def config(**more) -> HeadsConfig:
    return HeadsConfig(**{**dict(layers=LAYERS, query_heads=QUERY, kv_heads=KV, head_dim=DIM, width=WIDTH), **more})


@pytest.mark.parametrize("more", [{}, dict(bias=True, input_norm=True, budget_shares=(1.0, 2.0, 3.0), label="zscore")])
def test_saved_heads_load_to_the_same_scores(tmp_path, more):
    heads = RetainingHeads(config(**more))
    heads.save(tmp_path)
    again = RetainingHeads.load(tmp_path)
    assert again.config == heads.config
    for layer in range(LAYERS):
        assert torch.equal(heads.score(layer, *inputs()), again.score(layer, *inputs()))
    heads.save(tmp_path, dtype=torch.bfloat16)
    half = RetainingHeads.load(tmp_path)
    assert half.fc1[0].weight.dtype == torch.float32
    torch.testing.assert_close(half.score(0, *inputs()), heads.score(0, *inputs()), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("input_norm", [False, True])
@torch.no_grad()
def test_at_inference_a_batch_of_one_is_scored_as_in_a_batch_of_two(input_norm: bool):
    heads, both = RetainingHeads(config(input_norm=input_norm, bias=True)), inputs()
    for layer in range(LAYERS):
        alone = heads.score(layer, *(part[:1] for part in both))
        torch.testing.assert_close(alone, heads.score(layer, *both)[:1])


def test_means_of_keys_are_read_beside_heads(tmp_path):
    heads, means = RetainingHeads(config()), torch.randn(LAYERS, KV, DIM)
    heads.save(tmp_path)
    assert RetainingHeads.load(tmp_path).key_means is None
    heads.key_means = means
    heads.save(tmp_path)
    again = RetainingHeads.load(tmp_path)
    assert torch.equal(again.key_means, means) and "key_means" not in again.state_dict()


@pytest.mark.parametrize("wrong", [{"key_means": torch.randn(LAYERS, KV, DIM + 1)}, {"other": torch.randn(3)},
                                   {"key_means": torch.full((LAYERS, KV, DIM), float("nan"))},
                                   {"key_means": torch.zeros(LAYERS, KV, DIM, dtype=torch.float64)}])
def test_means_that_fit_nothing_are_refused(tmp_path, wrong):
    RetainingHeads(config()).save(tmp_path)
    save_file(wrong, tmp_path / "key_means.safetensors")
    with pytest.raises(HeadsMismatch, match=r"key_means\.safetensors.* (and each context takes|remove that file)"):
        RetainingHeads.load(tmp_path)
    path = tmp_path / "key_means.safetensors"
    path.write_bytes(b"12345678")
    with pytest.raises(HeadsMismatch, match="cannot be read as retaining heads"):
        RetainingHeads.load(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")  # not the same as no means
    with pytest.raises(HeadsMismatch, match="cannot be read as retaining heads"):
        RetainingHeads.load(tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    RetainingHeads(config()).save(tmp_path / "one")
    RetainingHeads(config(layers=4)).save(tmp_path / "two")
    (tmp_path / "two" / "heads.json").write_bytes((tmp_path / "one" / "heads.json").read_bytes())
    with pytest.raises(HeadsMismatch, match=r"2 tensors do not fit, first 'fc1\.3\.weight': found \(12, 64\), expec"):
        RetainingHeads.load(tmp_path / "two")
    (tmp_path / "two" / "heads.json").write_text('{"layers": "three"}')
    with pytest.raises(HeadsMismatch, match="cannot be read as retaining heads"):
        RetainingHeads.load(tmp_path / "two")
    (tmp_path / "one" / "heads.safetensors").write_bytes(b"12345678")
    with pytest.raises(HeadsMismatch, match="cannot be read as retaining heads"):
        RetainingHeads.load(tmp_path / "one")
    with pytest.raises(HeadsMismatch, match=r"no heads\.safetensors in"):
        RetainingHeads.load(tmp_path / "none")


@pytest.mark.parametrize("shares", [
    [1e308] * 3, [1e100, 1, 1], [-1, 1, 1], [0, 1, 1], [0.0] * 3, [], [1, 1], [1, 1, 1, 1],
])
def test_shares_that_divide_nothing_are_refused(tmp_path, shares):
    RetainingHeads(config(budget_shares=(1.0, 2.0, 3.0))).save(tmp_path)
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"budget_shares": shares}))
    for read in RetainingHeads.read_config, RetainingHeads.load:
        with pytest.raises(HeadsMismatch, match=r"found budget_shares \[.*\]; expected 3 numbers above 0, one per"):
            read(tmp_path)
    with pytest.raises(ConfigError, match="expected 3 numbers above 0"):
        config(budget_shares=tuple(map(float, shares)))


@pytest.mark.parametrize(("field", "value", "says"), [
    ("width", -24, "width is -24"), ("kv_heads", 0, "kv_heads is 0"), ("version", 9, "found version 9; expected 1"),
    ("features", "hidden", "hidden is 0"), ("value_dim", -1, "value_dim is -1; expected 0 to")])
def test_sizes_and_versions_that_mean_nothing_are_refused(tmp_path, field, value, says):
    RetainingHeads(config()).save(tmp_path)
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    for read in RetainingHeads.read_config, RetainingHeads.load:
        with pytest.raises(HeadsMismatch, match=says):
            read(tmp_path)


@pytest.mark.parametrize("shares", [[1e99] * 3, [5e-324] * 3, [5e-324, 1, 9e99], None])
def test_shares_that_are_read_are_served(tmp_path, shares):
    RetainingHeads(config(budget_shares=shares and tuple(shares))).save(tmp_path)
    read = RetainingHeads.read_config(tmp_path).budget_shares
    budget = Budget(units=10**9, sinks=1, stabilizers=1, allocation="auto" if shares is None else "adaptive")
    assert sum(budget.per_layer(SHAPE, read, most=10**10)) == 3 * 10**9


@pytest.mark.parametrize("change, message", [
    (dict(layers=4), r"'fc1\.3\.weight' is missing, this model needs \(12, 64\)"),
    (dict(layers=2), r"'fc1\.2\.weight' is \(12, 64\), this model needs none"),
    (dict(head_dim=16), r"'fc1\.0\.weight' is \(12, 64\), this model needs \(12, 128\)"),
    (dict(kv_heads=4, groups=1), r"'fc1\.0\.weight' is \(12, 64\), this model needs \(12, 96\)"),
    (dict(kv_heads=1, groups=6), r"'fc2\.0\.weight' is \(2, 12\), this model needs \(1, 12\)"),
])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_of_another_model_are_refused_by_name_and_shape(change, message, bias):
    heads = RetainingHeads(config(bias=bias))
    heads.check_fits(SHAPE, "anything")
    with pytest.raises(HeadsMismatch, match=message):
        heads.check_fits(shape_of(**change), "anything")


def test_values_may_have_another_width_than_keys(tmp_path):
    """As under ALiBi, where keys have three numbers more."""
    units = tuple(msgspec.structs.replace(unit, value_dim=DIM - 3) for unit in SHAPE.units)
    shape, heads = msgspec.structs.replace(SHAPE, units=units), RetainingHeads(config(value_dim=DIM - 3))
    heads.save(tmp_path)
    loaded = RetainingHeads.load(tmp_path)
    loaded.check_fits(shape, "anything")
    with pytest.raises(HeadsMismatch, match=r"'fc1.0.weight' is \(12, 58\), this model needs \(12, 64\)"):
        loaded.check_fits(SHAPE, "anything")
    q, k, v = inputs()
    assert torch.equal(loaded.score(1, q, k, v[..., 3:]), heads.score(1, q, k, v[..., 3:]))


def test_layers_without_a_head_score_zero_and_leave_nothing_in_the_file(tmp_path):
    heads = RetainingHeads(config(trained_layers=(1,)))
    assert {name.split(".")[1] for name in heads.state_dict()} == {"1"}
    q, k, v = inputs()
    assert heads.score(1, q, k, v).any()
    assert torch.equal(heads.score(0, q, k, v), torch.zeros(2, KV, 5))
    heads.save(tmp_path)
    assert torch.equal(RetainingHeads.load(tmp_path).score(1, q, k, v), heads.score(1, q, k, v))
    heads.check_fits(SHAPE)
    with pytest.raises(HeadsMismatch, match=r"'fc1\.3\.weight' is missing"):
        heads.check_fits(shape_of(layers=4))
    with pytest.raises(HeadsMismatch, match="they are for 3 layers, this model has 2"):
        heads.check_fits(shape_of(layers=2))
    with pytest.raises(ConfigError, match="names layer 3; expected 0 to 2"):
        RetainingHeads(config(trained_layers=(0, 3)))
    with pytest.raises(ConfigError, match="trained_layers is empty; expected a layer at least"):
        RetainingHeads(config(trained_layers=()))


def test_heads_of_another_model_of_the_same_shape_are_refused_by_fingerprint():
    heads = RetainingHeads(config(fingerprint="aa"))
    heads.check_fits(SHAPE, "aa")
    heads.check_fits(SHAPE)
    with pytest.raises(HeadsMismatch, match="they were trained for aa, this model is bb"):
        heads.check_fits(SHAPE, "bb")


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda t: t.index_fill(0, torch.tensor([1]), float("nan")), "'fc2.1.weight' holds values that are not finite"),
    (lambda t: t.index_fill(0, torch.tensor([1]), float("-inf")), "'fc2.1.weight' holds values that are not finite"),
    (lambda t: t.to(torch.int8), "'fc2.1.weight' is of torch.int8; expected floating point"),
    (lambda t: t.to(torch.complex64), "'fc2.1.weight' is of torch.complex64; expected floating point"),
], ids=["nan", "inf", "int8", "complex"])
def test_weights_that_are_no_finite_numbers_are_refused(weights, tmp_path, spoil, says: str):
    heads = RetainingHeads.from_published(weights, head_dim=DIM)
    heads.save(tmp_path)
    tensors = heads.state_dict()
    save_file(tensors | {"fc2.1.weight": spoil(tensors["fc2.1.weight"]).contiguous()}, tmp_path / "heads.safetensors")
    with pytest.raises(HeadsMismatch, match=says):
        RetainingHeads.load(tmp_path)


@pytest.mark.parametrize(("field", "value", "says"), [
    ("width", 10**13, "width is 10000000000000; expected 1 to"), ("query_heads", 10**18, "query_heads is"),
    ("layers", 0, "layers is 0"), ("width", 1 << 18, "4 tensors do not fit|tensors do not fit"),
    ("hidden", 10**13, "hidden is"), ("sketch", "zz", "sketch is 'zz'; expected 32 hexadecimal digits"),
])
def test_sizes_that_no_heads_have_are_refused_before_any_memory_is_asked_for(weights, tmp_path, field, value, says):
    RetainingHeads.from_published(weights, head_dim=DIM).save(tmp_path)
    path = tmp_path / "heads.json"
    config = json.loads(path.read_text()) | {field: value} | ({"features": "hidden"} if field == "hidden" else {})
    path.write_text(json.dumps(config))
    with pytest.raises(HeadsMismatch, match=says):
        RetainingHeads.load(tmp_path)
