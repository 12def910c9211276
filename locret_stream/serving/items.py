"""Items of a conversation as OpenAI's API has them. Nothing here knows how they are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from locret_stream.serving.bodies import Json, read_whole
from locret_stream.serving.errors import ApiError

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.items import Item

MOST = 100  # items of a page
USUAL = 20


def read_page(query: Mapping[str, str]) -> tuple[int, str, bool]:
    """(limit, after, whether the newest comes first) of a query. Raises ApiError 400."""
    given, order = query.get("limit", str(USUAL)), query.get("order", "desc")
    limit = read_whole(given) or 0
    if not 1 <= limit <= MOST:
        raise ApiError(400, f"limit is {given!r:.40}; expected 1 to {MOST}", param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order!r:.40}; expected asc or desc", param="order")
    return limit, query.get("after", ""), order == "desc"


def item_json(item: Item, session: str) -> Json:
    """A message. `locret` says where it stands in the log, and what of it was left out is told in its text, too."""
    place, text = item.place, item.text
    size = place.end - place.start
    if item.shown < size:
        text += (f"\n[tokens {item.shown:,} to {size:,} of this item are not shown: GET /v1/sessions/{session}/text"
                 f"?start={place.start + item.shown}&end={place.end}]")
    part: Json = ({"type": "output_text", "text": text, "annotations": [], "logprobs": []} if place.role == "assistant"
                  else {"type": "input_text", "text": text})
    return {"id": place.id, "type": "message", "status": "completed", "role": place.role, "content": [part],
            "locret": {"start": place.start, "end": place.end, "stream": place.stream, "cut": item.shown < size}}


def page_json(items: list[Json], *, more: bool) -> Json:
    return {"object": "list", "data": items, "has_more": more, "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None}
