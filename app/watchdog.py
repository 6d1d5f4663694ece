"""Notices code that blocks the event loop, says where it stands, and ends it when it belongs to a run.

A coroutine that does not await stops every other run, the API and the renewal of leases. Only the code of a graph or a tool
is ever interrupted: neither ours, nor a library's on our behalf, nor a callback of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

import structlog

log = structlog.get_logger(__name__)

RUN: ContextVar[str | None] = ContextVar("run", default=None)
"""Id of the run that the current code belongs to."""

SIGNAL = signal.SIGURG
"""By default it is ignored, so one that comes late harms nothing."""

LOOKS = 8
"""How often the loop is looked at within the time that it may be blocked."""

SHOWN_FRAMES = 12
STARTED_BY = frozenset({"app.process", "asyncio.base_events", "asyncio.events"})
"""Modules whose functions run the loop, uvloop's or asyncio's, and the callbacks in it."""

LIBRARIES = frozenset(
    {"anyio", "httpcore", "httpx", "langchain", "langchain_core", "langgraph", "opentelemetry", "psycopg", "psycopg_pool"}
    | {"pydantic", "redis", "sqlalchemy", "structlog", "tenacity", "uvloop"}
)
"""Packages that work for whoever calls them: for the server too, in tasks of their own."""


class BlockedLoop(BaseException):
    """Raised inside code that blocks the event loop. No Exception, so that nobody catches it by the way and tries again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"This code blocked the server's event loop for {seconds:.1f} s and was stopped. "
            "Make it a plain `def`, which runs in a thread, or await what it waits for."
        )


class Watchdog:
    """Watches the running loop from a thread of its own."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long the loop may be blocked."""
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._may_interrupt = threading.current_thread() is threading.main_thread()
        self._closing = threading.Event()
        self._alive = True
        self._suspects: dict[int, FrameType] = {}
        self._since = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the end of the block. Signal handlers belong to the main thread: elsewhere it only tells."""
        before = signal.signal(SIGNAL, self._interrupt) if self._may_interrupt else None
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closing.set()
            thread.join(self._seconds)
            if self._may_interrupt:
                signal.signal(SIGNAL, before or signal.SIG_DFL)

    def _answer(self) -> None:
        self._alive = True

    def _watch(self) -> None:
        """Counts its own looks rather than time: in a process that was frozen, nothing was blocked."""
        missed = seen = 0
        while not self._closing.wait(self._seconds / LOOKS):
            if self._alive:
                if missed > LOOKS:
                    log.warning("event_loop_free", seconds=round(missed * self._seconds / LOOKS, 1))
                missed, self._suspects, self._alive = 0, {}, False
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._answer)
                continue
            missed += 1
            frame = sys._current_frames().get(self._watched)
            seen = seen + 1 if self._suspect(frame) else 0
            if missed == LOOKS + 1:
                stack = traceback.format_stack(frame, SHOWN_FRAMES)
                log.warning("event_loop_blocked", seconds=self._seconds, stack="".join(stack))
            if seen >= LOOKS and self._may_interrupt:
                signal.pthread_kill(self._watched, SIGNAL)

    def _suspect(self, frame: FrameType | None) -> bool:
        """Note which calls of foreign code are under way. Returns whether one of them was so at the last look too."""
        foreign = {id(f): f for f in _outward(frame) if _owner(f) == "foreign"}
        still = {key: f for key, f in foreign.items() if key in self._suspects}
        if not still:
            self._since = time.monotonic()
        self._suspects = still or foreign
        return bool(still)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """In the watched thread: raise where the run's code stands, if that is what has blocked the loop all the time."""
        if self._alive or RUN.get() is None or asyncio.current_task(self._loop) is None:
            return
        if not _is_foreign(frame) or not any(id(f) in self._suspects for f in _outward(frame)):
            return
        self._suspects = {}  # what it does on its way out has a chance of its own
        raise BlockedLoop(time.monotonic() - self._since)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of what the loop runs now, from the innermost on."""
    while frame is not None and frame.f_globals.get("__name__") not in STARTED_BY:
        yield frame
        frame = frame.f_back


def _owner(frame: FrameType) -> str:
    """Whose code a frame runs: `loop`, `import`, `library`, `ours`, or `foreign` for that of graphs and tools."""
    name = str(frame.f_globals.get("__name__", ""))
    top = name.partition(".")[0]
    if top == "asyncio":
        return "loop"
    if top in ("importlib", "_frozen_importlib"):
        return "import"
    if top in sys.stdlib_module_names or top in LIBRARIES:
        return "library"
    return "ours" if top == "app" and not name.startswith("app.examples") else "foreign"


def _is_foreign(frame: FrameType | None) -> bool:
    """Whether the innermost code that is not a library's is foreign. An import, which ends, is left to end."""
    owners = [_owner(f) for f in _outward(frame)]
    return "import" not in owners and next((o for o in owners if o != "library"), "ours") == "foreign"
