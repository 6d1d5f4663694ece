"""Keyturn against bare LangGraph: the same graph, served and in process, in alternation, on one Postgres.

    python tests/bench/run.py [-n RUNS] [--rounds ROUNDS]

Prints a table of medians: runs (or human-in-the-loop cycles) per second, time to the first and last event, and CPU time per
run of the server or, for the bare graph, of its process. Compare ratios taken in one run on one machine.
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
from pathlib import Path
from typing import Any

import driver

from app.db.embedded import EmbeddedPostgres
from app.db.migrate import migrate

HERE = Path(__file__).parent
PORT = 8397
URL = f"http://127.0.0.1:{PORT}"
ROWS = ("stream c1", "stream c20", "hitl c20", "bare c1", "bare c20")


def start(database_url: str) -> subprocess.Popen[bytes]:
    """A server of the bench graphs, ready."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KEYTURN_")}
    environment |= {"DATABASE_URL": database_url, "KEYTURN_EXAMPLES": "0", "KEYTURN_LOG_LEVEL": "warning"}
    options = ["--port", str(PORT), "--config", str(HERE / "langgraph.json")]
    server = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", *options], env=environment, cwd=HERE.parents[1], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{URL}/ok", timeout=1).close()
            return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    sys.exit("The server did not start.")


def bare(database_url: str, runs: int) -> list[dict[str, Any]]:
    """The floor, in a process of its own."""
    command = [sys.executable, str(HERE / "bare.py"), database_url, "-n", str(runs)]
    return [
        json.loads(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


def table(results: list[dict[str, Any]]) -> None:
    """Medians over the rounds."""
    print(f"{'':12}{'per second':>12}{'first ms p50':>14}{'last ms p50':>13}{'p95':>9}{'CPU ms':>9}")
    for row in ROWS:
        mine = [r for r in results if r["scenario"] == row]
        if not mine:
            continue

        def median(*path: str, rows: list[dict[str, Any]] = mine) -> float:
            values = [r[path[0]][path[1]] if len(path) > 1 else r[path[0]] for r in rows]
            return statistics.median(values)

        print(
            f"{row:12}{median('per_second'):12.1f}{median('first_event_ms', 'p50'):14.1f}{median('last_event_ms', 'p50'):13.1f}"
            f"{median('last_event_ms', 'p95'):9.1f}{median('cpu_ms'):9.2f}"
        )
        for result in mine:
            for error, count in result["errors"].items():
                print(f"  {count} × {error}")
    by_row = {row: [r["per_second"] for r in results if r["scenario"] == row] for row in ROWS}
    for served, floor in (("stream c1", "bare c1"), ("stream c20", "bare c20")):
        if by_row[served] and by_row[floor]:
            print(f"{served} / {floor}: {statistics.median(by_row[served]) / statistics.median(by_row[floor]):.2f} × the rate")


def main() -> None:
    """Alternate between the server and the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--database-url", help="a migrated database to use instead of a new embedded one")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        url = args.database_url
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.chmod(0o711)  # started by root, Postgres runs as another account
            folder.chmod(0o755)  # the account that runs Postgres must get in
            url = stack.enter_context(EmbeddedPostgres(folder / "pg")).url()
            asyncio.run(migrate(url))
        server = start(url)
        try:
            for round_ in range(args.rounds):
                pids = driver.tree(server.pid)
                asyncio.run(driver.measure(URL, "stream", runs=20, concurrency=4, pids=pids))
                for scenario, concurrency, runs in (("stream", 1, args.n // 2), ("stream", 20, args.n), ("hitl", 20, args.n)):
                    results.append(asyncio.run(driver.measure(URL, scenario, runs=runs, concurrency=concurrency, pids=pids)))
                results += bare(url, args.n)
                print(f"round {round_ + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)
    table(results)


if __name__ == "__main__":
    main()
