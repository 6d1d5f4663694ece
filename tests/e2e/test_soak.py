"""A short soak with random faults; `PYTHONPATH=tests:tests/e2e python -m soak.run --seconds 3600` is the long one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from soak.run import soak


async def test_nothing_is_lost_or_done_twice_whatever_fails(open_directory: Path) -> None:
    seconds = float(os.environ.get("SOAK_SECONDS", "30"))
    seed = int(os.environ.get("SOAK_SEED", random.randrange(10_000)))
    report = await soak(open_directory, seconds=seconds, seed=seed, servers=2, workers=1, at_once=6)
    if report.wrong:
        log = (open_directory / "processes.log").read_text(errors="replace").splitlines()
        pytest.fail("\n".join([report.text, *log[-200:]]))
    assert report.counts["runs"] > 0
