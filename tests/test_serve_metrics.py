"""Tests of /metrics of `tricycle serve`, and of the counters behind it."""
# ruff: noqa: F811 (tests have imported fixtures as arguments)

import sys

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from serving import HELLO, folder, run_server  # noqa: F401 (a fixture)


def read(server) -> dict:
    """Return the value of each sample by its name and, for counted responses, endpoint and status."""
    status, content, headers = server.request("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(content.decode())
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {(sample.name.removeprefix("tricycle_"), *sample.labels.values()): sample.value for sample in samples}


def test_counters_equal_the_usage_of_responses(folder):
    with run_server(folder) as server:
        assert read(server)["generated_tokens_total",] == 0
        body = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "logit_bias": {"2": -100}}
        usages = [server.request("/v1/chat/completions", body)[1]["usage"] for _ in range(2)]
        assert server.request("/v1/completions", {"prompt": []})[0] == 400
        assert server.request("/unknown/secret")[0] == 404
        assert server.request("/v1/models", Host="evil.example")[0] == 403
        assert server.request("/v1/models/tiny")[0] == 200
        found = read(server)
        assert found["requests_total", "/v1/chat/completions", "200"] == 2
        assert found["requests_total", "/v1/completions", "400"] == 1
        assert found["requests_total", "other", "404"] == found["requests_total", "/v1/models", "403"] == 1
        assert found["requests_total", "/metrics", "200"] == found["requests_total", "/v1/models/{name}", "200"] == 1
        assert found["generated_tokens_total",] == sum(usage["completion_tokens"] for usage in usages) == 40
        assert found["prompt_tokens_total",] == sum(usage["prompt_tokens"] for usage in usages)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert found["cached_prompt_tokens_total",] == cached > 0
        assert found["time_to_first_token_seconds_count",] == 2
        assert found["time_per_token_seconds_count",] == 38
        assert 0 < found["time_per_token_seconds_sum",] < 60
        assert (found["waiting_texts",], found["running_texts",]) == (0, 0)
        assert 0 < found["kv_cache_tokens",] < found["kv_cache_capacity_tokens",]


def test_waiting_texts(folder):
    with run_server(folder, start=False) as server:
        engine = server.service.engine
        engine._queue += [1, 2, 3]
        assert read(server)["waiting_texts",] == 3
        engine._queue.clear()


def test_metrics_need_the_key_and_the_package(folder, monkeypatch):
    with run_server(folder, key="secret", start=False) as server:
        assert server.request("/metrics")[0] == 401
        assert server.request("/metrics", Authorization="Bearer secret")[0] == 200
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with run_server(folder) as server:
        assert server.request("/v1/completions", {"prompt": "the", "max_tokens": 2})[0] == 200
        status, response, _ = server.request("/metrics")
        assert status == 501 and "tricycle-gpt[serve]" in response["error"]["message"]
