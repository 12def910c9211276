"""The messages of a thread as the log has them: content without frames, under the role that each was given with.

Boundaries keep where the last 512 messages stand in the log (`places`), so that a page costs what it shows; whatever
stands before them is one item of unknown role, and nothing is guessed from what the log looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from locret_stream.context.cancelling import to_the_end
from locret_stream.conversation.boundaries import Boundary
from locret_stream.conversation.boundary_pruning import tip_of, untold
from locret_stream.conversation.places import UNKNOWN, Place, packed, unpacked
from locret_stream.conversation.standing import alone
from locret_stream.conversation.thread_memory import MOST, read_log_of
from locret_stream.conversation.threads import Threads
from locret_stream.errors import InputError, SnapshotNotFound
from locret_stream.snapshot.transcript import Transcript


class Item(NamedTuple):
    """One message: tokens place.start .. place.end-1. `shown`: how many of them the text has, at most 4,096."""

    place: Place
    shown: int
    text: str


class Items(NamedTuple):
    """A page. `more`: there are others behind it, in its order."""

    items: list[Item]
    more: bool


async def items(threads: Threads, name: str, *, limit: int, after: str = "", newest_first: bool = False
                ) -> Items | None:
    """Items of a thread; None if there is no such thread.

    Args:
        after: the id of the item before the first one; "" for the first.

    Raises:
        InputError: there is no item of that id. Otherwise as `thread_memory.memory_text`.
    """
    def read(transcript: Transcript, decode: Callable[[list[int]], str], tip: Boundary) -> Items:
        places = _places(tip)
        if newest_first:
            places.reverse()
        if after:
            places = places[_number(places, after, name) + 1:]
        return Items(shown(threads, places[:limit], transcript, decode), len(places) > limit)

    found = await read_log_of(threads, name, read)
    if found is None:
        async with alone(threads, name) as thread:
            return None if untold(thread.snapshots) is None else Items([], False)
    return found


def shown(threads: Threads, places: list[Place], transcript: Transcript, decode: Callable[[list[int]], str]
          ) -> list[Item]:
    """The messages that stand at these places of a log."""
    cuts = transcript.cuts([(place.start, min(place.end, place.start + MOST)) for place in places])
    return [Item(place, len(ids), decode(_said(threads, place, ids.tolist())))
            for place, ids in zip(places, cuts, strict=True)]


async def item(threads: Threads, name: str, item_id: str) -> Item | None:
    """The item of an id; None if there is no such thread. Raises as `items`."""
    async with alone(threads, name) as thread:
        tip = tip_of(thread.snapshots, thread.live)
        places = [] if tip is None else _places(tip)
    at = _number(places, item_id, name)
    page = await items(threads, name, limit=1, after=places[at - 1].id if at else "")
    if page is None or not page.items or page.items[0].place.id != item_id:
        raise _no_item(name, item_id)
    return page.items[0]


async def take_item_back(threads: Threads, name: str, item_id: str) -> None:
    """Undo what the thread was told last, if that is this item alone: the thread is where it was before.

    Raises:
        SnapshotNotFound: there is no such item. InputError: it is not the last one, or no boundary ends right before
            it. StateLost: what was told last is gone. SnapshotError: that boundary cannot be loaded, or what is behind
            it not deleted.
    """
    async with alone(threads, name) as thread:
        tip = thread.tip(name)
        places = [] if tip is None else _places(tip)
        at = _number(places, item_id, name)
        assert tip is not None
        before = [(number, boundary) for number, boundary in thread.snapshots.values()
                  if (boundary.appended or boundary.stream or not boundary.tokens)
                  and (_alike(_places(boundary), places[:at]) if at else not boundary.tokens)]
        if at + 1 != len(places) or not before:
            why = "others were told behind it" if at + 1 != len(places) else (
                "no boundary is kept that ends right before it: it was told together with others, or is an answer")
            raise InputError(f"item {item_id!r} of {name!r} cannot be taken back: {why}; expected the last one, told "
                             "alone, or a rewind to an earlier boundary")
        number, boundary = max(before, key=lambda row: row[0])
        await thread.move_to(boundary)
        await to_the_end(thread.delete_after(number))


def _said(threads: Threads, place: Place, ids: list[int]) -> list[int]:
    """The same without control tokens that are none of its text. Marks of a call may be some that are: of an answer,
    only what ended it is left out."""
    if place.role == "assistant":
        while ids and ids[-1] in threads.template.frames.eos_ids:
            ids = ids[:-1]
    elif place.role != UNKNOWN:
        ids = [token for token in ids if token not in threads.runtime.codec.special_ids]
    return ids


def _alike(one: list[Place], other: list[Place]) -> bool:
    """Whether two boundaries' places are the same, as far as both have their roles."""
    first, second = ([place for place in places if place.role != UNKNOWN] for places in (one, other))
    count = min(len(first), len(second))
    return first[-count:] == second[-count:] if count else one == other


def _places(boundary: Boundary) -> list[Place]:
    return unpacked(boundary.places or packed(b"", boundary.tokens, []))


def _number(places: list[Place], item_id: str, name: str) -> int:
    at = next((at for at, place in enumerate(places) if place.id == item_id), None)
    if at is None:
        raise _no_item(name, item_id)
    return at


def _no_item(name: str, item_id: str) -> SnapshotNotFound:
    return SnapshotNotFound(f"{name!r} has no item {item_id!r:.80} (any more); expected an id that the list of items "
                            "tells")
