"""Traces and metrics, as a real receiver of OpenTelemetry gets them from real processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from commands import HI, STOP_WITHIN, keyturn
from fakes.receiver import Receiver, receiving
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from processes import Servers, free_port

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALL = {"name": "refund", "args": {"order_id": "1", "amount": 5}}
RULES = [
    {"if": "pay", "tool_calls": [CALL]},
    {"if": "break", "tool_calls": [CALL] * 40},
    {"after_tool": "refund", "reply": "Done"},
]
AGENT = {
    "graph_id": "react",
    "config": {
        "configurable": {
            "model": {"provider": "scripted", "params": {"rules": RULES, "else": "{input}!"}},
            "tools": ["refund"],
            "review": {"tools": {"refund": {}}},
        }
    },
}


def values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in attributes if isinstance(a, KeyValue)}


def spans(receiver: Receiver) -> Iterator[tuple[Span, dict[str, Any]]]:
    for received in receiver.at("/v1/traces"):
        for resource in ExportTraceServiceRequest.FromString(received.body).resource_spans:
            assert values(resource.resource.attributes)["service.name"] == "keyturn"
            for scope in resource.scope_spans:
                yield from ((span, values(span.attributes)) for span in scope.spans)


def figures(receiver: Receiver) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """The newest points of each metric of each process: attributes, and the value or how often something was measured."""
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    newest = {}
    for received in receiver.at("/v1/metrics"):
        for resource in ExportMetricsServiceRequest.FromString(received.body).resource_metrics:
            newest[values(resource.resource.attributes)["service.instance.id"]] = resource
    for resource in newest.values():
        for metric in (m for scope in resource.scope_metrics for m in scope.metrics):
            points = (*metric.sum.data_points, *metric.histogram.data_points)
            found.setdefault(metric.name, []).extend(
                (values(p.attributes), float(p.count if hasattr(p, "count") else p.as_int)) for p in points
            )
    return found


async def test_a_trace_from_the_request_to_the_run_in_another_process(servers: Servers, fresh_database_url: str) -> None:
    async with receiving() as receiver:
        told = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        server = await servers.start(fresh_database_url, environment=told, examples=0, worker=0)
        async with (
            keyturn("worker", DATABASE_URL=fresh_database_url, KEYTURN_EXAMPLES="0", **told) as worker,
            httpx.AsyncClient(base_url=server.url, timeout=30) as api,
        ):
            agent = (await api.post("/assistants", json=AGENT)).json()["assistant_id"]
            thread = (await api.post("/threads", json={})).json()["thread_id"]

            async def run(text: str, **more: Any) -> str:
                body = {"assistant_id": agent, "input": {"messages": [{"role": "user", "content": text}]}, **more}
                headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
                made = await api.post(f"/threads/{thread}/runs", json=body, headers=headers)
                assert made.status_code == 200, made.text
                assert "traceparent" not in made.json()["kwargs"]
                await api.get(f"/threads/{thread}/runs/{made.json()['run_id']}/join")
                return str(made.json()["run_id"])

            asked = await run("pay")
            [item] = (await api.get("/inbox")).json()["items"]
            answer = (await api.post(f"/inbox/{item['id']}/response", json={"type": "accept"})).json()["run_id"]
            await api.get(f"/threads/{thread}/runs/{answer}/join")
            failed = await run("hi", config={"recursion_limit": 1})
            assert (await api.get("/ok")).status_code == 200
            await asyncio.gather(worker.ends(signal.SIGTERM), server.stop())

        found = list(spans(receiver))
        runs = {a["keyturn.run_id"]: (span, a) for span, a in found if "keyturn.run_id" in a}
        made = {span.span_id: (span, a) for span, a in found if a.get("http.route") == "/threads/{thread_id}/runs"}
        for run_id, status, reason in ((asked, "success", "human_input"), (failed, "error", "failed")):
            span, attributes = runs[run_id]
            assert span.trace_id.hex() == TRACE
            parent, request = made[span.parent_span_id]
            assert (parent.name, parent.trace_id.hex()) == ("POST /threads/{thread_id}/runs", TRACE)
            assert (request["http.response.status_code"], request["url.path"]) == (200, f"/threads/{thread}/runs")
            assert request["keyturn.request_id"]
            shown = {k: attributes[f"keyturn.{k}"] for k in ("thread_id", "assistant_id", "graph_id", "attempt")}
            assert shown == {"thread_id": thread, "assistant_id": agent, "graph_id": "react", "attempt": 1}
            assert (attributes["keyturn.status"], attributes["keyturn.stop_reason"]) == (status, reason)
        assert runs[asked][0].status.code == Status.STATUS_CODE_UNSET, "a question is no error"
        assert runs[failed][0].status.code == Status.STATUS_CODE_ERROR
        assert runs[failed][1]["error.type"] == "recursion_limit"
        [decision] = [span for span, a in found if a.get("http.route") == "/inbox/{item_id}/response"]
        assert runs[answer][0].parent_span_id == decision.span_id, "the answer's run belongs to the answer"
        assert not [a for _, a in found if a.get("url.path") == "/ok"]

        metrics = figures(receiver)
        ended = {(a["keyturn.status"], a["keyturn.stop_reason"]): n for a, n in metrics["keyturn.runs.ended"]}
        assert ended == {("success", "human_input"): 1, ("success", "finished"): 1, ("error", "failed"): 1}
        assert sum(n for _, n in metrics["keyturn.run.duration"]) == sum(n for _, n in metrics["keyturn.run.wait"]) == 3
        assert [n for _, n in metrics["keyturn.runs.active"]] == [0, 0]
        requests = {a.get("http.route"): n for a, n in metrics["http.server.request.duration"]}
        assert (requests["/threads"], requests["/threads/{thread_id}/runs"]) == (1, 2)


async def test_a_receiver_that_is_away_harms_nobody(servers: Servers, fresh_database_url: str) -> None:
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    server = await servers.start(fresh_database_url, environment=told, examples=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        agent = (await api.post("/assistants", json=AGENT)).json()["assistant_id"]
        thread = (await api.post("/threads", json={})).json()["thread_id"]
        done = await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": agent, "input": HI})
        assert done.json()["messages"][-1]["content"] == "hi!"
    began = time.monotonic()
    assert await server.stop() == 0
    assert time.monotonic() - began < STOP_WITHIN


def test_nothing_of_it_is_loaded_where_nobody_asked() -> None:
    program = "import sys, app.commands; assert not {'app.telemetry', 'opentelemetry.exporter'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
