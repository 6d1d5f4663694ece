"""The effects that a test counts. Imported by name, so that the tools and the tests see the same list."""

from __future__ import annotations

TRANSFERS: list[tuple[str, int]] = []
STARTED: list[str] = []
