"""Programs that some tests start and that no Python package brings."""

from __future__ import annotations

import os
import shutil

import pytest

PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/usr/local/bin:/opt/homebrew/bin"


def program(name: str, *, package: str) -> str:
    """Where a program is. Without it the test is skipped, and says so; CI, which sets REQUIRE_ALL_TESTS, skips nothing."""
    found = shutil.which(name, path=PATHS)
    if found is None:
        why = f"{name} is not installed (Debian: apt-get install {package})"
        if os.environ.get("REQUIRE_ALL_TESTS"):
            pytest.fail(why)
        pytest.skip(why)
    return found
