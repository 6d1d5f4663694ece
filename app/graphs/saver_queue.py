"""Writes of all runs of a process, in few statements: what comes while statements are in flight goes out with the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.db.engine import LangGraphPool
from app.graphs.review import LeaseLost
from app.graphs.saver_rows import Operation, Row, statement

FLUSHERS = 2
"""Statements in flight at once: while one waits for its commit, the next can be built."""
TRAILING_SECONDS = 0.02
"""How long writes of a task may wait for the checkpoint that they lead to."""


class WriteQueue:
    """Operations that wait to be written, in the order in which they came.

    `may_write` says whether this process still holds its runs. A process that was frozen for longer than its leases must
    not write over what its successor wrote meanwhile.
    """

    def __init__(self, pool: LangGraphPool, may_write: Callable[[], bool]) -> None:
        self._pool = pool
        self._may_write = may_write
        self._waiting: list[Operation] = []
        self._work = asyncio.Event()
        self._trailing: dict[str, Operation] = {}
        self._left: dict[str, list[asyncio.Future[None]]] = {}
        self._open = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write as long as the block runs. Whatever waits after it is cancelled."""
        flushers = [asyncio.create_task(self._flush(), name=f"saver-{i}") for i in range(FLUSHERS)]
        try:
            yield
        finally:
            self._open = False
            for flusher in flushers:
                flusher.cancel()
            await asyncio.gather(*flushers, return_exceptions=True)
            for operation in [*self._waiting, *self._trailing.values()]:
                operation.done.cancel()
            self._trailing.clear()

    def operation(self) -> Operation:
        """A new operation, empty."""
        return Operation(asyncio.get_running_loop().create_future())

    async def write(self, thread_id: str, operation: Operation) -> None:
        """Write, with what trails in the thread. Returns when it is committed. LeaseLost if this process may not write."""
        self._fence()
        while left := self._left.get(thread_id):
            await asyncio.wait(left)
            self._left.pop(thread_id, None)
            for future in left:
                future.result()  # a checkpoint must not follow writes that are missing
        if (trailing := self._trailing.pop(thread_id, None)) is not None:
            operation.kept[:0] = trailing.kept
        self._enqueue(operation)
        try:
            await operation.done
        except asyncio.CancelledError:
            if operation.done.cancelled() and self._open and not operation.answered:
                operation.done = asyncio.get_running_loop().create_future()
                self._follow(thread_id, operation.done)  # it is on its way all the same
            raise

    def trail(self, thread_id: str, rows: list[Row]) -> None:
        """Leave a task's writes to whatever of the thread is written or read next, or to the clock."""
        self._fence()
        operation = self._trailing.get(thread_id)
        if operation is None:
            operation = self._trailing[thread_id] = self.operation()
            asyncio.get_running_loop().call_later(TRAILING_SECONDS, self._leave, thread_id, operation)
        operation.kept += rows

    async def settle(self, thread_id: str | None) -> None:
        """Wait until all that nobody waits for in a thread, or in all of them, is written or has failed."""
        for found in [thread_id] if thread_id is not None else [*self._trailing, *self._left]:
            if (operation := self._trailing.get(found)) is not None:
                self._leave(found, operation)
            if left := self._left.get(found):
                await asyncio.wait(left)

    def _fence(self) -> None:
        if not self._may_write():
            raise LeaseLost("The leases of this process have run out: another may hold its runs.")

    def _leave(self, thread_id: str, operation: Operation) -> None:
        """Write what trails by itself. If that fails, the thread's next write tells."""
        if self._trailing.get(thread_id) is not operation:
            return
        del self._trailing[thread_id]
        self._follow(thread_id, operation.done)
        try:
            self._fence()
        except LeaseLost as error:
            operation.done.set_exception(error)
        else:
            self._enqueue(operation)

    def _follow(self, thread_id: str, done: asyncio.Future[None]) -> None:
        """Remember what nobody waits for until it is written. What fails stays, for the next write to see."""
        self._left.setdefault(thread_id, []).append(done)

        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None and (left := self._left.get(thread_id)):
                left[:] = [other for other in left if other is not done]
                if not left:
                    del self._left[thread_id]

        done.add_done_callback(written)

    def _enqueue(self, operation: Operation) -> None:
        self._waiting.append(operation)
        self._work.set()

    async def _flush(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(0)  # let whatever else this turn of the loop writes join
            batch, self._waiting = self._waiting, []
            self._work.clear()
            if not batch:
                continue
            try:
                await self._execute(batch)
            except Exception as error:
                await self._isolate(batch, error)
            except BaseException:
                for operation in batch:
                    operation.done.cancel()
                raise
            else:
                _release(batch)

    async def _isolate(self, batch: list[Operation], error: Exception) -> None:
        """One bad row must not fail its neighbours: write them one by one."""
        for operation in batch:
            try:
                if len(batch) == 1:
                    raise error
                await self._execute([operation])
            except Exception as own:
                operation.answered = True
                if not operation.done.done():
                    operation.done.set_exception(own)
            else:
                _release([operation])

    async def _execute(self, batch: list[Operation]) -> None:
        query, params = statement(batch)
        async with self._pool.connection() as connection:
            await connection.execute(query, params, binary=True)


def _release(batch: list[Operation]) -> None:
    for operation in batch:
        operation.answered = True  # also to a caller that was cancelled just now, and has not heard of it
        if not operation.done.done():
            operation.done.set_result(None)
