"""Metrics of the server in Prometheus's text format: requests, tokens, latencies, queue and KV caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.routing import Route

MISSING = 'metrics need prometheus-client: pip install "tricycle-gpt[serve]"'
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)  # seconds
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)  # seconds
Gauges = Callable[[], dict[str, tuple[str, float]]]


class Metrics:
    """Counters and histograms that the server updates, and gauges that are computed for each report.

    Args:
        routes: the endpoints; requests of other paths are counted together.
        gauges: returns description and value of each gauge by name.

    Raises:
        ImportError: prometheus_client is not installed.
    """

    def __init__(self, routes: Sequence[Route], gauges: Gauges) -> None:
        import prometheus_client

        self._routes = routes
        self._gauges = gauges
        self._client: Any = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()  # one per server
        counter = lambda name, text, labels=(): prometheus_client.Counter(name, text, labels, registry=self._registry)
        histogram = lambda name, text, buckets: prometheus_client.Histogram(
            name, text, buckets=buckets, registry=self._registry
        )
        self._requests = counter("tricycle_requests", "Responses by endpoint and status.", ("endpoint", "status"))
        self._prompt_tokens = counter("tricycle_prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter("tricycle_cached_prompt_tokens", "Tokens of prompts from the prefix cache.")
        self._generated_tokens = counter("tricycle_generated_tokens", "Generated tokens.")
        first = ("tricycle_time_to_first_token_seconds", "Time from a request to the first token of a text.")
        self._first_token_seconds = histogram(*first, FIRST_TOKEN_BUCKETS)
        further = ("tricycle_time_per_token_seconds", "Time between two tokens of a text.")
        self._token_seconds = histogram(*further, TOKEN_BUCKETS)
        self._registry.register(self)

    def count_response(self, path: str, status: int) -> None:
        """Count a response by its endpoint and status."""
        endpoint = next((route.path_format for route in self._routes if route.path_regex.match(path)), "other")
        self._requests.labels(endpoint, str(status)).inc()

    def count_prompt(self, n_tokens: int, n_cached_tokens: int = 0) -> None:
        """Count the tokens of a prompt, of which some were taken from the prefix cache."""
        self._prompt_tokens.inc(n_tokens)
        self._cached_tokens.inc(n_cached_tokens)

    def count_token(self, seconds: float, is_first: bool) -> None:
        """Count a generated token, `seconds` after the previous one, or after the request for the first token."""
        self._generated_tokens.inc()
        (self._first_token_seconds if is_first else self._token_seconds).observe(seconds)

    def collect(self) -> Iterator[Any]:
        """Yield a gauge metric "tricycle_NAME" for each item of `gauges()`; prometheus_client calls it."""
        from prometheus_client.core import GaugeMetricFamily

        for name, (description, value) in self._gauges().items():
            yield GaugeMetricFamily(f"tricycle_{name}", description, value)

    def report(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus's text format, and its media type."""
        return self._client.generate_latest(self._registry), self._client.CONTENT_TYPE_LATEST


def create_metrics(routes: Sequence[Route], gauges: Gauges) -> Metrics | None:
    """Return the metrics of a server, or None if prometheus_client is not installed."""
    try:
        return Metrics(routes, gauges)
    except ImportError:
        return None
