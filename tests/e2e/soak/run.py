"""A randomised soak: load and faults for a while, then everything is checked.

    PYTHONPATH=tests:tests/e2e python -m soak.run --seconds 3600 [--seed N] [--servers 2] [--workers 3]

Prints progress every ten seconds and a table in the end. Exit code 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg

from app.db.embedded import EmbeddedPostgres
from app.db.migrate import migrate
from soak.checks import WATCH, broken, quiet
from soak.fleet import Fleet
from soak.load import Load


@dataclass
class Report:
    """What happened, and what was wrong with it."""

    seed: int
    conversations: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """For people."""
        lines = [f"seed {self.seed}, {self.conversations} conversations, {sum(self.faults.values())} faults {self.faults}"]
        lines += [f"{name}: {value}" for name, value in {**self.counts, "answers": self.answers}.items()]
        return "\n".join([*lines, *(f"WRONG {what}" for what in self.wrong)])


async def soak(
    home: Path, *, seconds: float, seed: int, servers: int = 2, workers: int = 3, at_once: int = 8, progress: bool = False
) -> Report:
    """Run it in a directory that an embedded Postgres may use."""
    report = Report(seed)
    loop = asyncio.get_running_loop()
    with EmbeddedPostgres(home / "pg", {"max_connections": 400}) as postgres:
        url = postgres.url()
        await migrate(url)
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute(WATCH)
        fleet = Fleet(postgres, home / "processes.log", servers=servers, workers=workers, seed=seed)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with fleet.running(), httpx.AsyncClient(limits=limits, timeout=30) as client:
            load = Load([member.url for member in fleet.servers], client, seed + 1)
            await load.prepare()
            until = loop.time() + seconds

            async def report_progress() -> None:
                while True:
                    await asyncio.sleep(10)
                    left = max(0, until - loop.time())
                    print(
                        f"{left:6.0f} s left  {len(load.told)} conversations  {sum(load.answers.values())} answers  "
                        f"{sum(fleet.faults.values())} faults",
                        flush=True,
                    )

            telling = asyncio.create_task(report_progress()) if progress else None
            await asyncio.gather(fleet.suffer(until), load.go_on(until, at_once=at_once))
            report.wrong = [*load.wrong, *await quiet(url)]
            async with httpx.AsyncClient(base_url=fleet.servers[0].url, timeout=30) as api:
                report.wrong += await broken(url, api, load.told)
            if telling is not None:
                telling.cancel()
        async with await psycopg.AsyncConnection.connect(url) as connection:
            for name, query in COUNTS.items():
                row = await (await connection.execute(query)).fetchone()
                report.counts[name] = row[0] if row else 0
        report.conversations, report.faults, report.answers = len(load.told), dict(fleet.faults), dict(load.answers)
    return report


COUNTS = {
    "runs": "SELECT count(*) FROM runs",
    "takeovers": "SELECT coalesce(sum(attempts - 1), 0) FROM runs WHERE attempts > 1",
    "decisions": "SELECT count(*) FROM inbox_decisions WHERE event = 'decided'",
    "revoked": "SELECT count(*) FROM inbox_decisions WHERE event = 'revoked'",
    "permits spent": "SELECT count(*) FROM effect_permits WHERE spent_at IS NOT NULL",
    "effects": "SELECT count(*) FROM soak_effects",
}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="an empty directory for Postgres and the processes' log, which is kept")
    args = parser.parse_args()
    options = {"seconds": args.seconds, "seed": args.seed, "servers": args.servers, "workers": args.workers}
    began = time.monotonic()
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
        args.keep.chmod(0o711)
        report = asyncio.run(soak(args.keep, **options, at_once=args.at_once, progress=True))
    else:
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o711)
            report = asyncio.run(soak(Path(name), **options, at_once=args.at_once, progress=True))
    print(report.text)
    print(f"{time.monotonic() - began:.0f} s")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
