"""The server's routes: HTTP in OpenAI's language around an `AnyService`. Nothing here loads torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from locret_stream.serving import names
from locret_stream.serving.any_service import AnyService
from locret_stream.serving.bodies import Json, decode, read_whole
from locret_stream.serving.chat import completion
from locret_stream.serving.errors import ApiError
from locret_stream.serving.ingest import ingest, ingest_state
from locret_stream.serving.items import item_json, page_json, read_page
from locret_stream.serving.keys import Keys
from locret_stream.serving.metrics import CONTENT_TYPE
from locret_stream.serving.responses import read_messages
from locret_stream.serving.streams import error_response, json_response, stream, while_there

MOST_BODY = 16 << 20  # bytes of a JSON body; streams have no limit
BODY_S = 60.0  # seconds that a JSON body may take to come
LOCAL = {"localhost", "127.0.0.1", "::1"}
PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
Handler = Callable[[Request, AnyService], Awaitable[Response]]


def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A handler for callers who may; its errors become responses."""
    async def run(request: Request) -> Response:
        service: AnyService = request.app.state.service
        request.state.read = False
        try:
            _check_caller(request)
            request.state.tenant = request.app.state.keys.tenant(request.headers.get("authorization", ""))
            return await handler(request, service)
        except ClientDisconnect:
            return Response(status_code=499)
        except asyncio.CancelledError:
            if not service.draining:
                raise
            return error_response(request, ApiError(503, "the server is shutting down", kind="server_error",
                                                    code="shutting_down", retry_s=2), unread=True)
        except Exception as error:
            return error_response(request, error,
                                  unread=request.method in ("POST", "PUT") and not request.state.read)

    return run


def _check_caller(request: Request) -> None:
    """Without keys, only programs of this machine may call, and no page that a browser of it has open.

    Raises ApiError 403."""
    state = request.app.state
    if state.keys:
        return
    host = _host_of(request.headers.get("host", ""))
    origin = request.headers.get("origin")
    if host not in state.hosts or (origin is not None and _host_of(origin.partition("://")[2]) not in state.hosts):
        beside = "" if origin is None else f" and origin {origin!r:.80}"
        raise ApiError(403, f"found host {host!r:.80}{beside}; expected one of {', '.join(sorted(state.hosts))}: a "
                       "server without --api-key answers this machine only",
                       kind="permission_error", code="foreign_origin")


def _host_of(value: str) -> str:
    value = value.strip().lower()
    return value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]


async def read_body(request: Request) -> Json:
    """The JSON object that a request brings. Raises ApiError 400, 408, 413, 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "") or (kind == "" and request.headers.get("content-length", "0") != "0"):
        raise ApiError(415, f"content-type is {kind!r:.80}; expected application/json", code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BODY:
                    raise ApiError(413, f"the body is longer than {MOST_BODY:,} bytes; expected less, or a stream to "
                                   "POST /v1/sessions/<session>/ingest", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body was not here within {BODY_S:.0f} s", code="slow_body") from None
    request.state.read = True
    return decode(bytes(body))


def thread_of(request: Request, session: str | None = None) -> tuple[str, str]:
    """(session, thread) that the path, or the caller, names."""
    name = names.check_session(request.path_params["session"] if session is None else session)
    return name, request.state.tenant + name


# -- OpenAI's endpoints -----------------------------------------------------------------------------------------


async def chat_completions(request: Request, service: AnyService) -> Response:
    body = await read_body(request)
    session = names.session_of(request.headers, body)
    chunks = service.chat(body, None if session is None else request.state.tenant + session,
                          request.state.tenant)
    if body.get("stream"):
        return await stream(request, chunks, named=False, failed=lambda error: error.body)
    async with contextlib.aclosing(chunks):
        return json_response(await while_there(request, completion(chunks)))


async def responses(request: Request, service: AnyService) -> Response:
    body = await read_body(request)
    response, events = service.respond(body, names.session_of(request.headers, body), request.state.tenant)
    if body.get("stream"):
        return await stream(request, events, named=True, failed=response.failed)

    async def whole() -> Json:
        last: Json = {}
        async for event in events:
            last = event
        return last["response"]

    async with contextlib.aclosing(events):
        return json_response(await while_there(request, whole()))


async def create_conversation(request: Request, service: AnyService) -> Response:
    body = await read_body(request)
    items = body.get("items") or []
    if not isinstance(items, list):
        raise ApiError(400, "items is no list", param="items")
    if items:
        read_messages(items, field="items")  # raises before there is a conversation
    session, thread = thread_of(request, names.new_conversation())
    try:
        await while_there(request, service.create(thread))
        if items:
            await while_there(request, service.tell(thread, items))
    except BaseException:  # nobody knows of it
        with contextlib.suppress(Exception):
            await service.forget(thread, session)
        raise
    return json_response(_conversation(session) | {"metadata": body.get("metadata") or {}})


async def conversation(request: Request, service: AnyService) -> Response:
    session, thread = thread_of(request)
    if request.method == "DELETE":
        await service.forget(thread, session)
        return json_response({"id": session, "object": "conversation.deleted", "deleted": True})
    await while_there(request, service.session(thread, session))  # raises if there is none
    return json_response(_conversation(session))


def _conversation(session: str) -> Json:
    return {"id": session, "object": "conversation", "created_at": names.created_at(session), "metadata": {}}


async def conversation_items(request: Request, service: AnyService) -> Response:
    if request.method == "POST":
        return await add_items(request, service)
    if request.method == "DELETE":  # else the path would be read as a conversation of that name
        raise ApiError(405, "the list of items takes no DELETE; expected the id of one behind it",
                       code="method_not_allowed")
    session, thread = thread_of(request)
    limit, after, newest_first = read_page(request.query_params)
    return json_response(await while_there(request, service.items(thread, session, limit, after, newest_first)))


async def conversation_item(request: Request, service: AnyService) -> Response:
    (session, thread), item_id = thread_of(request), request.path_params["item"]
    if request.method == "DELETE":
        await while_there(request, service.drop_item(thread, item_id))
        return json_response(_conversation(session))
    return json_response(await while_there(request, service.item(thread, session, item_id)))


async def add_items(request: Request, service: AnyService) -> Response:
    body, (session, thread) = await read_body(request), thread_of(request)
    items = body.get("items")
    if not isinstance(items, list) or not items:
        raise ApiError(400, "items is missing or empty; expected a list", param="items")
    await while_there(request, service.session(thread, session))  # raises if there is none
    told = await while_there(request, service.tell(thread, items))
    return json_response(page_json([item_json(each, session) for each in told], more=False))


async def models(request: Request, service: AnyService) -> Response:
    return json_response({"object": "list", "data": [_model(service)]})


async def model(request: Request, service: AnyService) -> Response:
    service.check_model({"model": request.path_params["model"]})
    return json_response(_model(service))


def _model(service: AnyService) -> Json:
    return {"id": service.model, "object": "model", "created": 0, "owned_by": "locret-stream"}


# -- sessions ---------------------------------------------------------------------------------------------------


async def sessions(request: Request, service: AnyService) -> Response:
    return json_response({"object": "list", "data": await service.sessions(request.state.tenant)})


async def session(request: Request, service: AnyService) -> Response:
    name, thread = thread_of(request)
    if request.method == "DELETE":
        await service.forget(thread, name)
        return json_response({"id": name, "object": "session.deleted", "deleted": True})
    return json_response(await while_there(request, service.session(thread, name)))


async def session_memory(request: Request, service: AnyService) -> Response:
    name, thread = thread_of(request)
    return json_response(await while_there(request, service.memory(thread, name)))


async def session_map(request: Request, service: AnyService) -> Response:
    _, thread = thread_of(request)
    return json_response(await while_there(request, service.map(
        thread, _number(request, "start", 0) or 0, _number(request, "end", None),
        _number(request, "columns", 400) or 0)))


async def session_text(request: Request, service: AnyService) -> Response:
    name, thread = thread_of(request)
    return json_response(await while_there(request, service.text(
        thread, name, _number(request, "start", 0) or 0, _number(request, "end", None),
        _number(request, "column", None))))


async def session_search(request: Request, service: AnyService) -> Response:
    _, thread = thread_of(request)
    return json_response(await while_there(request, service.search(
        thread, request.query_params.get("words", ""), _number(request, "limit", 4) or 0)))


def _number(request: Request, name: str, default: int | None) -> int | None:
    """A whole number of the query. Raises ApiError 400."""
    given = request.query_params.get(name)
    if given is None:
        return default
    number = read_whole(given)
    if number is None:
        raise ApiError(400, f"{name} is {given!r:.40}; expected a whole number", param=name)
    return number


async def ask(request: Request, service: AnyService) -> Response:
    body, (_, thread) = await read_body(request), thread_of(request)
    return json_response(await while_there(request, service.ask(thread, body)))


async def fork(request: Request, service: AnyService) -> Response:
    body, (_, thread) = await read_body(request), thread_of(request)
    new, other = thread_of(request, names.check_session(body.get("to"), "to", new=True))
    await while_there(request, service.fork(thread, other))
    return json_response({"object": "session", "id": new})


async def focus(request: Request, service: AnyService) -> Response:
    body, (name, thread) = await read_body(request), thread_of(request)
    return json_response(await while_there(request, service.focus(thread, name, body)))


async def rewind(request: Request, service: AnyService) -> Response:
    body, (name, thread) = await read_body(request), thread_of(request)
    return json_response(await while_there(request, service.rewind(thread, name, body.get("to"))))


async def snapshot(request: Request, service: AnyService) -> Response:
    name, thread = thread_of(request)
    return json_response(await while_there(request, service.snapshot(thread, name)))


async def upload(request: Request, service: AnyService) -> Response:
    _, thread = thread_of(request)
    if request.method == "GET":
        return await ingest_state(service, thread, request)
    return await ingest(service, thread, request, _number(request, "offset", 0) or 0)


# -- the process ------------------------------------------------------------------------------------------------


async def metrics(request: Request, service: AnyService) -> Response:
    return Response(await service.metrics_text(), media_type=CONTENT_TYPE)


async def health(request: Request) -> Response:
    return PlainTextResponse("ok")


async def ready(request: Request) -> Response:
    service: AnyService = request.app.state.service
    if service.ready:
        return PlainTextResponse("ready")
    return PlainTextResponse("draining" if service.draining else "starting", 503)


async def page(request: Request) -> Response:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={
        "content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"})


def _not_found(request: Request, error: Exception) -> Response:
    return error_response(request, ApiError(404, f"there is no {request.method} {request.url.path}; the endpoints are "
                                            "in docs/guides/server.md", code="unknown_url"))


def _not_allowed(request: Request, error: Exception) -> Response:
    return error_response(request, ApiError(405, f"{request.url.path} takes no {request.method}",
                                            code="method_not_allowed"))


def make_app(service: AnyService, keys: Mapping[str, str] | None = None, hosts: tuple[str, ...] = ()) -> Starlette:
    """The app around a service, which it starts and closes.

    Args:
        keys: API keys with their tenants (`Keys`). hosts: names by which callers without keys may reach the server,
            beside those of this machine.
    """
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.aclose()

    one, talk = "/v1/sessions/{session:path}", "/v1/conversations/{session:path}"
    post, get = ["POST"], ["GET"]
    app = Starlette(lifespan=lifespan, exception_handlers={404: _not_found, 405: _not_allowed}, routes=[
        Route("/v1/chat/completions", guarded(chat_completions), methods=post),
        Route("/v1/responses", guarded(responses), methods=post),
        Route("/v1/conversations", guarded(create_conversation), methods=post),
        Route(f"{talk}/items", guarded(conversation_items), methods=["GET", "POST", "DELETE"]),
        Route(f"{talk}/items/{{item}}", guarded(conversation_item), methods=["GET", "DELETE"]),
        Route(talk, guarded(conversation), methods=["GET", "DELETE"]),
        Route("/v1/models", guarded(models), methods=get),
        Route("/v1/models/{model:path}", guarded(model), methods=get),
        Route("/v1/sessions", guarded(sessions), methods=get),
        Route(f"{one}/ingest", guarded(upload), methods=["GET", "POST", "PUT"]),
        Route(f"{one}/ask", guarded(ask), methods=post),
        Route(f"{one}/fork", guarded(fork), methods=post),
        Route(f"{one}/focus", guarded(focus), methods=post),
        Route(f"{one}/rewind", guarded(rewind), methods=post),
        Route(f"{one}/snapshot", guarded(snapshot), methods=post),
        Route(f"{one}/memory", guarded(session_memory), methods=get),
        Route(f"{one}/map", guarded(session_map), methods=get),
        Route(f"{one}/text", guarded(session_text), methods=get),
        Route(f"{one}/search", guarded(session_search), methods=get),
        Route(one, guarded(session), methods=["GET", "DELETE"]),
        Route("/metrics", guarded(metrics), methods=get),
        Route("/health", health, methods=get), Route("/ready", ready, methods=get), Route("/", page, methods=get)])
    app.state.service, app.state.keys = service, Keys(keys or {})
    app.state.hosts = {*LOCAL, *hosts}
    return app



