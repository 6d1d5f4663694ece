"""Several server processes behind one port: starts them, starts again what dies, and ends them together.

Each is an ordinary `keyturn serve` with pools of its own, which gets its connections from here (see `handover`). None is left
behind by a supervisor that was killed: they end when their channel does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import structlog

from app.handover import Dispatcher, channel
from app.process import Process
from app.settings import Settings
from app.startup import StartError, prepare, shown_url

log = structlog.get_logger(__name__)

RESTART_SECONDS = (0.2, 10.0)
"""Pause before a process that died is started again: the first, and the longest."""
LONG_ENOUGH = 60.0
"""A process that lived for this many seconds was well: the next pause is the first again."""


class Supervisor:
    """Keeps `settings.workers` servers running, and gives them the connections of `listener`."""

    def __init__(self, settings: Settings, listener: socket.socket, process: Process) -> None:
        self._settings = settings
        self._listener = listener
        self._process = process
        self._dispatcher = Dispatcher(listener)
        self._children: dict[asyncio.subprocess.Process, socket.socket] = {}

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
            print(f"Keyturn is ready: {shown_url(self._settings, self._listener.getsockname()[1])}", flush=True)
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(child, environment)) for child in tuple(self._children)]
                await self._process.stopping.wait()
                for keeper in keepers:
                    keeper.cancel()
        finally:
            await self._stop()
            self._dispatcher.close()

    async def _start(self, environment: dict[str, str]) -> asyncio.subprocess.Process:
        """A server that answers. StartError if it ends before it does; its own last words have said why."""
        ours, theirs = channel()
        with theirs:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "app", "serve", "--channel", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the supervisor, which asks each to stop
            )
        self._children[child] = ours
        if not await asyncio.get_running_loop().sock_recv(ours, 1):
            code = await self._gone(child)
            raise StartError(f"A server process ended with {code} before it was ready.")
        self._dispatcher.add(ours)
        return child

    async def _gone(self, child: asyncio.subprocess.Process) -> int:
        """The exit code, once there is one."""
        code = await child.wait()
        self._dispatcher.remove(self._children.pop(child))
        return code

    async def _keep(self, child: asyncio.subprocess.Process, environment: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()
        shortest, longest = RESTART_SECONDS
        delay = shortest
        while True:
            started = loop.time()
            code = await self._gone(child)
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
