"""Real `keyturn` processes for tests: started on a free port, awaited until they answer, killed as a crash would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType

import httpx

READY_SECONDS = 60
STOP_SECONDS = 15


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Server:
    """One `keyturn serve` process on one database."""

    def __init__(self, log: Path, database_url: str, settings: dict[str, str], environment: dict[str, str]) -> None:
        self.log = log
        self.database_url = database_url
        self.settings = settings
        self.environment = environment
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> Server:
        """Start the process and wait until it answers."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("COV_")}
        env |= {"DATABASE_URL": self.database_url, "KEYTURN_PORT": str(self.port), "KEYTURN_LOG_FORMAT": "text"}
        env |= {f"KEYTURN_{k.upper()}": v for k, v in self.settings.items()} | self.environment
        with self.log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "app.cli", "serve", env=env, stdout=out, stderr=out, cwd=Path(__file__).parents[1]
            )
        await self._ready()
        return self

    async def _ready(self) -> None:
        assert self.process is not None
        async with httpx.AsyncClient() as client, asyncio.timeout(READY_SECONDS):
            delay = 0.02
            while True:
                if self.process.returncode is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/ok")).status_code == 200:
                        return
                await asyncio.sleep(delay)
                delay = min(delay * 1.5, 0.3)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(STOP_SECONDS):
            return await self.process.wait()

    async def restart(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop with a signal (SIGKILL is a crash) and start again on the same port and database."""
        await self.stop(number)
        await self.start()

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Servers:
    """Starts servers and stops them all in the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[Server] = []

    async def start(self, database_url: str, *, environment: dict[str, str] | None = None, **settings: object) -> Server:
        """A server on a database; settings become `KEYTURN_*` variables, `environment` is given to it as it is."""
        log = self._directory / f"server-{len(self._all)}.log"
        server = Server(log, database_url, {k: str(v) for k, v in settings.items()}, environment or {})
        self._all.append(server)
        return await server.start()

    async def __aenter__(self) -> Servers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._all:
            if server.process is not None and server.process.returncode is None:
                server.process.kill()
                await server.process.wait()
