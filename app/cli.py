"""The command line's grammar. What the commands do is in `app.commands`, which takes seconds to load the whole server."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from app import __version__


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="keyturn",
        description="An HTTP agent service with persistent threads and an interrupt inbox.",
        epilog="Every option is a setting too: KEYTURN_PORT=9000 is --port 9000. See the README for all settings.",
    )
    top.add_argument("--version", action="version", version=f"keyturn {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    server = commands.add_parser(
        "serve",
        help="serve the API and execute runs (the default)",
        description="Serve the API and execute runs. Without DATABASE_URL, an embedded Postgres is started and migrated too.",
    )
    server.add_argument("--host", help="address to listen on (127.0.0.1)")
    server.add_argument("--port", type=int, help="port to listen on (8123; 0 for any)")
    _common(server)
    server.add_argument("--workers", type=int, metavar="N", help="server processes behind the port (1)")
    server.add_argument("--no-worker", dest="worker", action="store_false", default=None, help="only serve the API")
    server.add_argument("--channel", type=int, help=argparse.SUPPRESS)  # from the supervisor
    server.add_argument("--no-examples", dest="examples", action="store_false", default=None, help="do not offer the examples")
    server.set_defaults(run="serve")

    worker = commands.add_parser(
        "worker",
        help="execute runs without serving the API",
        description="Execute runs without serving the API. Any number of workers and servers may share a DATABASE_URL.",
    )
    _common(worker)
    worker.add_argument("--health-port", type=int, metavar="PORT", help="answer GET /ok there")
    worker.set_defaults(run="worker")

    migration = commands.add_parser(
        "migrate",
        help="bring the database to this version's schema",
        description="Bring the database to this version's schema. May be run at any time, by any number of processes at once.",
    )
    _common(migration)
    migration.set_defaults(run="migrate")

    keys = commands.add_parser("keys", help="create, list and revoke API keys").add_subparsers(dest="action", required=True)
    create = keys.add_parser("create", help="create a key and print it, once")
    create.add_argument("--subject", default="admin", help="who acts with the key; shown in the audit")
    create.add_argument("--tenant", help="whose data the key reaches")
    create.add_argument("--name", default="", help="a note for the list")
    create.add_argument("--scopes", help="comma separated; all by default")
    create.add_argument("--expires-days", type=_days, metavar="DAYS", help="days after which the key stops to work")
    create.set_defaults(run="keys create")
    listing = keys.add_parser("list", help="list keys, without their text")
    listing.set_defaults(run="keys list")
    revoke = keys.add_parser("revoke", help="revoke a key, on every process at once")
    revoke.add_argument("id", type=UUID)
    revoke.set_defaults(run="keys revoke")
    for sub in (create, listing, revoke):
        _common(sub)

    openapi = commands.add_parser("openapi", help="print the OpenAPI document")
    openapi.set_defaults(run="openapi")

    db = commands.add_parser("db", help="about the database").add_subparsers(dest="action", required=True)
    url = db.add_parser("url", help="print the address of the database; an embedded one runs until Ctrl-C")
    _common(url)
    url.set_defaults(run="db url")

    commands.add_parser("inbox", help="answer pending questions in the terminal", add_help=False)
    return top


def _days(text: str) -> timedelta:
    try:
        days = timedelta(days=float(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days") from None
    if not timedelta(0) < days < timedelta(days=36_500):
        raise argparse.ArgumentTypeError("must be more than 0, and at most a hundred years")
    return days


def _common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--data-dir", type=Path, metavar="DIR", help="where the embedded Postgres lives (.keyturn)")
    sub.add_argument("--config", type=Path, metavar="FILE", help="a langgraph.json whose graphs are served")


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["inbox"]:
        from app.inbox_cli import main as inbox  # noqa: PLC0415 (needs no server)

        return inbox(argv[1:])
    if not argv or (argv[0].startswith("--") and argv[0] not in ("--help", "--version")):
        argv = ["serve", *argv]
    args = parser().parse_args(argv)
    from app.commands import run  # noqa: PLC0415 (the point of this file)

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
