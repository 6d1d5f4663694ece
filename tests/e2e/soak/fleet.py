"""Servers and workers on one database, and what befalls them: killed, stopped, frozen, cut off, with Postgres restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psycopg
from processes import free_port

from app.db.embedded import EmbeddedPostgres

ROOT = Path(__file__).parents[3]
PROJECT = Path(__file__).parent / "project" / "langgraph.json"
LEASE_SECONDS = 2
FROZEN_SECONDS = 3.0
FAULTS = ("kill", "kill", "stop", "freeze", "cut", "jobs", "postgres")


class Member:
    """One process of the fleet. A worker has no port."""

    def __init__(self, fleet: Fleet, command: str, port: int | None) -> None:
        self._fleet = fleet
        self.command = command
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; a server is awaited until it answers."""
        env = {
            **os.environ,
            "DATABASE_URL": self._fleet.postgres.url(),
            "SOAK_EFFECTS_URL": self._fleet.postgres.url(),
            "KEYTURN_CONFIG": str(PROJECT),
            "KEYTURN_EXAMPLES": "0",
            "KEYTURN_LEASE_SECONDS": str(LEASE_SECONDS),
            "KEYTURN_MAX_ATTEMPTS": "1000",  # faults come faster here than anywhere else
            "KEYTURN_HEARTBEAT_SECONDS": "1",
            "KEYTURN_LOG_FORMAT": "json",
            "KEYTURN_PORT": str(self.port or 0),
        }
        with self._fleet.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "app", self.command, env=env, cwd=ROOT, stdout=log, stderr=log
            )
        if self.port is not None:
            await self._answers()

    async def _answers(self) -> None:
        async with httpx.AsyncClient() as client, asyncio.timeout(90):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/ok", timeout=2)).status_code == 200:
                        return
                assert self.process is not None
                if self.process.returncode is not None:  # Postgres may have been away at that moment
                    await self.start()
                    return
                await asyncio.sleep(0.1)

    async def ended(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(20):
            await self.process.wait()


class Fleet:
    """The processes and their Postgres."""

    def __init__(self, postgres: EmbeddedPostgres, log: Path, *, servers: int, workers: int, seed: int) -> None:
        self.postgres = postgres
        self.log = log
        self.servers = [Member(self, "serve", free_port()) for _ in range(servers)]
        self.members = [*self.servers, *(Member(self, "worker", None) for _ in range(workers))]
        self.faults: Counter[str] = Counter()
        self._random = random.Random(seed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of them, up to the end of the block."""
        await asyncio.gather(*(member.start() for member in self.members))
        try:
            yield
        finally:
            for member in self.members:
                if member.process is not None and member.process.returncode is None:
                    member.process.kill()
                    await member.process.wait()

    async def suffer(self, until: float) -> None:
        """One fault after the other, until a time of the loop. In the end all are well again."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            await asyncio.sleep(self._random.uniform(0.3, 1.5))
            fault = self._random.choice(FAULTS)
            self.faults[fault] += 1
            await self._strike(fault, self._random.choice(self.members))
        for member in self.members:
            if member.process is not None and member.process.returncode is not None:
                await member.start()

    async def _strike(self, fault: str, victim: Member) -> None:
        assert victim.process is not None
        if fault in ("kill", "stop"):
            await victim.ended(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            await victim.start()
        elif fault == "freeze":
            victim.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_SECONDS)
            victim.process.send_signal(signal.SIGCONT)
        elif fault == "postgres":
            await asyncio.to_thread(self._restart_postgres)
        else:
            query = "DELETE FROM procrastinate_jobs WHERE status = 'todo' AND scheduled_at IS NULL"
            if fault == "cut":
                query = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.3"""
            with contextlib.suppress(psycopg.Error):
                async with await psycopg.AsyncConnection.connect(self.postgres.url(), autocommit=True) as connection:
                    await connection.execute(query)

    def _restart_postgres(self) -> None:
        self.postgres._pg_ctl("restart", "-m", "immediate", "-w", "-t", "30", "-l", str(self.postgres.data / "server.log"))
