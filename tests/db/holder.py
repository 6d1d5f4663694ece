"""A process that holds an embedded Postgres: `holder.py HOME [UID]`. Says `ready`, and leaves when its stdin ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psycopg
import structlog

from app.db.embedded import EmbeddedPostgres, EmbeddedPostgresError

SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "16MB", "max_connections": 30}


def main() -> None:
    """Acquire, say so, wait, release."""
    if len(sys.argv) > 2:  # an ordinary user from here on, who may not even read this file
        uid = int(sys.argv[2])
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    server = EmbeddedPostgres(Path(sys.argv[1]), SETTINGS)
    try:
        server.acquire()
    except EmbeddedPostgresError as error:
        sys.exit(f"{error}")
    with psycopg.connect(server.url()) as connection:
        row = connection.execute("SELECT current_database()").fetchone()
    sys.stdout.write(f"ready {row and row[0]} {server.postmaster_pid}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.release()


if __name__ == "__main__":
    main()
