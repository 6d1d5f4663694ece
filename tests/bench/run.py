"""Keyturn against bare LangGraph: the same graph, served and in process, in alternation, on one Postgres.

    ./run bench [--quick] [--rounds N] [--write docs/performance.md]

Prints what the project promises beside what was measured: medians over the rounds. Compare ratios taken in one run on one
machine; CPU time of the server's processes is the steadiest figure on a busy one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import driver
import psycopg
from report import table, write

from app.db.embedded import EmbeddedPostgres
from app.db.migrate import migrate

HERE = Path(__file__).parent
PORT = 8397
URL = f"http://127.0.0.1:{PORT}"
KIND_REACT = {
    "graph_id": "react",
    "config": {
        "configurable": {
            "model": {
                "provider": "scripted",
                "params": {
                    "rules": [
                        {"if": "weather", "tool_calls": [{"name": "get_weather", "args": {"city": "Lisbon"}}]},
                        {"after_tool": "get_weather", "reply": "The weather in Lisbon is sunny today ."},
                    ]
                },
            },
            "tools": ["get_weather"],
        }
    },
}
BYTES = """
SELECT (SELECT coalesce(sum(length(blob)), 0) FROM checkpoint_blobs WHERE thread_id = %(id)s)
     + (SELECT coalesce(sum(length(blob)), 0) FROM checkpoint_writes WHERE thread_id = %(id)s)
"""
Results = dict[str, list[dict[str, Any]]]


@contextlib.contextmanager
def served(database_url: str, *, workers: int = 1) -> Iterator[list[int]]:
    """A server of the bench graphs: the ids of its processes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KEYTURN_")}
    environment |= {"DATABASE_URL": database_url, "KEYTURN_EXAMPLES": "0", "KEYTURN_LOG_LEVEL": "warning"}
    options = ["--port", str(PORT), "--config", str(HERE / "langgraph.json"), "--workers", str(workers)]
    server = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", *options], env=environment, cwd=HERE.parents[1], stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    if not server.stdout.readline():
        sys.exit("The server did not start.")
    try:
        yield driver.tree(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def post(path: str, body: Any) -> Any:
    """One request."""
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def bare(database_url: str, runs: int) -> dict[int, dict[str, Any]]:
    """The floor, in a process of its own, by concurrency."""
    command = [sys.executable, str(HERE / "bare.py"), database_url, "-n", str(runs)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {row["concurrency"]: row for row in map(json.loads, lines)}


def one_round(database_url: str, runs: int, results: Results) -> None:
    """Everything once, the floor in between."""
    with served(database_url) as pids:
        react = post("/assistants", KIND_REACT)["assistant_id"]

        def measure(row: str, scenario: str, *, count: int, concurrency: int, assistant: str = "bench_react") -> None:
            asyncio.run(driver.measure(URL, scenario, runs=20, concurrency=4, pids=pids, assistant=assistant))
            found = driver.measure(URL, scenario, runs=count, concurrency=concurrency, pids=pids, assistant=assistant)
            results[row].append(asyncio.run(found))

        measure("stream c1", "stream", count=runs // 2, concurrency=1)
        measure("stream c20", "stream", count=runs, concurrency=20)
        floor = bare(database_url, runs)
        results["bare c1"].append(floor[1])
        results["bare c20"].append(floor[20])
        measure("react c20", "stream", count=runs, concurrency=20, assistant=react)
        measure("hitl c20", "hitl", count=runs // 2, concurrency=20)
        results["decision"].append(asyncio.run(driver.decisions(URL, runs // 4)))
        results["tokens"].append(asyncio.run(driver.tokens(URL)))
        one, many = (asyncio.run(driver.fan_out(URL, n, pids)) for n in (1, 100))
        results["fan-out"].append({"ratio": round(many["cpu_ms"] / max(one["cpu_ms"], 1.0), 2)})
        long = asyncio.run(driver.long_thread(URL, react, 200, pids))
        long["kb"] = round(stored(database_url, long.pop("thread")) / 1024)
        long["kb_100"] = round(stored(database_url, asyncio.run(driver.long_thread(URL, react, 100, pids))["thread"]) / 1024)
        results["long thread"].append(long)
        results["idle"].append(asyncio.run(driver.idle(URL, 500, pids)))
    with served(database_url, workers=2) as pids:
        measure_two = driver.measure(URL, "stream", runs=runs, concurrency=20, pids=pids)
        asyncio.run(driver.measure(URL, "stream", runs=20, concurrency=4, pids=pids))
        results["two c20"].append(asyncio.run(measure_two))


def stored(database_url: str, thread: str) -> int:
    """Bytes that a thread takes in the saver's tables."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute(BYTES, {"id": thread}).fetchone()
    assert row is not None
    return int(row[0])


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure."""
    found: dict[str, Any] = {}
    for key, value in rows[0].items():
        if isinstance(value, dict) and key != "errors":
            found[key] = median([row[key] for row in rows])
        elif isinstance(value, int | float):
            found[key] = statistics.median(row[key] for row in rows)
    found["errors"] = [error for row in rows for error in row.get("errors", ())]
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="./run bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=200, help="runs of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this page, between its marks")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append every result as a line of JSON")
    args = parser.parse_args()
    if (load := os.getloadavg()[0]) > 1.0:
        print(f"This machine is busy (load {load:.1f}): what follows is too slow, and the ratios are noisy.", file=sys.stderr)
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)  # started by root, Postgres runs as another account
        with EmbeddedPostgres(folder / "pg") as postgres:
            asyncio.run(migrate(postgres.url()))
            rounds = 1 if args.quick else args.rounds
            for number in range(rounds):
                began = time.monotonic()
                one_round(postgres.url(), 60 if args.quick else args.n, results)
                took = time.monotonic() - began
                print(f"round {number + 1} of {rounds}: {took:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if args.out is not None:
        with args.out.open("a") as lines:
            lines.writelines(json.dumps({"row": row, **r}) + "\n" for row, found in results.items() for r in found)
    medians = {row: median(found) for row, found in results.items()}
    text = table(medians)
    print(text)
    for row, found in medians.items():
        for error in found["errors"]:
            print(f"{row}: {error}")
    if args.write is not None:
        write(args.write, text)


if __name__ == "__main__":
    main()
