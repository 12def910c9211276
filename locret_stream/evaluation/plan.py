"""Which cells a run has: tasks, policies, budgets and lengths, crossed; and whether they can run, before any does."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from locret_stream.config import check_shared, check_store_bits, check_tier, check_window
from locret_stream.errors import ConfigError, HeadsMismatch, UnknownPolicy, WindowExceeded
from locret_stream.evaluation import suite
from locret_stream.evaluation.cells import Cell, expect_streams
from locret_stream.evaluation.documents import FileTask
from locret_stream.evaluation.runner import ORACLES, Bench
from locret_stream.evaluation.variants import FULL
from locret_stream.heads import RetainingHeads
from locret_stream.host_tier import HostTier
from locret_stream.policies import POLICIES, Knob, Policy, can_share, make_policy, typed_knobs


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """What is crossed; every tuple is one axis.

    Args:
        heads: folders of heads of each policy that scores with heads. shares_of: the folder of heads whose budget
            shares the allocation "adaptive" takes for every other policy.
        knobs: of each policy the values that each of its knobs has.
        questions: at least so many in a cell, of a file no more than it has; of text there are `suite.TEXT_STREAMS`
            streams.
        focus: see `Cell`; it takes one stream for each question.
    """

    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    lengths: tuple[int, ...]
    allocations: tuple[str | tuple[float, ...], ...] = ("uniform",)
    heads: dict[str, tuple[str, ...]] = {}
    shares_of: str = ""
    knobs: dict[str, dict[str, tuple[Knob, ...]]] = {}
    questions: int = 64
    chunk_size: int = 128
    sinks: int = 4
    stabilizers: int = 16
    focus: bool = False
    store_bits: tuple[int, ...] = (16,)
    exact: HostTier | None = None
    by_head: bool = False


def with_heads(policy: str) -> bool:
    """Whether that policy scores with retaining heads. Raises UnknownPolicy, with the closest name."""
    kinds: dict[str, type[Policy]] = {**POLICIES, **ORACLES}
    if policy not in kinds:
        raise UnknownPolicy(policy, kinds)
    return "heads" in inspect.signature(kinds[policy]).parameters


def planned(axes: Axes, documents: Sequence[FileTask] = ()) -> list[Cell]:
    """All cells, those of one stream length and task together, then those of files, whose lengths are their own.

    "full" has no budget, and so one cell for each of its lengths and tasks.

    Raises:
        ConfigError: an axis that is empty (instead of tasks, files will do), an unknown task or policy, a policy
            without the heads it needs, or knobs of a policy that is not run or that does not have them.
    """
    needless = {"budgets"} if set(axes.policies) <= {FULL} else set()
    needless |= {"tasks", "lengths"} if documents else set()
    for bits in axes.store_bits:
        check_store_bits(bits)
    if axes.exact is not None and set(axes.store_bits) == {16}:
        check_tier(axes.exact, (16, 16))  # raises
    check_shared(axes.by_head, axes.exact)
    for name in ("tasks", "policies", "budgets", "lengths", "allocations", "store_bits"):
        if not getattr(axes, name) and name not in needless:
            raise ConfigError(f"evaluation: no {name}; expected at least one")
    tasks = [suite.task_named(name) for name in axes.tasks]
    if axes.focus and any(task.kind == "bits" for task in tasks):
        raise ConfigError("text asks nothing, so there is nothing to focus on; expected other tasks with a focus")
    variants = {policy: _variants(axes, policy) for policy in axes.policies}
    not_run = sorted(set(axes.knobs) - set(axes.policies))
    if not_run:
        raise ConfigError(f"knobs are given for policy {not_run[0]!r}; expected one of those that are run: "
                          f"{', '.join(axes.policies)}")
    cells = []
    for length, task in [*itertools.product(axes.lengths, tasks), *((0, document) for document in documents)]:
        full = Cell(task=task.name, policy=FULL, length=length, chunk_size=axes.chunk_size, focus=axes.focus,
                    streams=task.streams(axes.questions, axes.focus),
                    file=task.path if isinstance(task, FileTask) else "")
        for policy in axes.policies:
            cells += [full] if policy == FULL else [
                msgspec.structs.replace(full, policy=policy, units=units, sinks=axes.sinks,
                                        stabilizers=axes.stabilizers, store_bits=bits,
                                        exact=None if bits == 16 else axes.exact,
                                        by_head=(axes.by_head and policy in POLICIES
                                                 and can_share(POLICIES[policy])),
                                        **variant)
                for units, bits, variant in itertools.product(axes.budgets, axes.store_bits, variants[policy])]
    return list({msgspec.json.encode(cell): cell for cell in cells}.values())


def _variants(axes: Axes, policy: str) -> list[dict[str, Any]]:
    """Allocation, heads and knobs of each variant of a policy; a policy that scores without heads has heads only for
    their budget shares."""
    takes_heads, knobs = with_heads(policy), axes.knobs.get(policy, {})
    folders = axes.heads.get(policy, ())
    if knobs and policy in ORACLES:
        raise ConfigError(f"knobs {', '.join(knobs)} are given for policy {policy!r}, which has none")
    if takes_heads and not folders:
        raise ConfigError(f"policy {policy!r} needs retaining heads; expected their folder, made by `locret-stream "
                          f"train-heads`: --heads {'' if policy == 'locret' else f'{policy}='}FOLDER")
    if folders and not takes_heads:
        raise ConfigError(f"heads are given for policy {policy!r}, which scores without; expected them for one of "
                          f"{', '.join(name for name in POLICIES if with_heads(name))}")
    settings = [typed_knobs(policy, dict(zip(knobs, values, strict=True))) if knobs else {}
                for values in itertools.product(*knobs.values())]
    variants = []
    for allocation, chosen, heads in itertools.product(axes.allocations, settings,
                                                       folders if takes_heads else (axes.shares_of,)):
        resolved = _resolved(allocation, heads)
        variants.append({"allocation": resolved, "heads": heads if takes_heads or resolved == "adaptive" else "",
                         "knobs": chosen})
    return variants


def _resolved(allocation: str | tuple[float, ...], heads: str) -> str | tuple[float, ...]:
    """What "auto" stands for, so that each division of a budget has one name. Raises HeadsMismatch."""
    if allocation != "auto":
        return allocation
    return "adaptive" if heads and RetainingHeads.read_config(heads).budget_shares else "uniform"


def checked(cells: Iterable[Cell], bench: Bench) -> tuple[list[Cell], dict[str, int]]:
    """The cells that can run, and of the others how many for which reason: "full" on streams beyond the window, and
    oracles on text and on files.

    Raises:
        ConfigError: no cell can run.
        ConfigError, HeadsMismatch, WindowExceeded: a cell cannot run for any other reason. Nothing has run yet.
    """
    good: list[Cell] = []
    skipped: Counter[str] = Counter()
    heads: dict[str, RetainingHeads | None] = {"": None}
    beyond: dict[bytes, str] = {}  # by the streams of "full": why they do not fit
    whole: set[bytes] = set()  # streams that are known to hold whole lines
    for cell in cells:
        expect_streams(cell)
        if cell.heads not in heads:
            heads[cell.heads] = _loaded(cell.heads, bench)
        streams = msgspec.json.encode(msgspec.structs.replace(  # what says which streams, and how they are cut
            cell, policy=FULL, units=None, sinks=0, stabilizers=0, knobs={}, heads="", allocation="", store_bits=16,
            exact=None))
        in_bits = bench.task(cell).kind == "bits"
        reason = ""
        if cell.units is None:
            if streams not in beyond:
                beyond[streams] = _beyond_window(cell, bench)
            reason = beyond[streams]
        else:
            _expect_budget(cell, heads[cell.heads], bench)
            if cell.file and cell.policy in ORACLES:
                reason = f"{cell.policy} on files, which do not say from which lines answers follow"
            elif cell.policy in ORACLES and in_bits:
                reason = f"{cell.policy} on {cell.task}, of which nothing is asked that it could know"
        if reason:
            skipped[reason] += 1
            continue
        if in_bits and streams not in whole:
            bench.expect_whole_lines(cell)
            whole.add(streams)
        good.append(cell)
    if not good:
        raise ConfigError(f"no cell can run: {'; '.join(skipped)}; expected another policy or task, or, for full, "
                          "shorter streams")
    return good, dict(skipped)


def _loaded(folder: str, bench: Bench) -> RetainingHeads:
    heads = RetainingHeads.load(folder)
    try:
        heads.check_fits(*bench.shape)
    except HeadsMismatch as error:
        raise HeadsMismatch(f"{folder}: {error}") from None
    return heads


def _expect_budget(cell: Cell, heads: RetainingHeads | None, bench: Bench) -> None:
    """Raises ConfigError and WindowExceeded as the runtime and its engine do."""
    shape, budget = bench.shape[0], cell.budget
    assert budget is not None
    policy = ORACLES[cell.policy]() if cell.policy in ORACLES else make_policy(cell.policy, cell.knobs, heads)
    budgets = budget.per_layer(shape, heads.config.budget_shares if heads else None,
                               most=shape.window - cell.chunk_size)
    check_window(budgets, cell.chunk_size, shape)
    focus = bench.longest_focus(cell) if cell.focus else 0
    for units, window in zip(budgets, shape.sliding, strict=True):
        sinks, stabilizers = (0, 0) if window else policy.protection(units, cell.sinks + focus, cell.stabilizers)
        if sinks + stabilizers > units or (not window and units <= cell.sinks + cell.stabilizers + focus):
            included = f", a focus of {focus} tokens included" if focus else ""
            raise ConfigError(f"policy {cell.policy!r} protects {sinks} + {stabilizers} units of {units}{included}; "
                              "expected a larger budget")


def _beyond_window(cell: Cell, bench: Bench) -> str:
    """Why the full cache does not fit, "" where it does. Streams are counted only where their length does not tell."""
    shape = bench.shape[0]
    if cell.file:
        return _document_beyond(cell, bench)
    misfit = f"with chunks of {cell.chunk_size:,} does not fit the model's window of {shape.window:,}"
    if cell.length + cell.chunk_size > shape.window:
        return f"full at {cell.length:,} tokens {misfit}"
    budget = bench.budget(cell)
    try:
        check_window(budget.per_layer(shape), cell.chunk_size, shape)
    except WindowExceeded:
        return (f"full on {cell.task} at {cell.length:,} tokens: a stream of {budget.units:,} tokens with question and "
                f"answer, {misfit}")
    return ""


def _document_beyond(cell: Cell, bench: Bench) -> str:
    """The same for the documents of a file, which are counted only up to the first that does not fit."""
    window = bench.shape[0].window
    for number in cell.seeds:
        room = bench.room(cell, number)
        if room + cell.chunk_size > window:
            return (f"full on {cell.task}: document {number}, of {room:,} tokens with question and answer, does not "
                    f"fit the model's window of {window:,}")
    return ""
