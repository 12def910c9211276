"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from locret_stream.conversation.parts import End

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of one server; no label holds what a user chose."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("locret_requests", "requests that were let in", ["kind"], registry=registry)
        self.refused = Counter("locret_refused", "requests that were refused, or failed, in mid-stream too", ["code"],
                               registry=registry)
        self.cancelled = Counter("locret_cancelled", "turns that the client left", registry=registry)
        self.running = Gauge("locret_running", "requests that run or wait for a slot", registry=registry)
        self.live = Gauge("locret_slots_in_use", "slots for live memories that are in use", registry=registry)
        self.fed = Counter("locret_tokens_fed", "tokens that were read", registry=registry)
        self.reused = Counter("locret_tokens_reused", "tokens that the memory held already", registry=registry)
        self.sampled = Counter("locret_tokens_sampled", "tokens that were answered", registry=registry)
        self.source = Counter("locret_turns", "turns by where their memory was found", ["source"], registry=registry)
        self.first_s = Histogram("locret_first_token_seconds", "until the first part of an answer", registry=registry,
                                 buckets=_SECONDS)
        self.ingested = Counter("locret_bytes_ingested", "bytes of streams that were read", registry=registry)

    def ended(self, end: End) -> None:
        """A turn that ended whole."""
        self.fed.inc(max(end.receipt["fed"], 0))
        self.reused.inc(max(end.receipt["reused"], 0))
        self.sampled.inc(end.sampled)
        self.source.labels(end.receipt["source"]).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def merged(texts: Mapping[str, bytes]) -> bytes:
    """What several servers counted, as one text: each sample bears the name of its server in the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))

    class All(CollectorRegistry):
        def collect(self):
            return iter(families.values())

    return generate_latest(All())
