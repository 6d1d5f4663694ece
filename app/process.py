"""The life of a process that runs until it is told to stop: its signals, its loop, and an end that comes in time.

The first signal asks, the second stops at once. Whatever hangs then, in a task or in a thread, is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import structlog

log = structlog.get_logger(__name__)

UNWIND_SECONDS = 0.5
"""What a cancelled task gets to close what it has open."""

THREADS = 1000
"""Tools and nodes that are plain functions run in threads, made as they are needed. Those that never return keep theirs."""


class Process:
    """Ends the work that it runs: asked by `stopping` when the work is `ready` for that, else by cancelling it."""

    def __init__(self, patience: float, *, follows: socket.socket | None = None) -> None:
        """`patience`: seconds to stop in. `follows`: when its other end is closed, this process ends too."""
        self.stopping = asyncio.Event()
        self.ready = False
        self._patience = patience
        self._follows = follows
        self._work: asyncio.Task[None] | None = None
        self._abandoned = asyncio.Event()
        self._broken = False

    def stop(self, why: str, *, broken: bool = False) -> None:
        """Ask to stop; the second time, or before the work is ready, stop at once. `broken` makes the exit code 1."""
        self._broken |= broken
        if self.ready and not self.stopping.is_set():
            log.info("stopping", why=why)
            self.stopping.set()
            # Neither a database that does not answer nor a stream that does not end may keep the process.
            asyncio.get_running_loop().call_later(self._patience, self._give_up, "the time is over")
        else:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        log.warning("stopping_at_once", why=why)
        self.stopping.set()
        if self._work is not None:
            self._work.cancel()
        asyncio.get_running_loop().call_later(UNWIND_SECONDS, self._abandoned.set)

    def _unfollow(self, followed: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(followed)
        self.stop("the supervisor is gone")

    async def _live(self, work: Coroutine[None, None, None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        if self._follows is not None:
            loop.add_reader(self._follows, self._unfollow, self._follows)
        self._work = asyncio.create_task(work, name="work")
        abandoned = asyncio.create_task(self._abandoned.wait())
        await asyncio.wait({self._work, abandoned}, return_when=asyncio.FIRST_COMPLETED)
        abandoned.cancel()
        if self._work.done() and not self._work.cancelled():
            self._work.result()
        return int(self._broken)

    def run(self, work: Coroutine[None, None, None]) -> int:
        """Do the work until it ends or is told to. Returns the exit code, and raises what the work raises."""
        loop = new_loop()
        try:
            return _complete(loop, loop.create_task(self._live(work)))
        finally:
            hanging = rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            if rest:
                _, hanging = loop.run_until_complete(asyncio.wait(rest, timeout=UNWIND_SECONDS))
            if hanging:
                log.warning("left_behind", tasks=sorted(task.get_name() for task in hanging))
            else:
                loop.close()


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[int]) -> int:
    """Run the loop until the task is done, whatever code of a graph raises to leave it."""
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets these two through, from any task
            if task.done():
                raise
            log.warning("exit_refused", error=repr(error))


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, which is faster."""
    import uvloop  # noqa: PLC0415 (not on every platform)

    loop = uvloop.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, "call"))
    return loop


def leave(code: int) -> NoReturn:
    """End now. The interpreter would wait for threads, and a tool that hangs in one would keep the process for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
