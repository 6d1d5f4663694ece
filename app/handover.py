"""Connections that one process accepts and others serve: each takes its turn, so that all get the same share.

A connection is sent over a unix socket to a server that is ready. One that starts, or has died, is left out, and nobody waits
in its queue. Where a server finds the other end of its socket closed, its supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

AT_ONCE = 64
"""Connections that are accepted, or taken, before others in the loop have their turn."""
READY = b"r"
RETRY_SECONDS = 0.05
"""Pause when nobody can take a connection, or none can be accepted."""


class Dispatcher:
    """Accepts on a listening socket and deals what comes to the channels in turn."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._channels: deque[socket.socket] = deque()
        self._waiting: socket.socket | None = None
        self._open = False

    def add(self, channel: socket.socket) -> None:
        """A server is ready at the other end."""
        self._channels.append(channel)
        self._resume()

    def remove(self, channel: socket.socket) -> None:
        """The server is gone."""
        with contextlib.suppress(ValueError):
            self._channels.remove(channel)
        channel.close()

    def close(self) -> None:
        """Accept nothing more."""
        self._pause()
        self._channels.clear()
        if self._waiting is not None:
            self._waiting.close()
        self._listener.close()

    def _resume(self) -> None:
        if self._channels and not self._open:
            self._open = True
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, self._waiting = self._waiting, None
                if connection is None:
                    connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many files: what waits in the kernel's queue waits a little longer
                log.warning("connection_not_accepted", error=str(error))
                self._later()
                return
            if self._give(connection):
                connection.close()
            else:
                self._waiting = connection
                self._later()
                return

    def _later(self) -> None:
        self._pause()
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._resume)

    def _give(self, connection: socket.socket) -> bool:
        for _ in range(len(self._channels)):
            channel = self._channels[0]
            self._channels.rotate(-1)
            with contextlib.suppress(OSError):  # full, since the server is stuck, or broken, since it has just died
                socket.send_fds(channel, [b"c"], [connection.fileno()])
                return True
        return False


class Receiver:
    """The other end: makes a transport of each connection. `gone` is called when there is no dispatcher any more."""

    def __init__(self, channel: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], gone: Callable[[], None]) -> None:
        self._channel = channel
        self._protocol = protocol
        self._gone = gone
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(channel, self._read)

    def ready(self) -> None:
        """Ask for connections."""
        self._channel.send(READY)

    def close(self) -> None:
        """Take nothing more."""
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                message, descriptors, _flags, _address = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            if not message:
                self.close()
                self._gone()
                return
            for descriptor in descriptors:
                task = asyncio.create_task(self._serve(socket.socket(fileno=descriptor)), name="connection")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:  # whoever connected has left
            connection.close()


def channel() -> tuple[socket.socket, socket.socket]:
    """The dispatcher's end and a receiver's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs
