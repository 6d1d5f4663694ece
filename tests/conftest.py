"""Fixtures: one real Postgres for the whole run, a database per worker, real server processes."""

from __future__ import annotations

import os

# Nothing of the caller's environment may reach a test, before anything reads it.
for _name in tuple(os.environ):
    if _name.startswith(("KEYTURN_", "OPENAI_", "ANTHROPIC_", "LANGSMITH_", "LANGCHAIN_", "LANGGRAPH_", "OTEL_", "PG")) or (
        # Servers that tests start would compile every module anew, each time.
        _name in ("DATABASE_URL", "PYTHONDONTWRITEBYTECODE") or _name.lower().endswith("_proxy")
    ):
        del os.environ[_name]

import asyncio
import contextlib
import fcntl
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from processes import Server, Servers
from psycopg import sql

from app.db.base import Base
from app.db.embedded import EmbeddedPostgres
from app.db.engine import Database, open_database
from app.db.migrate import migrate

# Tests need the semantics of Postgres, not its durability; crash tests kill our processes, not the machine.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "autovacuum": "off",
    "max_connections": 400,
    "shared_buffers": "64MB",
}
HOMES = "keyturn-tests-"
ROOM = 2**30
RUN_ID = pytest.StashKey[str]()
TEMPLATE = "keyturn_template"
LANGGRAPH_TABLES = ("checkpoints", "checkpoint_blobs", "checkpoint_writes", "store", "procrastinate_jobs")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run an id that all its workers know."""
    if not hasattr(config, "workerinput"):
        config.stash[RUN_ID] = uuid.uuid4().hex
        if config.pluginmanager.hasplugin("xdist"):
            config.option.testrunuid = config.stash[RUN_ID]


def pytest_unconfigure(config: pytest.Config) -> None:
    """When all workers have gone, remove the run's Postgres, and what runs that were killed have left."""
    if not hasattr(config, "workerinput"):
        for home in _root().glob(f"{HOMES}*"):
            _remove_if_unused(home)


def _root() -> Path:
    """In memory, where the machine has room for that: a container often has 64 MB."""
    shm = Path("/dev/shm")
    if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > ROOM:
        return shm
    return Path("/tmp")  # TMPDIR may be a private directory, and the account that runs Postgres must get in


def _home(config: pytest.Config) -> Path:
    worker = getattr(config, "workerinput", None)
    return _root() / f"{HOMES}{(worker['testrunuid'] if worker else config.stash[RUN_ID])[:12]}"


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    """The Postgres of the run, shared by its workers. The last to leave stops it."""
    with EmbeddedPostgres(_home(request.config), FAST) as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
            admin.execute("SELECT pg_advisory_lock(1)")  # one worker builds the template
            row = admin.execute("SELECT 1 FROM pg_database WHERE datname = %s AND datistemplate", [TEMPLATE]).fetchone()
            if row is None:
                admin.execute(f"DROP DATABASE IF EXISTS {TEMPLATE}")
                admin.execute(f"CREATE DATABASE {TEMPLATE}")
                asyncio.run(migrate(server.url(TEMPLATE)))
                admin.execute(f"ALTER DATABASE {TEMPLATE} WITH is_template true allow_connections false")
        yield server


def _remove_if_unused(home: Path) -> None:
    """Remove the home of a Postgres that no test process uses. Its server, if it was left running, is told to stop."""
    with contextlib.suppress(OSError), (home / "lock").open("rb") as lock, (home / "users").open("rb") as users:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while one starts or stops
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while one is in use
        for pid_file in home.glob("pg*/postmaster.pid"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(pid_file.read_text().split()[0])
                if os.fsencode(home) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGQUIT)
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _database(server: EmbeddedPostgres, *, migrated: bool = True) -> Iterator[str]:
    """A database of its own, with our schema or empty."""
    name = sql.Identifier(f"t_{uuid.uuid4().hex[:12]}")
    source = sql.SQL(" TEMPLATE {} STRATEGY file_copy").format(sql.Identifier(TEMPLATE)) if migrated else sql.SQL("")
    with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}{}").format(name, source))
        yield server.url(name.as_string(admin).strip('"'))
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.fixture(scope="session")
def database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A migrated database of this worker."""
    with _database(postgres) as url:
        yield url


@pytest.fixture(scope="module")
def module_database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A migrated database of the tests of one file."""
    with _database(postgres) as url:
        yield url


@pytest.fixture
def fresh_database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A migrated database of this test."""
    with _database(postgres) as url:
        yield url


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database without a schema."""
    with _database(postgres, migrated=False) as url:
        yield url


@pytest_asyncio.fixture(scope="session")
async def _worker_database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url, pool_size=30, name="keyturn-tests") as database:
        yield database


@pytest_asyncio.fixture
async def database(_worker_database: Database) -> Database:
    """The worker's database, emptied."""
    tables = [*(f'"{t.name}"' for t in reversed(Base.metadata.sorted_tables)), *LANGGRAPH_TABLES]
    async with _worker_database.pool.connection() as connection, connection.transaction():
        # Deleting is many times faster than truncating when tables are small; the audit's trigger is off in this session.
        await connection.execute("SET LOCAL session_replication_role = replica")
        for table in tables:
            await connection.execute(f"DELETE FROM {table}")  # type: ignore[arg-type]
    return _worker_database


@pytest.fixture(scope="session")
def open_directory() -> Iterator[Path]:
    """A directory that the account of an embedded Postgres may enter, unlike pytest's, if root runs the tests."""
    with tempfile.TemporaryDirectory(dir=_root(), prefix="keyturn-homes-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest_asyncio.fixture(scope="session")
async def servers(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    """Starts real server processes and stops what a test leaves running."""
    async with Servers(tmp_path_factory.mktemp("servers")) as started:
        yield started


@pytest_asyncio.fixture(scope="session")
async def live_server(servers: Servers, postgres: EmbeddedPostgres) -> AsyncIterator[Server]:
    """A server process of this worker with a database of its own."""
    with _database(postgres) as url:
        server = await servers.start(url)
        yield server
        await server.stop()
