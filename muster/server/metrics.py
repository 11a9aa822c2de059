"""What Prometheus reads at /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from muster.engine.engine import Engine
from muster.plan import Plan, Role
from muster.server.health import Health

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts and times; the engine's thread tells, any other may read."""

    def __init__(self, health: Health) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector(health)
        self._registry.register(self._engine)
        self._first = Histogram(
            "muster_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._between = Histogram(
            "muster_time_between_tokens_seconds",
            "From one token of an answer to its next.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batch = Histogram(
            "muster_batch_requests", "Requests computed in one step.", buckets=_SIZES, registry=self._registry
        )
        self._http = Counter(
            "muster_http_requests", "Requests by path and status.", ("path", "status"), registry=self._registry
        )
        self._finished = Counter(
            "muster_answers", "Answers by the reason that ended them.", ("finish_reason",), registry=self._registry
        )

    def page(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def watch(self, engine: Engine, plan: Plan) -> None:
        """From now on this engine is read, too."""
        self._engine.engine, self._engine.plan = engine, plan

    def observe_step(self, requests: int) -> None:
        """A step has computed tokens of that many requests."""
        self._batch.observe(requests)

    def observe_first(self, seconds: float) -> None:
        """A request got its first token."""
        self._first.observe(seconds)

    def observe_later(self, seconds: float, tokens: int) -> None:
        """An answer got further tokens in one step."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def observe_end(self, finish_reason: str) -> None:
        """An answer ended."""
        self._finished.labels(finish_reason).inc()

    def observe_http(self, path: str, status: int) -> None:
        """A request was answered; `path` is the route's, not what a client may invent."""
        self._http.labels(path, str(status)).inc()


class EngineCollector(Collector):
    """Reads the engine's own sums when they are asked for."""

    def __init__(self, health: Health) -> None:
        self.engine: Engine | None = None
        self.plan: Plan | None = None
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """Every family; those of the engine once it is there."""
        yield GaugeMetricFamily("muster_ready", "Whether requests should be sent here.", self._health.ready)
        passed = self._health.canary is True
        yield GaugeMetricFamily("muster_canary_passed", "Whether the loaded model computed right.", passed)
        if self.engine is None:
            return
        engine, stats = self.engine, self.engine.stats
        yield GaugeMetricFamily("muster_requests_running", "Requests that hold pages.", engine.running)
        yield GaugeMetricFamily("muster_requests_waiting", "Requests in the queue.", engine.waiting)
        pages = GaugeMetricFamily("muster_kv_pages", "Pages of the key-value cache.", labels=["state"])
        pages.add_metric(["free"], engine.free_pages)
        pages.add_metric(["used"], engine.pages - engine.free_pages)
        yield pages
        tokens = CounterMetricFamily("muster_tokens", "Tokens of prompts and answers.", labels=["kind"])
        tokens.add_metric(["prompt"], stats.prompt_tokens)
        tokens.add_metric(["cached"], stats.cached_tokens)
        tokens.add_metric(["generated"], stats.generated_tokens)
        yield tokens
        yield CounterMetricFamily("muster_prefix_hit_tokens", "Prompt tokens found in the cache.", stats.cached_tokens)
        yield CounterMetricFamily("muster_preemptions", "Times a request gave its pages back.", stats.preemptions)
        seconds = CounterMetricFamily("muster_step_seconds", "Time spent computing.", labels=["kind"])
        seconds.add_metric(["prefill"], stats.prefill_seconds)
        seconds.add_metric(["decode"], stats.decode_seconds)
        yield seconds
        yield CounterMetricFamily("muster_steps", "Steps computed.", stats.steps)
        if self.plan is not None:
            yield plan_family(self.plan)


def plan_family(plan: Plan) -> Metric:
    """One sample of value 1 per entry of the plan."""
    family = InfoMetricFamily("muster_plan", "The backends in use and what proves them.")
    for role in Role:
        for number, choice in enumerate(plan.of(role)):
            for entry in choice.entries:
                family.add_metric(
                    [],
                    {
                        "role": str(role),
                        "part": str(number),
                        "max_tokens": str(entry.max_tokens or "inf"),
                        "backend": entry.backend,
                        "evidence": str(len(entry.evidence)),
                        "proven": str(bool(entry.evidence)).lower(),
                    },
                )
    return family
