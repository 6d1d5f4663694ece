"""The tour of README.md, run as a newcomer would: bash, curl and the official SDK against a real server process.

What a command prints must be what the page says. `…` in the page stands for anything within a line, a line of nothing but
`…` for any lines. Ids and times are compared by their form.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
URL = "http://127.0.0.1:8123"
MARK = "\x1e"

# Machines without curl run the same commands by this.
CURL = """#!{python}
import argparse, sys, httpx
p = argparse.ArgumentParser()
p.add_argument("url")
p.add_argument("-s", action="store_true")
p.add_argument("-N", action="store_true")
p.add_argument("-H", action="append", default=[])
p.add_argument("-d")
p.add_argument("-o")
p.add_argument("-X")
a = p.parse_args(sys.argv[1:])
data = sys.stdin.read() if a.d == "@-" else a.d
headers = {{"Accept": "*/*", **dict(h.split(": ", 1) for h in a.H)}}
out = open(a.o, "wb") if a.o else sys.stdout.buffer
with httpx.stream(a.X or ("GET" if data is None else "POST"), a.url, content=data, headers=headers, timeout=60) as r:
    for chunk in r.iter_raw():
        out.write(chunk)
        out.flush()
"""


@dataclass
class Step:
    """A command of the page, and what the page says it prints."""

    language: str
    command: str
    expected: str | None = None


def tour() -> list[Step]:
    """The fenced blocks of the section "Tour"."""
    section = README.read_text("utf-8").split("\n## Tour\n")[1].split("\n## ")[0]
    steps: list[Step] = []
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
        if language == "text":
            steps[-1].expected = text
        else:
            steps.append(Step(language, text))
    return steps


def normal(text: str) -> str:
    """Text with the form of ids and times instead of their values."""
    text = text.replace("\r\n", "\n")
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<uuid>", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "<sha256>", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "<interrupt>", text)
    text = re.sub(r"call_[0-9a-f]{12}", "call_<id>", text)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", "<time>", text).strip()


def pattern(expected: str) -> re.Pattern[str]:
    """What the page says, as a regular expression."""
    parts = []
    for line in normal(expected).split("\n"):
        if line.strip() == "…":
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(".*?".join(re.escape(piece) for piece in line.split("…")) + "\n")
    return re.compile("".join(parts))


def test_the_tour_prints_what_the_page_says(live_server: Any, tmp_path: Path) -> None:
    steps = tour()
    assert len([s for s in steps if s.expected]) >= 8
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    if shutil.which("curl") is None:
        (tools / "curl").write_text(CURL.format(python=sys.executable))
        (tools / "curl").chmod(0o755)
    script = []
    for number, step in enumerate(steps):
        script.append(f"printf '{MARK}{number}{MARK}'")
        command = step.command.replace(URL, live_server.url)
        script.append(f"{sys.executable!r} - <<'PYTHON'\n{command}PYTHON" if step.language == "python" else command)
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "no_proxy": "*"}
    done = subprocess.run(
        ["bash", "-u"],
        input="\n".join(script),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = dict(re.findall(rf"{MARK}(\d+){MARK}([^{MARK}]*)", done.stdout))
    for number, step in enumerate(steps):
        got = printed[str(number)].replace(live_server.url, URL)
        wanted = step.expected or ""
        assert pattern(wanted).fullmatch(normal(got) + "\n"), (
            f"{step.command}\nprints\n\n{got}\nthe page says\n\n{wanted}\n{done.stderr}"
        )


def test_the_stand_in_for_curl_works(live_server: Any, tmp_path: Path) -> None:
    curl = tmp_path / "curl"
    curl.write_text(CURL.format(python=sys.executable))
    curl.chmod(0o755)
    command = [str(curl), "-s", f"{live_server.url}/threads/count", "-H", "Content-Type: application/json", "-d", "@-"]
    done = subprocess.run(command, input="{}", capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip().isdecimal()
