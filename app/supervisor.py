"""Several server processes behind one port: starts them, starts again what dies, and ends them together.

Each is an ordinary `keyturn serve` with pools of its own. The kernel spreads connections over them (SO_REUSEPORT). They end
when their standard input does, so that none is left behind by a supervisor that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import structlog

from app.process import Process
from app.settings import Settings
from app.startup import StartError, prepare, shown_url

log = structlog.get_logger(__name__)

RESTART_SECONDS = (0.2, 10.0)
"""Pause before a process that died is started again: the first, and the longest."""
LONG_ENOUGH = 60.0
"""A process that lived for this many seconds was well: the next pause is the first again."""


class Supervisor:
    """Keeps `settings.workers` servers running. `listener` holds the port and does not listen itself."""

    def __init__(self, settings: Settings, listener: socket.socket, process: Process) -> None:
        self._settings = settings
        self._listener = listener
        self._process = process
        self._children: set[asyncio.subprocess.Process] = set()

    async def run(self, url: str, *, embedded: bool) -> None:
        """Prepare the database `url` once for all, start the servers, and keep them until told to stop."""
        await prepare(self._settings, url, embedded=embedded, listens=True)
        environment = {
            **os.environ,
            "DATABASE_URL": url,
            "KEYTURN_DATABASE_URL": url,
            "KEYTURN_HOST": self._settings.host,
            "KEYTURN_PORT": str(self._listener.getsockname()[1]),
            "KEYTURN_WORKERS": "1",
            "KEYTURN_EXAMPLES": str(int(self._settings.examples)),
            "KEYTURN_WORKER": str(int(self._settings.worker)),
        }
        if self._settings.config is not None:
            environment["KEYTURN_CONFIG"] = str(self._settings.config)
        try:
            await asyncio.gather(*(self._start(environment) for _ in range(self._settings.workers)))
            self._process.ready = True
            print(f"Keyturn is ready: {shown_url(self._settings, self._listener)}", flush=True)
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(child, environment)) for child in tuple(self._children)]
                await self._process.stopping.wait()
                for keeper in keepers:
                    keeper.cancel()
        finally:
            await self._stop()

    async def _start(self, environment: dict[str, str]) -> asyncio.subprocess.Process:
        """A server that answers. StartError if it ends before it does; its own last words have said why."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app", "serve", "--supervised"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the supervisor, which asks each to stop
        )
        self._children.add(child)
        assert child.stdout is not None
        if not await child.stdout.readline():
            self._children.discard(child)
            raise StartError(f"A server process ended with {await child.wait()} before it was ready.")
        return child

    async def _keep(self, child: asyncio.subprocess.Process, environment: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()
        shortest, longest = RESTART_SECONDS
        delay = shortest
        while True:
            started = loop.time()
            code = await child.wait()
            self._children.discard(child)
            delay = shortest if loop.time() - started > LONG_ENOUGH else delay
            while True:
                log.error("server_process_died", pid=child.pid, code=code, restart_in=delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, longest)
                try:
                    child = await self._start(environment)
                    break
                except StartError as error:
                    log.error("server_process_not_started", error=str(error))
            log.info("server_process_restarted", pid=child.pid)

    async def _stop(self) -> None:
        """Ask all to stop, and wait: each ends in its own time, which is bounded."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        await asyncio.gather(*(child.wait() for child in self._children))
