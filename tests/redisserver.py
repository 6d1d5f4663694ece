"""A real Redis for tests: on a free port of loopback, with nothing saved to disk, killed and frozen as need be."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis
from processes import free_port

READY_SECONDS = 10


class RedisServer:
    """One `redis-server`. Starts anew, empty, on the same port."""

    def __init__(self, directory: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError("These tests need `redis-server` on PATH. On Debian and Ubuntu: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> redis.Redis:
        """A client for the test itself. Close it."""
        return redis.Redis(port=self.port, socket_timeout=5)

    def start(self) -> None:
        """Start and wait until it answers."""
        with (self._directory / "redis.log").open("ab") as out:
            self._process = subprocess.Popen([*self._command, "--dir", str(self._directory)], stdout=out, stderr=out)
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """End it as a crash would. Everything is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It neither answers nor refuses."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
