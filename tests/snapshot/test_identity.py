"""Identity: a snapshot is resumed by what made it, and nothing that could change a number goes unnoticed."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from locret_stream.config import Budget
from locret_stream.errors import SnapshotMismatch
from locret_stream.models import architecture
from locret_stream.snapshot.identity import (
    Earlier,
    Expected,
    Identity,
    canonical,
    digest_tensors,
    digest_text,
    expect_same,
    first_difference,
    settings_text,
)
from tests.context.support import tiny

FIELDS = Identity.__struct_fields__
ONE = Identity(**{field: f"{field} 1" for field in FIELDS})
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
          torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def test_the_same_identity_is_taken():
    expect_same(ONE, msgspec.msgpack.decode(msgspec.msgpack.encode(ONE), type=Identity), "it")


@pytest.mark.parametrize("field", FIELDS)
def test_another_value_of_any_field_is_refused_by_name_with_both_values(field: str):
    other = msgspec.structs.replace(ONE, **{field: "something else"})
    with pytest.raises(SnapshotMismatch) as caught:
        expect_same(other, ONE, "snapshot 3 of 'alice'")
    error = caught.value
    assert (error.field, error.found, error.expected) == (field, "something else", f"{field} 1")
    for part in ("snapshot 3 of 'alice'", field, "found something else", f"expected {field} 1"):
        assert part in str(error)


@pytest.mark.parametrize("field", FIELDS)
def test_what_was_made_without_is_distinguished_from_what_was_made_with(field: str):
    without = msgspec.structs.replace(ONE, **{field: ""})
    with pytest.raises(SnapshotMismatch, match=f"found none, expected {field} 1"):
        expect_same(without, ONE, "it")
    with pytest.raises(SnapshotMismatch, match=f"found {field} 1, expected none"):
        expect_same(ONE, without, "it")


def test_of_several_fields_that_differ_the_first_is_named():
    for at, field in enumerate(FIELDS):
        other = msgspec.structs.replace(ONE, **dict.fromkeys(FIELDS[at:], "other"))
        with pytest.raises(SnapshotMismatch) as caught:
            expect_same(other, ONE, "it")
        assert caught.value.field == field


def test_an_identity_names_everything_that_numbers_depend_on_and_leaves_nothing_out():
    assert set(FIELDS) >= {"weights", "architecture", "dtype", "tokenizer", "template", "heads", "policy", "knobs",
                           "budgets", "chunk_size"}
    assert all(field.required for field in msgspec.structs.fields(Identity))


def test_an_identity_is_stored_whole_and_with_nothing_else():
    decode = msgspec.msgpack.Decoder(Identity).decode
    fields = msgspec.to_builtins(ONE)
    assert decode(msgspec.msgpack.encode(fields)) == ONE
    for field in FIELDS:
        long = fields | {field: "x" * 65_536}
        assert getattr(decode(msgspec.msgpack.encode(long)), field) == long[field]
        for lie in (fields | {field: "x" * 65_537}, fields | {field: None}, fields | {field: 7},
                    {name: value for name, value in fields.items() if name != field}):
            with pytest.raises(msgspec.ValidationError):
                decode(msgspec.msgpack.encode(lie))
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        decode(msgspec.msgpack.encode(fields | {"later": ""}))
    with pytest.raises(AttributeError):
        ONE.weights = "other"


# -- what counts as the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS)
def test_what_an_earlier_library_wrote_for_the_same_settings_is_taken(field: str):
    """It is asked only where values differ, with the time at which the snapshot was saved."""
    asked = []

    def same(found: str, saved: float) -> bool:
        asked.append((found, saved))
        return found == "earlier"

    expected = Expected(ONE, {field: Earlier(same, "a hint")})
    expect_same(ONE, expected, "it", 7.0)
    assert not asked
    expect_same(msgspec.structs.replace(ONE, **{field: "earlier"}), expected, "it", 7.0)
    assert asked == [("earlier", 7.0)]
    with pytest.raises(SnapshotMismatch, match=r"found other, expected .* \(a hint\); open it") as caught:
        expect_same(msgspec.structs.replace(ONE, **{field: "other"}), expected, "it")
    assert caught.value.field == field


GIVEN = {"layers": 4, "eps": 1e-6, "rope": {"theta": 1e4, "type": "default"}, "kinds": ["full"] * 40, "bias": None}
USUAL = {"layers": 32, "eps": 1e-6, "rope": {"theta": 1e4, "type": "default"}, "kinds": [], "bias": None}


def test_a_config_is_the_same_in_another_version_which_has_fields_more_or_less():
    text = settings_text(GIVEN, USUAL)
    assert len(text) < 400 and first_difference(text, text) is None
    later = settings_text(GIVEN | {"limit": 7.0}, USUAL | {"limit": 7.0})
    changed_default = settings_text(GIVEN, USUAL | {"eps": 1e-5})
    moved = settings_text({**GIVEN, "rope": {**GIVEN["rope"], "partial": 1}}, {**USUAL, "rope": {**USUAL["rope"],
                                                                                               "partial": 1}})
    shuffled = settings_text(dict(reversed(GIVEN.items())), dict(reversed(USUAL.items())))
    for other in (later, changed_default, moved, shuffled):
        assert first_difference(text, other) is first_difference(other, text) is None
        expect_same(msgspec.structs.replace(ONE, architecture=text), msgspec.structs.replace(ONE, architecture=other),
                    "it")


@pytest.mark.parametrize("change, name", [
    ({"layers": 5}, "layers"), ({"eps": 1e-5}, "eps"), ({"rope": {"theta": 5e5, "type": "default"}}, "rope.theta"),
    ({"rope": {"theta": 1e4, "type": "default", "factor": 2}}, "rope.factor"), ({"kinds": ["full"] * 39}, "kinds"),
    ({"limit": 7.0}, "limit"), ({"bias": False}, "bias"), ({"rope": None}, "rope")])
def test_another_config_is_refused_by_the_name_of_what_differs(change: dict, name: str):
    text, other = settings_text(GIVEN, USUAL), settings_text(GIVEN | change, USUAL)
    for one, two in ((text, other), (other, text)):
        assert first_difference(one, two)[0] == name
        with pytest.raises(SnapshotMismatch, match=f"other architecture \\({name}\\): found ") as caught:
            expect_same(msgspec.structs.replace(ONE, architecture=one),
                        msgspec.structs.replace(ONE, architecture=two), "it")
        assert (caught.value.found, caught.value.expected) == (one, two)


def test_a_config_of_any_size_is_stored():
    whole = [settings_text(GIVEN | {f"field {n}": n + more for n in range(9000)}, USUAL) for more in (0, 0, 1)]
    assert max(map(len, whole)) < 65_536 and first_difference(*whole[:2]) is None is not first_difference(*whole[1:])


def test_a_config_is_told_from_what_is_none():
    text = settings_text(GIVEN, USUAL)
    for other in ("", "0" * 32, "{}", "[1]", '{"given": 3}'):
        assert first_difference(text, other) is not None is not first_difference(other, text)


# -- tensors ------------------------------------------------------------------------------------------------------


def model() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {"embed": torch.randn(7, 4, generator=noise), "half": torch.randn(5, 3, generator=noise).bfloat16(),
            "small": torch.randn(6, generator=noise).half(), "ids": torch.arange(9), "scalar": torch.tensor(2.0),
            "none": torch.zeros(0, 3), "bits": torch.tensor([True, False])}


def digest(tensors: dict[str, Tensor]) -> str:
    return digest_tensors(tensors.items())


@pytest.mark.parametrize("name", [name for name, tensor in model().items() if tensor.numel()])
def test_one_changed_bit_anywhere_changes_the_digest(name: str):
    seen = {digest(model())}
    size = model()[name].numel() * model()[name].element_size()
    for at in range(size):
        changed = model()
        raw = changed[name].reshape(-1).view(torch.uint8)
        raw[at] ^= 1
        seen.add(digest(changed))
    assert len(seen) == 1 + size


def test_values_that_compare_equal_but_are_not_the_same_are_distinguished():
    assert digest({"x": torch.tensor([0.0])}) != digest({"x": torch.tensor([-0.0])})
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert digest({"x": quiet}) != digest({"x": other})
    assert digest({"x": quiet}) == digest({"x": quiet.clone()})


@pytest.mark.parametrize("change", [
    lambda m: m.update(small=m["small"].bfloat16()), lambda m: m.update(half=m["half"].view(torch.float16)),
    lambda m: m.update(ids=m["ids"].view(torch.float64)), lambda m: m.update(ids=m["ids"].reshape(3, 3)),
    lambda m: m.update(ids=m["ids"][None]), lambda m: m.update(scalar=m["scalar"][None]),
    lambda m: m.update(none=torch.zeros(3, 0)), lambda m: m.update(none=torch.zeros(0)),
    lambda m: m.update(none=torch.zeros(0, 3).half()), lambda m: m.update(embed2=m.pop("embed")),
    lambda m: m.update(embed=m["small"], small=m["embed"]), lambda m: m.pop("none"),
    lambda m: m.update(more=torch.zeros(0)), lambda m: m.update(embed=m["embed"][:6]),
    lambda m: m.update(half=m["half"].reshape(3, 5)), lambda m: m.update(embed=m["embed"].T.contiguous().reshape(7, 4)),
], ids=range(16))
def test_another_dtype_shape_name_or_set_of_tensors_changes_the_digest(change):
    changed = model()
    change(changed)
    assert digest(changed) != digest(model())


@given(st.permutations(list(model())))
@settings(max_examples=30)
def test_the_order_of_the_tensors_does_not_matter(names: list[str]):
    tensors = model()
    assert digest_tensors((name, tensors[name]) for name in names) == digest(tensors)


def test_the_order_of_tensors_of_one_name_does_not_matter_and_their_number_does():
    a, b = ("x", torch.zeros(2)), ("x", torch.ones(2))
    assert digest_tensors([a, b]) == digest_tensors([b, a])
    assert len({digest_tensors(named) for named in ([], [a], [b], [a, b], [a, a], [b, b])}) == 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_of_the_values_not_of_how_they_lie_in_memory(dtype: torch.dtype):
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    views = [whole.T, whole[:, 1:4], whole[::2], whole[1:1], whole[2, 3], whole[:, 2], whole.expand(2, 4, 6)]
    for view in views:
        assert digest({"x": view}) == digest({"x": view.clone(memory_format=torch.contiguous_format)})
        assert digest({"x": view.detach()}) == digest({"x": torch.nn.Parameter(view, requires_grad=False)})
    assert len({digest({"x": view}) for view in views}) == len(views)


def test_a_digest_leaves_tensors_and_gradients_alone():
    tensor = torch.randn(3, requires_grad=True)
    before = tensor.detach().clone()
    assert digest({"x": tensor}) == digest({"x": before})
    assert torch.equal(tensor, before) and tensor.requires_grad and tensor.grad is None


def test_names_and_contents_cannot_be_mistaken_for_one_another():
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    plain = {"a": one, "b": two}
    for names in ([("a|torch.float32|(1,)|", one), ("b", two)], [("a|", one), ("b", two)], [("ab", one), ("", two)],
                  [("a", one), ("b|torch.float32", two)]):
        assert digest_tensors(names) != digest(plain)


# -- texts --------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
@settings(max_examples=200)
def test_texts_have_the_same_digest_just_if_they_are_the_same_parts(a: list[str], b: list[str]):
    assert (digest_text(*a) == digest_text(*b)) == (a == b)


def test_where_texts_are_divided_matters():
    assert len({digest_text(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), (),
                                                  ("",))}) == 7


def test_a_lone_surrogate_has_a_digest_too():
    """A tokenizer's vocabulary may hold one."""
    assert len({digest_text("\ud800"), digest_text("\ud801"), digest_text("?"), digest_text("\ufffd")}) == 4


def test_equal_values_have_equal_texts_in_whatever_order_they_come():
    a, b = {"x": 1, "y": {"p": [1, 2], "q": None}}, {"y": {"q": None, "p": [1, 2]}, "x": 1}
    assert canonical(a) == canonical(b) == '{"x":1,"y":{"p":[1,2],"q":null}}'
    assert canonical({"x": {3, 1, 2}}) == canonical({"x": {2, 1, 3}})


@pytest.mark.parametrize("a, b", [({"x": 1}, {"x": 2}), ({"x": 1}, {"y": 1}), ({"x": [1, 2]}, {"x": [2, 1]}),
                                  ({"x": "1"}, {"x": 1}), ({"x": None}, {}), ({"x": True}, {"x": 1}),
                                  ({"x": 0.1}, {"x": 0.1 + 1e-16})])
def test_other_values_have_other_texts(a: dict, b: dict):
    assert canonical(a) != canonical(b)


# -- what a runtime says it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"sinks": 3}, {"stabilizers": 2}, {"sinks": 3, "stabilizers": 2}, {"units": 21}])
async def test_other_sinks_or_stabilizers_are_another_memory_though_the_budget_is_the_same(tmp_path, other: dict):
    sizes = {"units": 20, "sinks": 2, "stabilizers": 3}
    kind = {"store": tmp_path, "policy": "keydiff"}  # one that protects just what it is told to
    async with tiny(**kind, budget=Budget(**sizes)) as runtime, runtime.open("alice", raw=True) as ctx:
        await ctx.push("The pass key of falcon is 48213.\n" * 5)
    async with tiny(**kind, budget=Budget(**{**sizes, **other})) as runtime:
        with pytest.raises(SnapshotMismatch) as caught:
            await runtime.open("alice", raw=True).__aenter__()
        assert caught.value.field == "budgets"
    async with tiny(**kind, budget=Budget(**sizes)) as runtime, runtime.open("alice", raw=True) as ctx:
        assert ctx.resumed


async def test_what_a_user_sets_in_a_config_and_no_model_computes_with_is_the_same_model(tmp_path, monkeypatch):
    async with tiny(store=tmp_path) as runtime, runtime.open("alice", raw=True) as ctx:
        await ctx.push("The pass key of falcon is 48213.\n" * 5)
    async with tiny(store=tmp_path) as runtime:
        config = runtime.attachment.config
        for name, value in (("pad_token_id", 3), ("eos_token_id", [1, 2]), ("id2label", {0: "no"})):
            monkeypatch.setattr(config, name, value)
        async with runtime.open("alice", raw=True) as ctx:
            assert ctx.resumed
    async with tiny(store=tmp_path) as runtime:
        monkeypatch.setattr(config, "rms_norm_eps", 0.5)
        monkeypatch.setattr(runtime.attachment.config, "rms_norm_eps", 0.5)
        with pytest.raises(SnapshotMismatch, match=r"other architecture \(rms_norm_eps\): found 1e-06, expected 0.5"):
            await runtime.open("alice", raw=True).__aenter__()


@pytest.mark.parametrize("unknown", [(), ("pretraining_tp",), ("mlp_bias", "attention_bias")])
async def test_a_digest_of_the_whole_config_is_still_known(tmp_path, unknown: tuple[str, ...]):
    """As earlier libraries wrote it, under this version of transformers or one before, which knew fewer fields."""
    async with tiny(store=tmp_path) as runtime:
        whole = json.loads(architecture.architecture(runtime.attachment.config))
        fields = {name: value for name, value in whole.items() if name not in unknown}
        digest = digest_text(json.dumps(fields, sort_keys=True))
        found = msgspec.structs.replace(runtime.identity, architecture=digest)
        expect_same(found, runtime.accepted, "it")
        with pytest.raises(SnapshotMismatch, match="architecture"):
            expect_same(found, runtime.identity, "it")
        other = digest_text(json.dumps(fields | {"hidden_act": "gelu"}, sort_keys=True))
        with pytest.raises(SnapshotMismatch, match="architecture"):
            expect_same(msgspec.structs.replace(found, architecture=other), runtime.accepted, "it")
