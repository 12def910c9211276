"""What a cluster is to be. Nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.serving.limits import Limits


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs.

    Args:
        runtime: options of `Runtime.from_pretrained`, such as model ("bundled" unless it is given), budget and dtype.
        store: a folder that all machines share, or a URL such as s3://bucket/memories.
        key: 64 hexadecimal digits under which sessions are encrypted; None: LOCRET_KEY of each machine, if it is set.
        boundaries: ends of messages that a session keeps.
        name: of the model in requests; None: that of the runtime's options.
        response_template: as of transformers' ResponseParser, for a model that writes calls or thoughts in its own way.
        max_live: slots of one replica. limits: how much one replica takes.
        keys: API keys, as key or tenant:key; empty: those of the variable LOCRET_API_KEY.
        keyless: callers need no key; only names in `hosts`, and those of the machine itself, reach the server.
        replicas: of memories. max_replicas: as many as there may be when all slots are in use; None: no more.
        fronts: HTTP servers.
        cpus, gpus: that one replica is given; with less than one core it computes on one.
    """

    runtime: dict[str, Any] = {}
    store: str
    key: str | None = None
    boundaries: int = 32
    name: str | None = None
    response_template: dict[str, Any] | None = None
    max_live: int = 4
    limits: Limits = msgspec.field(default_factory=Limits)
    keys: list[str] = []
    keyless: bool = False
    hosts: list[str] = []
    replicas: int = 2
    max_replicas: int | None = None
    fronts: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("max_live", 1), ("boundaries", 2), ("replicas", 1), ("fronts", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas is {self.max_replicas}; expected at least replicas, {self.replicas}")

    @property
    def model(self) -> str:
        return self.name or str(self.runtime.get("model", "bundled"))


def read_cluster(args: Mapping[str, Any]) -> Cluster:
    """The settings that a config file, or the command line, gives.

    Raises:
        ConfigError: a field is unknown, missing, or of another kind.
    """
    try:
        return msgspec.convert(dict(args), Cluster)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of the cluster: {error}; expected the fields of locret_serve.settings.Cluster"
                          ) from None
