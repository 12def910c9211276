"""What a user asks of an evaluation, in the words of the command line, and what these words mean: axes, files and text.

Importing this loads no torch, so that the command line can take its defaults from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from locret_stream.budgets import usual_memory
from locret_stream.config import Budget
from locret_stream.errors import ConfigError
from locret_stream.host_tier import HostTier
from locret_stream.named_models import named_model

if TYPE_CHECKING:
    from locret_stream.evaluation.documents import FileTask
    from locret_stream.evaluation.plan import Axes
    from locret_stream.evaluation.suite import Text
    from locret_stream.policies import Knob

Value = TypeVar("Value")

MOST_WINDOW = 1 << 20
MARKERS, CHAT = "markers", "chat"  # each stands for all tasks of that form
POLICIES = ("locret", "streaming_llm", "random", "oracle", "full")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `locret-stream eval` that say what is run; an empty tuple stands for the default.

    Args:
        model: one with a name ("bundled", "smollm2") brings its own retaining heads, budget and chunk size.
        heads: "[POLICY=]FOLDER"; the policy is locret where none is named.
        policies: by default `POLICIES`, without "full" for the bundled model, which never learnt to hold everything.
        tasks: names of `suite.TASKS`, "markers" or "chat"; by default "sentences", and none where there are files.
        files: "[BENCHMARK[/TASK]=]PATH". raw: they are read and asked without the tokenizer's chat template.
        budgets: units per KV head, mean over the layers.
        lengths: tokens of a stream. questions: at least so many in a cell.
        allocations: as in `Budget`, shares with commas between them.
        knobs: "POLICY.NAME=VALUE"; given again, another value of that knob.
        store_bits: of a channel of the K and V that are kept. exact: how exact units in the host's memory serve those
            in fewer bits than 16. by_head: as in `Budget`, for policies that can.
        focus: the first question of each stream is announced before the stream begins, and is the only one asked.
        text: the file whose lines the facts lie in; None for the sources of Python's standard library.
    """

    model: str = "bundled"
    heads: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    raw: bool = False
    budgets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (1024, 16_384)
    questions: int = 64
    chunk_size: int | None = None
    sinks: int = 4
    stabilizers: int = 32
    allocations: tuple[str, ...] = ("auto",)
    knobs: tuple[str, ...] = ()
    store_bits: tuple[int, ...] = (16,)
    exact: HostTier | None = None
    by_head: bool = False
    focus: bool = False
    text: Path | None = None

    def axes(self, window: int = MOST_WINDOW) -> Axes:
        """What is crossed, each value once and in the order given. Raises ConfigError: a value that cannot be.

        Args:
            window: of the model, from which budget and chunk size follow where none are given.
        """
        from locret_stream.evaluation import plan, suite

        named = named_model(self.model)
        tasks = [name for asked in self.tasks or (() if self.files else ("sentences",))
                 for name in {MARKERS: suite.MARKER_TASKS, CHAT: suite.CHAT_TASKS}.get(asked, (asked,))]
        for name in tasks:
            suite.task_named(name)  # raises ConfigError
        folders = head_folders(self.heads)
        if named:
            folders.setdefault("locret", [str(named.heads)])
        policies = _once(self.policies or [name for name in POLICIES if not (named and named.bounded
                                                                             and name == "full")])
        for name in policies:
            plan.with_heads(name)  # raises UnknownPolicy
        for name in sorted(set(folders) - {*policies, "locret"}):  # those of locret may be given for their shares alone
            raise ConfigError(f"--heads {name}={folders[name][0]}: policy {name!r} is not run; expected --policy "
                              f"{name} with them")
        usual_budget, usual_chunk = (named.budget, named.chunk_size) if named else usual_memory(window)
        return plan.Axes(
            tasks=_once(tasks), policies=policies, budgets=_once(self.budgets or (usual_budget,)),
            lengths=_once(self.lengths), allocations=_once(map(allocation_of, self.allocations)),
            heads={name: _once(folders[name]) for name in folders if name in policies},
            shares_of=next(iter(folders.get("locret", ())), ""), knobs=knob_values(self.knobs),
            questions=self.questions, chunk_size=self.chunk_size or usual_chunk, sinks=self.sinks,
            stabilizers=self.stabilizers, focus=self.focus, store_bits=_once(self.store_bits),
            exact=self.exact, by_head=self.by_head)

    def documents(self) -> list[FileTask]:
        """The files as tasks, each content once. Raises ConfigError: one that cannot be run, or `raw` without any."""
        from locret_stream.evaluation.documents import file_task

        if self.raw and not self.files:
            raise ConfigError("--raw is about files; expected a --file with it")
        tasks = [file_task(value, self.raw) for value in self.files]
        return list({(task.name, task.digest): task for task in tasks}.values())

    def lines(self) -> Text:
        """The text that facts lie in. Raises ConfigError: the file has no lines."""
        from locret_stream.evaluation import suite

        return suite.STDLIB if self.text is None else suite.text_of(self.text)


def _once(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def allocation_of(value: str) -> str | tuple[float, ...]:
    """The name of an allocation, or shares from numbers with commas between them. Raises ConfigError."""
    try:
        shares: str | tuple[float, ...] = tuple(float(share) for share in value.split(","))
    except ValueError:
        shares = value
    return Budget(units=1, sinks=0, stabilizers=0, allocation=shares).allocation


def head_folders(values: Iterable[str]) -> dict[str, list[str]]:
    """Folders of heads by policy; "locret" where none is named. Raises ConfigError: no such folder or policy."""
    from locret_stream.evaluation import plan

    folders: dict[str, list[str]] = {}
    for value in values:
        policy, equals, folder = value.partition("=")
        if not equals or Path(value).is_dir():
            policy, folder = "locret", value
        if not plan.with_heads(policy):
            raise ConfigError(f"--heads {value}: policy {policy!r} scores without heads; expected [POLICY=]FOLDER")
        if not Path(folder).is_dir():
            raise ConfigError(f"--heads {value}: no folder {folder!r}; expected [POLICY=]FOLDER, made by "
                              "`locret-stream train-heads`")
        folders.setdefault(policy, []).append(folder)
    return folders


def knob_values(settings: Iterable[str]) -> dict[str, dict[str, tuple[Knob, ...]]]:
    """The values of each knob of each policy. Raises ConfigError: a setting that is not POLICY.NAME=VALUE."""
    values: dict[str, dict[str, tuple[Knob, ...]]] = {}
    for setting in settings:
        left, equals, value = setting.partition("=")
        policy, dot, name = left.partition(".")
        if not (equals and dot and policy and name and value):
            raise ConfigError(f"--knob {setting}: expected POLICY.NAME=VALUE, such as h2o.recent=0.1")
        knobs = values.setdefault(policy, {})
        knobs[name] = _once((*knobs.get(name, ()), _number_or_word(value)))
    return values


def _number_or_word(word: str) -> Knob:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word
