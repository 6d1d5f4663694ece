"""The embedded Postgres: every way to start, share, crash and leave it. Real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from db.holder import SETTINGS

from app.db.binaries import find_account, find_installation
from app.db.embedded import EmbeddedPostgres, EmbeddedPostgresError
from app.db.home import clusters, data_home, make_socket_dir, own, prepare_home

HOLDER = Path(__file__).with_name("holder.py")
NOBODY = 65534


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


class Holder:
    """A process that holds the Postgres in a home."""

    def __init__(self, home: Path, uid: int | None = None, **env: str) -> None:
        self.home = home
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, str(HOLDER), str(home), *([str(uid)] if uid else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(root)} | env,
        )  # fmt: skip

    def ready(self) -> int:
        """Wait until it holds the server. Returns the server's pid."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        assert said[:2] == ["ready", "keyturn"], self.process.communicate()
        return int(said[2])

    def leave(self) -> None:
        """Let it end in order."""
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.communicate()


Hold = Callable[..., Holder]


@pytest.fixture(scope="module")
def folder(open_directory: Path) -> Path:
    """Room for this module's homes."""
    path = open_directory / "embedded"
    path.mkdir(mode=0o711)
    return path


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """A home with a cluster that was made and stopped."""
    with EmbeddedPostgres(folder / "made", SETTINGS) as server:
        assert server.home == folder / "made"
    return folder / "made"


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts processes that hold a Postgres, and ends what a test leaves."""
    holders: list[Holder] = []

    def start(home: Path, uid: int | None = None, **env: str) -> Holder:
        holders.append(Holder(home, uid, **env))
        return holders[-1]

    yield start
    for holder in holders:
        if holder.process.returncode is None:
            holder.kill()


@pytest.fixture
def home(folder: Path, made: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of it for one test."""
    copy = folder / f"{request.node.originalname} copy"
    subprocess.run(["cp", "-a", str(made), str(copy)], check=True)
    try:
        yield copy
    finally:
        if (pid := pid_in(copy)) is not None:  # of a test that failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT)
        shutil.rmtree(copy)


def pid_in(home: Path) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((clusters(home)[0] / "postmaster.pid").read_text().split()[0])
    return None


def test_first_start_makes_a_durable_cluster_and_the_database(folder: Path) -> None:
    home = folder / "a long path, with a comma and sp ces" / ("x" * 100)
    server = EmbeddedPostgres(home)
    with server, psycopg.connect(server.url()) as connection:
        assert len(os.fsencode(home)) > 107
        shown = connection.execute(
            "SELECT name, setting FROM pg_settings WHERE name IN "
            "('fsync', 'synchronous_commit', 'full_page_writes', 'listen_addresses', 'TimeZone', 'server_encoding')"
        ).fetchall()
        assert dict(shown) == {
            "TimeZone": "UTC",
            "fsync": "on",
            "full_page_writes": "on",
            "listen_addresses": "",
            "server_encoding": "UTF8",
            "synchronous_commit": "on",
        }
        connection.execute("CREATE EXTENSION vector")
        sockets = [Path(row[0]) for row in connection.execute("SELECT current_setting('unix_socket_directories')")]
        assert server.acquire() is server
    assert server.postmaster_pid is None
    assert not any(path.exists() for path in sockets[0].parent.glob(sockets[0].name.strip('"'))), "left in /tmp"
    server.release()  # has left already


def test_many_processes_share_one_server_and_the_last_stops_it(home: Path, hold: Hold) -> None:
    holders = [hold(home) for _ in range(4)]
    pids = {holder.ready() for holder in holders}
    assert len(pids) == 1
    for holder in holders[:-1]:
        holder.leave()
    assert not gone(*pids)
    holders[-1].leave()
    assert gone(*pids)


def test_many_processes_on_a_fresh_home(folder: Path, hold: Hold) -> None:
    holders = [hold(folder / "fresh") for _ in range(3)]
    pids = {holder.ready() for holder in holders}
    assert len(pids) == 1
    for holder in holders:
        holder.leave()
    assert gone(*pids)


def test_the_next_process_joins_after_a_crash_and_stops_the_server(home: Path, hold: Hold) -> None:
    holder = hold(home)
    pid = holder.ready()
    holder.kill()
    assert not gone(pid)
    other = hold(home)
    assert other.ready() == pid
    other.leave()
    assert gone(pid)


def test_a_server_that_was_killed_is_started_again_while_sessions_linger(home: Path, hold: Hold) -> None:
    server = EmbeddedPostgres(home, SETTINGS).acquire()
    with psycopg.connect(server.url(), autocommit=True) as session:
        session.execute("CREATE TABLE kept AS SELECT 1 AS a")
        before = server.postmaster_pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        until(lambda: gone(before))
        other = hold(home)
        assert other.ready() != before
    with psycopg.connect(server.url()) as session:
        assert session.execute("SELECT a FROM kept").fetchone() == (1,)
    other.leave()
    server.release()
    assert server.postmaster_pid is None


def test_a_stale_pid_of_another_program(home: Path) -> None:
    """The pid of a server that crashed may belong to anything by now, also to another Postgres."""
    [cluster] = clusters(home)
    with subprocess.Popen([sys.executable, "-c", "input()", "postgres"], stdin=subprocess.PIPE) as innocent:
        (cluster / "postmaster.pid").write_text(f"{innocent.pid}\n{cluster}\n1\n5432\n/nowhere\n\n  1 1\nready   \n")
        shutil.chown(cluster / "postmaster.pid", *_owner(cluster))
        with EmbeddedPostgres(home, SETTINGS) as server, psycopg.connect(server.url()):
            assert server.postmaster_pid != innocent.pid
        assert innocent.poll() is None
        innocent.communicate(b"\n")


def _owner(path: Path) -> tuple[int, int]:
    return path.stat().st_uid, path.stat().st_gid


@pytest.mark.parametrize("content", ["", "garbage"])
def test_a_torn_pid_file(home: Path, content: str) -> None:
    [cluster] = clusters(home)
    (cluster / "postmaster.pid").write_text(content)
    shutil.chown(cluster / "postmaster.pid", *_owner(cluster))
    with EmbeddedPostgres(home, SETTINGS) as server, psycopg.connect(server.url()):
        pass


def test_a_kill_while_the_cluster_is_made(folder: Path, hold: Hold) -> None:
    """initdb outlives us and goes on writing: whoever comes next waits for its end, and begins anew."""
    home = folder / "killed"
    for wait_for in ("PG_VERSION", "base/1/PG_VERSION"):
        holder = hold(home)
        until(lambda name=wait_for: any(home.glob(f"pg*.new/{name}")))  # type: ignore[misc]
        holder.kill()
        assert clusters(home) == []
    holder = hold(home)
    holder.ready()
    holder.leave()
    assert not any(home.glob("*.new"))


def test_a_kill_while_the_server_starts(home: Path, hold: Hold) -> None:
    holder = hold(home)
    until(lambda: any(home.glob("pg*/postmaster.pid")))
    holder.kill()
    other = hold(home)
    other.ready()
    other.leave()


def test_ctrl_c_while_the_server_starts_leaves_nothing_running(home: Path, hold: Hold) -> None:
    holder = hold(home)
    until(lambda: pid_in(home))
    pid = pid_in(home)
    holder.process.send_signal(signal.SIGINT)
    holder.process.communicate()
    assert pid is not None
    until(lambda: gone(pid))


def test_a_cluster_of_another_major_is_refused_in_one_line(home: Path) -> None:
    [cluster] = clusters(home)
    other = cluster.rename(home / "pg9")
    (other / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedPostgresError, match=r"made by PostgreSQL 9, and there is only [\d, ]+ here") as refused:
        EmbeddedPostgres(home, SETTINGS).acquire()
    assert "\n" not in str(refused.value)


def test_a_setting_that_postgres_refuses_is_told_in_one_line(home: Path) -> None:
    server = EmbeddedPostgres(home, {**SETTINGS, "shared_buffers": "nonsense"})
    with pytest.raises(
        EmbeddedPostgresError, match=r"failed in .* copy: invalid value for parameter .shared_buffers"
    ) as refused:
        server.acquire()
    assert "\n" not in str(refused.value)
    with EmbeddedPostgres(home, {**SETTINGS, "application_name": r"it's a \ "}) as fixed, psycopg.connect(fixed.url()):
        pass


def test_a_directory_with_other_files_is_refused_and_left_alone(folder: Path) -> None:
    home = folder / "documents"
    home.mkdir(mode=0o755)
    (home / "letter.txt").write_text("Dear")
    with pytest.raises(EmbeddedPostgresError, match=r"holds other files \(letter\.txt"):
        EmbeddedPostgres(home).acquire()
    assert home.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in home.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("name", ["a$HOME", 'quo"te', "tick`", "back\\slash"])
def test_a_path_that_a_shell_would_change_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(EmbeddedPostgresError, match="cannot work in"):
        EmbeddedPostgres(folder / name).acquire()
    assert not (folder / name).exists()


def test_a_file_in_place_of_the_directory_is_refused(folder: Path) -> None:
    (folder / "file").write_text("")
    for home in (folder / "file", folder / "file" / "below"):
        with pytest.raises(EmbeddedPostgresError, match="cannot be used"):
            EmbeddedPostgres(home).acquire()


def test_a_socket_directory_of_somebody_else_is_never_taken_over(folder: Path) -> None:
    """/tmp is open to all: what stands there under our name may be a trap."""
    account = find_account()
    home = folder / ("y" * 110)
    path = make_socket_dir(home, account)
    assert path.parent == Path("/tmp")
    path.rmdir()
    target = folder / "target"
    target.mkdir(mode=0o755)
    path.symlink_to(target)
    try:
        with pytest.raises(EmbeddedPostgresError, match="not a directory"):
            make_socket_dir(home, account)
        assert target.stat().st_mode & 0o777 == 0o755
    finally:
        path.unlink()


def test_a_home_that_is_removed_under_a_running_server(home: Path) -> None:
    server = EmbeddedPostgres(home, SETTINGS).acquire()
    pid = server.postmaster_pid
    assert pid is not None
    os.kill(pid, signal.SIGQUIT)
    until(lambda: gone(pid))
    elsewhere = home.rename(home.with_name("elsewhere"))
    try:
        server.release()
    finally:
        elsewhere.rename(home)


def test_where_the_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_home(Path("data")) == Path.cwd() / "data"
    found = data_home(None)
    assert found == Path(__file__).parents[2] / ".keyturn" or found.parent == Path("/var/lib/keyturn")
    monkeypatch.setenv("KEYTURN_PG_BIN", "/nowhere")
    with pytest.raises(EmbeddedPostgresError, match="KEYTURN_PG_BIN"):
        find_installation(None, None, Path("/nowhere"))


# What only root can do, or be. An ordinary user has nothing to show here, and shows the rest of this file instead.


def test_an_ordinary_user(folder: Path, made: Path, hold: Hold) -> None:
    """Whoever is root becomes an ordinary user for this; everybody else is one already."""
    assert made.exists()
    uid = NOBODY if os.geteuid() == 0 else None
    root = folder / "user"
    root.mkdir(mode=0o711)
    env: dict[str, str] = {}
    if uid:
        os.chown(root, uid, uid)
        # In root's home nobody can run the programs; root's own server has made a copy that anybody can.
        env["KEYTURN_PG_BIN"] = str(find_installation(None, find_account(), made).bin)
    holder = hold(root / "of mine", uid, **env)
    pid = holder.ready()
    assert Path(f"/proc/{pid}").stat().st_uid == (uid or os.geteuid())
    assert (root / "of mine").stat().st_mode & 0o777 == 0o700
    holder.leave()
    assert gone(pid)
    if uid:  # root goes on with the user's cluster, as the user
        with EmbeddedPostgres(root / "of mine", SETTINGS) as server:
            assert Path(f"/proc/{server.postmaster_pid}").stat().st_uid == uid
        holder = hold(root / "of mine", uid, **env)
        holder.ready()
        holder.leave()
        refused = hold(made, uid, **env)
        refused.process.wait()
        assert refused.process.stderr is not None
        assert "cannot be used: Permission denied" in refused.process.stderr.read()
        refused.kill()


def test_a_private_directory_stays_private(folder: Path) -> None:
    """Started by root, Postgres runs as another account. It is told so early, and no directory is opened for it."""
    private = folder / "private"
    private.mkdir(mode=0o700)
    account = find_account()
    if account is None:
        prepare_home(private / "home", None)
    else:
        with pytest.raises(EmbeddedPostgresError, match="cannot enter"):
            prepare_home(private / "home", account)
        own(folder / "taken", account)
        assert _owner(folder / "taken") == (account.uid, account.gid)
        os.chown(folder / "taken", 12345, 12345)
        with pytest.raises(EmbeddedPostgresError, match="belongs to somebody else"):
            own(folder / "taken", account)
    assert private.stat().st_mode & 0o777 == 0o700
