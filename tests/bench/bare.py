"""The floor: the same graph in process, no HTTP, on LangGraph's stock Postgres saver. Prints one JSON line per level."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from typing import Any
from uuid import uuid4

import uvloop
from driver import milliseconds
from graphs import QUESTION, make
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool


async def measure(graph: Any, *, runs: int, concurrency: int) -> dict[str, Any]:
    """Run the graph `runs` times, `concurrency` at once."""
    firsts: list[float] = []
    lasts: list[float] = []
    jobs = iter(range(runs))

    async def worker() -> None:
        for _ in jobs:
            start, first = time.perf_counter(), 0.0
            config = {"configurable": {"thread_id": str(uuid4())}}
            async for _event in graph.astream(QUESTION, config, stream_mode=["updates", "messages"]):
                first = first or time.perf_counter() - start
            firsts.append(first)
            lasts.append(time.perf_counter() - start)

    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "concurrency": concurrency,
        "per_second": round(runs / wall, 1),
        "first_event_ms": milliseconds(firsts),
        "last_event_ms": milliseconds(lasts),
        "cpu_ms": round(cpu * 1e3 / runs, 2),
        "errors": {},
    }


async def main() -> None:
    """Measure at one and at twenty."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("-n", type=int, default=100)
    args = parser.parse_args()
    options = {"autocommit": True, "row_factory": dict_row, "prepare_threshold": 0}
    async with AsyncConnectionPool(args.url, min_size=20, max_size=20, kwargs=options, open=False) as pool:
        graph = make(checkpointer=AsyncPostgresSaver(pool))
        await measure(graph, runs=10, concurrency=4)
        for concurrency in (1, 20):
            print(json.dumps(await measure(graph, runs=args.n, concurrency=concurrency)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
