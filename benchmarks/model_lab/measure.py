"""What a runtime makes of one class: a tiny model is saved as a folder, loaded as a user does, and held against stock.

  fits     a memory with room for all: 60 random ids in pieces; logits behind each piece, and 8 greedy tokens
  evicts   a memory of 48 units, with `keydiff` and with `streaming_llm`: 200 ids and 8 tokens

Stock is the model that transformers itself loads from the same folder: a class may tie weights only when it is loaded.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from model_lab.sizes import VOCAB
from model_lab.tiny import build
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from locret_stream import LocretError, Runtime
from locret_stream.named_models import BUNDLED
from locret_stream.runtime.loading import load_tokenizer

EQUAL, DIFFERS, REFUSED, WRAPPED, RAW = "EQUAL", "DIFFERS", "REFUSED", "WRAPPED", "RAW"
BADEVICT, NOSTOCK, NOTBUILT = "BADEVICT", "NOSTOCK", "NOTBUILT"
VERDICTS = {
    EQUAL: "served: the logits are stock's to 1e-4 standard deviations, the tokens are the same, and it evicts",
    DIFFERS: "served, and not equal: a bug of the library",
    BADEVICT: "equal while it fits; then not finite, above its budget, or an error: a bug of the library",
    REFUSED: "a typed error of the library, with its reason",
    WRAPPED: "a typed error that only repeats another one: its reason is no reason",
    RAW: "another error, or no end within the limits: a bug of the library",
    NOSTOCK: "transformers itself cannot load or run it here",
    NOTBUILT: "there is no tiny model of it",
}
SERVED = (EQUAL,)
TOLERANCE = 1e-4  # root mean square of the differences, in standard deviations of stock's logits
OF_PIECES = 5e-3  # most that stock may differ from itself where it reads the same pieces with a cache of its own
READ, PIECES, NEW = 60, (23, 1, 20, 16), 8
BEHIND = [22, 23, 43, 59]  # the last token of each piece
STREAM, BUDGET, CHUNK = 200, 48, 16  # with the new tokens whole chunks
EVICTING = ("keydiff", "streaming_llm")
STEP_S = 120


class Case(NamedTuple):
    """What is measured.

    Args:
        kind: "causal", "multimodal" or "variants". name: of the class, or the variant. changes: fields of the config.
    """

    kind: str
    name: str
    model_type: str
    changes: dict[str, Any]


class Expected(NamedTuple):
    """What stock transformers compute of the first `READ` ids: logits [READ, vocab] fp32, and the tokens that follow;
    where it cannot generate, the words of its error in their place; and how far its logits behind the pieces are from
    those of pieces that it reads with a cache of its own (NaN where it cannot)."""

    logits: Tensor
    tokens: list[int] | str
    own_gap: float


def ids() -> Tensor:
    """The stream, [1, STREAM]."""
    return torch.randint(3, VOCAB - 32, (1, STREAM), generator=torch.Generator().manual_seed(7))


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """The verdict of a case, and what it rests on. `folder` is empty, and is filled."""
    try:
        model = build(case.model_type, "multimodal" if case.kind == "multimodal" else "causal", case.changes)
    except Exception as error:
        return {"verdict": NOTBUILT, "says": _words(error)}
    found: dict[str, Any] = {"class": type(model).__name__}
    try:
        model.save_pretrained(folder)
        load_tokenizer(BUNDLED).save_pretrained(folder)
        expected = stock(type(model), folder)
    except Exception as error:
        return found | {"verdict": NOSTOCK, "says": _words(error)}

    def opened(**options: Any) -> Runtime:
        return Runtime.from_pretrained(folder, dtype="float32", sinks=4, stabilizers=8, **options)

    try:
        found |= _within(fits(opened, expected))
    except Exception as error:
        return found | failed(error)
    for policy in EVICTING:
        try:
            found |= _within(evicts(opened, policy))
        except Exception as error:
            return found | failed(error) | {"verdict": BADEVICT}
    return found


def stock(cls: type[PreTrainedModel], folder: Path) -> Expected:
    """What transformers' own class computes, loaded from the folder."""
    model, read = cls.from_pretrained(folder, dtype=torch.float32).eval(), ids()[:, :READ]
    with torch.no_grad():
        logits = model(input_ids=read, use_cache=False).logits[0].float()
        try:
            own = _gap(torch.stack([model(input_ids=part, past_key_values=cache, use_cache=True).logits[0, -1].float()
                                    for cache in [DynamicCache(config=model.config.get_text_config(decoder=True))]
                                    for part in read.split(list(PIECES), 1)]), logits[BEHIND])
        except Exception:  # old classes read no cache of this form
            own = math.nan
        model.generation_config.eos_token_id = None
        try:
            whole = model.generate(input_ids=read, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                                   attention_mask=torch.ones_like(read))
        except Exception as error:  # the logits are still to be compared
            return Expected(logits, _words(error), own)
    return Expected(logits, whole[0, READ:].tolist(), own)


async def fits(opened: Callable[..., Runtime], expected: Expected) -> dict[str, Any]:
    """How far logits and tokens are from stock's where nothing is evicted.

    Recurrent layers may sum a single token in another way than many, so that stock differs from itself by more than the
    tolerance (Nemotron-H: 2.6e-4). Then the logits may differ by twice that, as docs/models.md has it; never by more
    than 0.01, and the tokens are the same.
    """
    read, rows, at = ids()[0, :READ].tolist(), [], 0
    async with (opened(policy="streaming_llm", budget=256, chunk_size=17) as runtime,
                runtime.open(raw=True) as ctx):
        session = ctx._session
        for size in PIECES:
            await ctx.feed(read[at:at + size])
            at += size
            rows.append(await session.step(lambda: runtime.engine.logits(session.state)))
        tokens = [token.id async for token in ctx.generate(max_new_tokens=NEW, ignore_eos=True)]
    gap, own = _gap(torch.stack(rows).float(), expected.logits[BEHIND]), expected.own_gap
    of_pieces = TOLERANCE <= gap <= 2 * own <= 2 * OF_PIECES
    generates = not isinstance(expected.tokens, str)
    same = tokens == expected.tokens
    equal = (gap < TOLERANCE or of_pieces) and (same or not generates)
    return {"verdict": EQUAL if equal else DIFFERS, "gap": _rounded(gap),
            **({"own_gap": _rounded(own)} if gap >= TOLERANCE else {}),
            "tokens": "same" if same else "other" if generates else f"stock cannot generate: {expected.tokens}"}


async def evicts(opened: Callable[..., Runtime], policy: str) -> dict[str, Any]:
    """Nothing where the memory keeps to its budget and its logits are finite; else what is wrong, as a verdict."""
    async with (opened(policy=policy, budget=BUDGET, chunk_size=CHUNK) as runtime, runtime.open(raw=True) as ctx):
        await ctx.feed(ids()[0].tolist())
        async for _ in ctx.generate(max_new_tokens=NEW, ignore_eos=True):
            pass
        session = ctx._session
        await session.commit()
        logits = await session.step(lambda: runtime.engine.logits(session.state))
        kept = list(zip(session.state.store.counts, runtime.engine.budgets, strict=True))
    if not torch.isfinite(logits).all():
        return {"verdict": BADEVICT, "says": f"{policy}: logits are not finite"}
    over = [f"{count} of {budget}" for count, budget in kept if count > budget]
    return {"verdict": BADEVICT, "says": f"{policy}: layers keep {', '.join(over)} units"} if over else {}


def failed(error: BaseException) -> dict[str, Any]:
    """The verdict of an error of the runtime. A typed error is `WRAPPED` if it says what the error that caused it said,
    or its name."""
    if not isinstance(error, LocretError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"verdict": RAW, "says": f"{_words(error)} ({Path(last.filename).name}:{last.lineno})"}
    cause = error.__cause__
    raw = cause is not None and not isinstance(cause, LocretError)
    repeats = raw and (type(cause).__name__ in str(error) or (str(cause) and str(cause) in str(error)))
    return {"verdict": WRAPPED if repeats else REFUSED, "says": _words(error)}


def _gap(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences of logits, in standard deviations of those that are expected."""
    return ((found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-6)).item()


def _rounded(gap: float) -> float:
    return float(f"{gap:.2g}")


def _within(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, STEP_S))


def _words(error: BaseException) -> str:
    """An error in one line, of at most 600 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
