"""Bodies of requests, read and checked. What a body asks for and cannot be done is refused; what has no effect on the
answer is passed over, and the answer says so."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from locret_stream.conversation.messages import unread_part
from locret_stream.serving.errors import ApiError

T = TypeVar("T", bound=msgspec.Struct)
Json = dict[str, Any]
DEEPEST = 64  # levels of a body
MOST_PARTS = 200_000  # objects and lists of a body: everybody waits while they are looked at
# Fields without an effect on what is answered here, and that nobody would miss.
SILENT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
          "prompt_cache_retention", "session_id", "include", "stream_options", "truncation", "model", "stream",
          "context_management"}
_OFF = {("min_p", 0), ("top_k", 0), ("top_k", -1)}  # as other servers write that these do nothing
MOST_STOPS, LONGEST_STOP = 16, 256  # each is looked for behind every token; characters


def decode(raw: bytes) -> Json:
    """A JSON object. Raises ApiError 400."""
    if not raw.strip():
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; expected a JSON object", code="invalid_json")
    check_depth(body)
    return body


def check_depth(value: Any) -> None:
    """Raises ApiError 400 for a value of more levels than templates and digests can follow, or of too many parts."""
    level, depth, parts = [value], 0, 0
    while level:
        if depth > DEEPEST:
            raise ApiError(400, f"the body has more than {DEEPEST} levels; expected fewer", code="too_deep")
        parts += len(level)
        if parts > MOST_PARTS:
            raise ApiError(400, f"the body has more than {MOST_PARTS:,} objects and lists; expected fewer",
                           code="too_many_parts")
        level = [inner for outer in level for inner in (
            outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, (dict, list))]
        depth += 1


def as_struct(body: Mapping[str, Any], kind: type[T]) -> T:
    """The fields of a body that a struct has; 100.0 is a whole number. Raises ApiError 400, with the path of the
    field."""
    try:
        return msgspec.convert({**body, **{name: as_whole(body[name]) for name in _integers(kind) & body.keys()}}, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        if (missing := re.search(r"missing required field `(\w+)`", text)) is not None:
            path = f"{path}.{missing[1]}" if path else missing[1]
        raise ApiError(400, f"{path or 'the body'}: {text}", param=path or None, code="invalid_value") from None


@functools.cache
def _integers(kind: type) -> frozenset[str]:
    """The fields of a struct that take whole numbers alone."""
    hints = ((name, get_args(hint) or (hint,)) for name, hint in get_type_hints(kind).items())
    return frozenset(name for name, kinds in hints if int in kinds and float not in kinds)


def as_whole(value: Any) -> Any:
    """A float that is a whole number as that number, as JSON has one kind of numbers; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_whole(given: str) -> int | None:
    """A whole number of a query, of at most 15 digits; None for anything else."""
    match = re.fullmatch(r"([0-9]{1,15})(\.0{0,15})?", given)
    return int(match[1]) if match else None


class Sampled(msgspec.Struct, kw_only=True):
    """Fields of `Sampling`, in either API's spelling."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    focus: str | None = None
    recall: bool | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):  # an empty string stops nothing
            self.stop = [stop for stop in self.stop if stop]

    def sampling(self, usual: int, most: int) -> Json:
        """Fields of `Sampling`. Raises ApiError 400: more tokens than the server gives."""
        named = [(name, getattr(self, name)) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens")]
        name, count = next(((name, count) for name, count in named if count is not None), ("max_tokens", usual))
        if not 1 <= count <= most:
            raise ApiError(400, f"{name} is {count}; expected 1 to {most} (serve --max-tokens)", param=name)
        out: Json = {"max_new_tokens": count}
        for each in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos"):
            value = getattr(self, each)
            if value is not None and (each, value) not in _OFF:
                out[each] = value
        if self.stop:
            out["stop"] = stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            longest = max(map(len, stops))
            if len(stops) > MOST_STOPS or longest > LONGEST_STOP:
                raise ApiError(400, f"stop has {len(stops):,} strings, the longest of {longest:,} characters; expected "
                               f"at most {MOST_STOPS}, of {LONGEST_STOP} characters", param="stop")
        return out

    def without_effect(self) -> list[str]:
        """Fields that shape the noise of an answer, where it has none, as the temperature is 0 unless it is given."""
        return [] if self.temperature else [
            name for name in ("top_p", "top_k", "min_p", "seed") if (value := getattr(self, name)) is not None
            and (name, value) not in {*_OFF, ("top_p", 1)}]


def refuse(body: Mapping[str, Any], refused: Iterable[tuple[str, Any, str]]) -> None:
    """Raises ApiError 400 for a field that asks for what there is not.

    Args:
        refused: (field, the value that asks for nothing, what to do instead).
    """
    for name, nothing, instead in refused:
        value = body.get(name)
        if value is not None and value != nothing:
            raise ApiError(400, f"{name} is not offered here; expected {instead}", param=name,
                           code="unsupported_parameter")


def ignored(body: Mapping[str, Any], kind: type[msgspec.Struct], used: Iterable[str] = ()) -> list[str]:
    """Fields of a body that have no effect and that somebody might miss."""
    known = {*kind.__struct_fields__, *used, *SILENT}
    return sorted(name for name, value in body.items() if name not in known and value is not None
                  and not (name == "parallel_tool_calls" and value is True))


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, `where` its field. Raises ApiError 400 for images, audio and files."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is a {type(content).__name__}; expected text, or a list of its parts",
                       param=where)
    out = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = (part.get("refusal") if kind == "refusal" else part.get("text")) if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ApiError(400, unread_part(where.rpartition(".")[0], number, kind), param=f"{where}[{number}]",
                           code="unsupported_content")
        out.append(text)
    return "".join(out)
