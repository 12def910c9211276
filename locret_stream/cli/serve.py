"""`locret-stream serve`: memories behind OpenAI's API."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from locret_stream.cli.loading import has_chat_template, make_runtime, runtime_options
from locret_stream.cli.options import DEFAULT_STORE, Json, Key, RuntimeOptions, StoreUrl, grouped, on_command_line
from locret_stream.cli.output import describe_runtime, err, print_json
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.errors import ConfigError
from locret_stream.serving.keys import read_keys

if TYPE_CHECKING:
    from locret_stream.serving.service import Service

BOUNDARIES = 32
HELP = """Serve a model with endless memories behind OpenAI's API, and a page that shows them.

Chat completions send the whole history, and only what is new of it is read; responses send what is new alone. \
Sessions are kept in the store, and go on after a restart. Ctrl-C or SIGTERM lets the answers under way end.

Examples:

\b
  locret-stream serve --model smollm2
  # then, with OpenAI's client:
  #   client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  #   client.responses.create(model="smollm2", input="The door code of falcon is 4182.")
  # a log goes in, however long, and is asked about
  curl -T service.log http://127.0.0.1:8000/v1/sessions/builds/ingest
  curl -d '{"question": "What broke?"}' -H content-type:application/json \
http://127.0.0.1:8000/v1/sessions/builds/ask
  # other machines may call, with a key; two tenants see only their own sessions
  LOCRET_API_KEY=acme:s3cret,blue:0ther locret-stream serve --host 0.0.0.0"""
app = typer.Typer(rich_markup_mode="rich")


class UploadOptions(msgspec.Struct, frozen=True):
    """How long a session is kept for the sender of a stream to `ingest`."""

    upload_idle: Annotated[float, typer.Option(min=1, help=(
        "Seconds in which --upload-least bytes of an upload must come while its memory waits for them; a sender that "
        "is slower, or died, is refused with status 408. More for senders that pause."))] = 60
    upload_least: Annotated[int, typer.Option(min=1, help=(
        "Bytes of an upload that must come in each --upload-idle seconds. There is no most: a stream that flows may "
        "last for ever."))] = 1024
    upload_resume: Annotated[float, typer.Option(min=1, help=(
        "Seconds in which an upload that broke off may go on, if its sender gave it an id. As long its session waits; "
        "then what was read of it is undone."))] = 60


@app.command(help=HELP)
@grouped
def serve(
    *,
    command: typer.Context,
    options: RuntimeOptions,
    host: Annotated[str, typer.Option(help="Where to listen; anything but this machine needs --api-key.")]
    = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(envvar="LOCRET_API_KEY", help=(
        "A key that callers must give, or tenant:key; may be repeated, or several with commas. Better given by the "
        "variable: other programs of this machine see the options of this one."))] = None,
    name: Annotated[str | None, typer.Option(show_default="that of --model", help=(
        "The name of the model in requests and answers."))] = None,
    store: StoreUrl = DEFAULT_STORE,
    key: Key = None,
    response_template: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, show_default=(
        "the tokenizer's own, or what the chat template shows"), help=(
        "A JSON file that says how to tell thoughts and tool calls of this model from its text, as transformers' "
        "ResponseParser takes it."))] = None,
    boundaries: Annotated[int, typer.Option(min=2, help=(
        "Snapshots that a session keeps, one at each end of a message: how far back one may go on."))] = BOUNDARIES,
    max_live: Annotated[int, typer.Option(min=1, help="Memories in slots at once; others wait in the store.")] = 4,
    max_waiting: Annotated[int, typer.Option(min=0, help=(
        "Requests that may wait for a slot; more are refused with status 429."))] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of one answer.")] = 4096,
    timeout: Annotated[float, typer.Option(min=1, help="The most seconds of one answer, waiting included.")] = 600,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running answers get to finish at shutdown.")] = 600,
    unnamed_days: Annotated[float, typer.Option(min=0.01, help=(
        "Days that responses without a session name are kept."))] = 30,
    uploads: UploadOptions,
    ray: Annotated[bool, typer.Option("--ray", help=(
        "On many machines, with Ray Serve: --max-live and --max-waiting are those of one replica."))] = False,
    ray_address: Annotated[str | None, typer.Option(envvar="RAY_ADDRESS", show_default="one on this machine", help=(
        "Of the cluster to start it on."))] = None,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: models that are loaded.")] = 2,
    max_replicas: Annotated[int | None, typer.Option(min=1, show_default="that of --replicas", help=(
        "With --ray: the most that are loaded while all slots are in use."))] = None,
    as_json: Json = False,
) -> None:
    _expect_together(command, ray, timeout)
    missing = [package for package in ("starlette", "uvicorn", "prometheus_client")
               if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed; expected: pip install 'locret-stream[serve]'")
    keys = read_keys(api_key or [])
    if not keys and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"--host is {host}, where other machines may call, and there is no key; expected --api-key, "
                          "or the variable LOCRET_API_KEY")
    from locret_stream.serving.limits import Limits

    limits = Limits(max_waiting=max_waiting, max_tokens=max_tokens, timeout_s=timeout, unnamed_days=unnamed_days,
                    upload_idle_s=uploads.upload_idle, upload_least_bytes=uploads.upload_least,
                    upload_resume_s=uploads.upload_resume)
    model, replies = name or options.model, _read_template(response_template)

    def listening(bound: int) -> None:
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        err.print(f"Serving {model!r} at {url}/v1, sessions in {store}; the page is {url}/. Ctrl-C ends.",
                  soft_wrap=True)
        if as_json:
            print_json({"url": f"{url}/v1", "model": model, "store": str(store), "max_live": max_live})

    count = Count(store)
    summary = Summary(f"sessions are kept in {store}" if ray else count)
    with interruptible(summary):
        if ray:
            from locret_serve.starting import run

            def check() -> None:
                if not has_chat_template(options, elsewhere=ray_address is not None):
                    raise _no_template(options.model)

            run({"runtime": _plain(runtime_options(options)), "store": str(store), "key": key, "boundaries": boundaries,
                 "name": model, "max_live": max_live, "limits": msgspec.to_builtins(limits),
                 "response_template": replies, "keys": api_key or [],
                 "keyless": not keys, "replicas": replicas, "max_replicas": max_replicas},
                host=host, port=port, address=ray_address, check=check, listening=listening)
            return
        import asyncio

        from locret_stream.serving.app import make_app
        from locret_stream.serving.server import Server, leave_loaded_alone
        from locret_stream.serving.service import Service
        from locret_stream.snapshot import Store

        _expect_free(host, port)
        runtime = make_runtime(options, store=Store(store, key=key, keep_last=boundaries), max_live=max_live)
        if runtime.frames.raw:
            asyncio.run(runtime.aclose())
            raise _no_template(options.model)
        err.print(f"model {options.model}: {describe_runtime(runtime)}", soft_wrap=True)
        service = count.service = Service(runtime, model=model, limits=limits, response_template=replies)

        leave_loaded_alone()
        server = Server(make_app(service, keys), service, host=host, port=port, grace_s=grace, listening=listening)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop's, where there is one
            try:
                runner.run(server.serve())
            except SystemExit:  # how uvicorn ends where it cannot listen
                if server.started:
                    raise
        if not server.started:
            raise ConfigError(f"no server has started on {host}:{port}; what is printed above tells why")


def _expect_together(command: typer.Context, ray: bool, timeout: float) -> None:
    """Raises ConfigError: an option that has no effect with --ray, or without it, or cannot be with it."""
    given = on_command_line(command, ("grace",) if ray else ("replicas", "max_replicas", "ray_address"))
    if given and ray:
        raise ConfigError(f"found {given[0]} and --ray, with which running answers get --timeout to finish; expected "
                          "one of them")
    if given:
        raise ConfigError(f"found {given[0]} and no --ray; expected --ray with it")
    if ray and not math.isfinite(timeout):
        raise ConfigError(f"found --timeout {timeout} and --ray, where a replica that is to end waits as long for its "
                          "answers; expected a finite number of seconds")


def _no_template(model: str) -> ConfigError:
    return ConfigError(f"the tokenizer of {model} has no chat template, and a server is sent messages; expected a chat "
                       "model, or its template in a file chat_template.jinja of its folder")


def _read_template(file: Path | None) -> dict[str, Any] | None:
    """Raises ConfigError: the file is none that transformers can use."""
    if file is None:
        return None
    from locret_stream.conversation.replies import read_response_template

    try:
        return read_response_template(file.read_bytes())
    except ConfigError as error:
        raise ConfigError(f"--response-template {file}: {error}") from None


def _expect_free(host: str, port: int) -> None:
    """Raises ConfigError: nobody can listen there, before a model is loaded."""
    import socket

    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; expected a free --port, or "
                          "--port 0") from None


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON holds them, for other processes."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


class Count:
    """What was served so far, in words."""

    def __init__(self, store: str):
        self.store = store
        self.service: Service | None = None

    def __str__(self) -> str:
        served = 0 if self.service is None else self.service.served
        return f"{served:,} requests were answered; sessions are kept in {self.store}" if served else (
            "nothing was served yet")
