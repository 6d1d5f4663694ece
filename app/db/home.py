"""The directory that holds an embedded Postgres: where it is, who may enter it, and its socket. Changes nothing outside it,
but for a directory in /tmp where the path is too long for a socket."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from app.db.binaries import Account, EmbeddedPostgresError, can_enter, find_account

SOCKET = ".s.PGSQL.5432"
SOCKET_PATH_LIMIT = 100
"""A socket's path has 108 bytes on Linux and 104 on macOS."""
UNQUOTABLE = set('"$`\\\n')
"""pg_ctl and initdb build commands for a shell, and put paths in double quotes without escaping them."""
OURS = re.compile(r"lock|users|s|cmd\.log|keyturn\.conf\.new|pg\d+(\.new)?|binaries-.*|lost\+found|\.git(ignore|keep)")


def data_home(configured: Path | None) -> Path:
    """Where the data is: as configured, else `.keyturn` in the checkout, or in the working directory of an installed Keyturn.

    A server that root starts runs as another account. Where that cannot reach the checkout, the data is under `/var/lib`.
    """
    if configured is not None:
        return configured.expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").exists():
        checkout = Path.cwd()
    account = find_account()
    if account is None or can_enter(account, checkout):
        return checkout / ".keyturn"
    return Path("/var/lib/keyturn") / hashlib.sha256(os.fsencode(checkout)).hexdigest()[:12]


def prepare_home(home: Path, account: Account | None) -> None:
    """Create the directory and let the server's account pass through it. Refuses one that holds something else."""
    if UNQUOTABLE & set(str(home)):
        raise EmbeddedPostgresError(f"Postgres' tools cannot work in {str(home)!r}. Name a --data-dir without \" $ ` \\.")
    try:
        _make_parents(home.parent)
        home.mkdir(exist_ok=True)
        if not any(home.glob("pg[0-9]*/PG_VERSION")):
            foreign = sorted(path.name for path in home.iterdir() if not OURS.fullmatch(path.name))
            if foreign:
                raise EmbeddedPostgresError(f"{home} holds other files ({foreign[0]}, …). Name an empty --data-dir.")
        if home.stat().st_uid == os.geteuid() or os.geteuid() == 0:
            home.chmod(0o711 if account else 0o700)  # nobody else has business here
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(13, "it belongs to somebody else", str(home))
    except OSError as error:
        raise EmbeddedPostgresError(
            f"The data directory {home} cannot be used: {error.strerror}. Name another --data-dir, or set DATABASE_URL."
        ) from error
    if account and not can_enter(account, home):
        raise EmbeddedPostgresError(
            f"Postgres runs as {account.name}, who cannot enter {home.parent}. Name another --data-dir."
        )


def _make_parents(path: Path) -> None:
    """Missing parents, open to all whatever the umask is: the server's account must pass through."""
    if not path.exists():
        _make_parents(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def clusters(home: Path) -> list[Path]:
    """Complete clusters in the home, the newest major version first."""
    found = [p for p in home.glob("pg[0-9]*") if re.fullmatch(r"pg\d+", p.name) and (p / "PG_VERSION").exists()]
    return sorted(found, key=lambda path: int(path.name[2:]), reverse=True)


def own(path: Path, account: Account | None) -> None:
    """Make a directory that belongs to the server's account alone. One that is somebody else's is refused, never taken over."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise EmbeddedPostgresError(f"{path} is not a directory. Remove it.") from error
    try:
        owner = os.fstat(fd).st_uid
        if owner not in {os.geteuid(), account.uid if account else os.geteuid()}:
            raise EmbeddedPostgresError(f"{path} belongs to somebody else. Remove it, or name another --data-dir.")
        if account:
            os.fchown(fd, account.uid, account.gid)
        os.fchmod(fd, stat.S_IRWXU)
    finally:
        os.close(fd)


def make_socket_dir(home: Path, account: Account | None) -> Path:
    """A directory for the server's socket: in the home, or in /tmp where the home's path is too long or has a comma, which
    separates hosts in a connection string."""
    path = home / "s"
    if len(os.fsencode(path / SOCKET)) >= SOCKET_PATH_LIMIT or "," in str(path):
        temporary = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
        digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
        path = Path(temporary) / f"keyturn-{account.uid if account else os.geteuid()}-{digest}"
    own(path, account)
    return path
