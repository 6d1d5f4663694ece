"""What is interrupted when it blocks the event loop: the code of a run's graphs and tools, and nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.watchdog import RUN, SIGNAL, BlockedLoop, Watchdog

MAY = 0.3
LONG = 0.9
"""Much longer than the loop may be blocked."""


@pytest.fixture
async def watched() -> Any:
    before = signal.getsignal(SIGNAL)
    with Watchdog(MAY).watching():
        yield
    assert signal.getsignal(SIGNAL) == before


@pytest.fixture
def run() -> Iterator[None]:
    token = RUN.set("a-run")
    yield
    RUN.reset(token)


async def block(seconds: float = LONG) -> str:
    """Blocks the loop, in a task."""
    time.sleep(seconds)  # noqa: ASYNC251
    return "woke"


def called(module: str, inner: Callable[[], Any]) -> Callable[[], Any]:
    """A function of a module of that name, which calls another."""
    scope: dict[str, Any] = {"__name__": module, "inner": inner}
    exec("def outer():\n    return inner()", scope)
    return scope["outer"]  # type: ignore[no-any-return]


async def within(function: Callable[[], Any]) -> Any:
    """Its result, in a task of a run."""

    async def body() -> Any:
        RUN.set("a-run")
        return function()

    return await asyncio.create_task(body())


def sleep() -> str:
    time.sleep(LONG)
    return "woke"


async def test_code_of_a_run_is_interrupted(watched: None) -> None:
    began = time.monotonic()
    with pytest.raises(BlockedLoop, match=r"blocked the server's event loop for \d\.\d s"):
        await within(lambda: time.sleep(60))
    assert time.monotonic() - began < 30
    assert await within(lambda: "the loop goes on") == "the loop goes on"


async def test_code_of_no_run_is_not(watched: None) -> None:
    assert await asyncio.create_task(block()) == "woke"


async def test_ours_is_not_even_when_a_graph_calls_it(watched: None) -> None:
    scope: dict[str, Any] = {"__name__": "app.graphs.saver", "time": time, "LONG": LONG}
    exec("def save():\n    time.sleep(LONG)\n    return 'saved'", scope)
    assert await within(scope["save"]) == "saved"
    assert await within(lambda: scope["save"]()) == "saved"


@pytest.mark.parametrize("owner", ["app.runs.executor", "langgraph.pregel", "json", "app.examples.poem"])
async def test_what_a_graph_is_called_by_or_calls_does_not_matter(watched: None, owner: str) -> None:
    with pytest.raises(BlockedLoop):
        await within(called(owner, lambda: time.sleep(60)))
    if owner != "app.runs.executor":
        with pytest.raises(BlockedLoop):
            await within(lambda: called(owner, lambda: time.sleep(60))())


async def test_a_library_on_nobody_s_behalf_is_not(watched: None) -> None:
    scope: dict[str, Any] = {"__name__": "psycopg_pool.pool_async", "time": time, "LONG": LONG}
    exec("async def worker():\n    time.sleep(LONG)\n    return 'woke'", scope)
    context = contextvars.copy_context()
    context.run(RUN.set, "a-run")
    assert await asyncio.create_task(scope["worker"](), context=context) == "woke"


async def test_a_callback_of_the_loop_is_not(watched: None) -> None:
    context = contextvars.copy_context()
    context.run(RUN.set, "a-run")
    woke: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: woke.set_result(sleep()), context=context)
    assert await woke == "woke"


async def test_an_import_is_not(watched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text(f"import time\ntime.sleep({LONG})\nDONE = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def load() -> bool:
        import slow_module  # noqa: PLC0415

        return bool(slow_module.DONE)

    assert await within(load)
    del sys.modules["slow_module"]


async def test_many_that_take_their_time_are_not_taken_for_one(watched: None, run: None) -> None:
    assert await asyncio.gather(*(block(MAY / 5) for _ in range(20))) == ["woke"] * 20


async def test_one_that_blocks_behind_others_is_found(watched: None, run: None) -> None:
    others = [asyncio.create_task(block(MAY / 5)) for _ in range(5)]
    with pytest.raises(BlockedLoop):
        await asyncio.create_task(block(60))
    assert await asyncio.gather(*others) == ["woke"] * 5


async def test_what_it_does_on_its_way_out_has_its_own_time(watched: None) -> None:
    told: list[str] = []

    def stubborn() -> None:
        try:
            time.sleep(60)
        finally:
            time.sleep(MAY / 4)
            told.append("closed")

    with pytest.raises(BlockedLoop):
        await within(stubborn)
    assert told == ["closed"]


async def test_beside_the_main_thread_it_only_watches() -> None:
    def elsewhere() -> str:
        async def main() -> str:
            with Watchdog(MAY).watching():
                return str(await within(sleep))

        return asyncio.run(main())

    before = signal.getsignal(SIGNAL)
    assert await asyncio.to_thread(elsewhere) == "woke"
    assert signal.getsignal(SIGNAL) == before
    assert not any(t.name == "watchdog" for t in threading.enumerate())
