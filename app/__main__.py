"""`keyturn`: the inbox's client at once; every other command by `app.cli`, which takes seconds to load the whole server."""

from __future__ import annotations

import sys

from app.inbox_cli import main as inbox


def main() -> int:
    """Entry point of the console script."""
    if sys.argv[1:2] == ["inbox"]:
        return inbox(sys.argv[2:])
    from app.cli import main as command  # noqa: PLC0415 (the point of this file)

    return command()


if __name__ == "__main__":
    sys.exit(main())
