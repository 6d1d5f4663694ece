"""Clocks a newcomer's first minutes: fresh clone → `./run` → the URL answers → the first question is answered.

    python3 tests/bench/first_minutes.py [FOLDER]

Standard library only, since it stands for a machine that has nothing installed. The folder must not exist; by default a
temporary one is used and removed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PORT = 8399
URL = f"http://127.0.0.1:{PORT}"
TIMEOUT = 600.0


def call(method: str, path: str, body: Any = None) -> Any:
    """One request; the JSON of its answer, or None while the server is not there yet."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except urllib.error.HTTPError:
        raise
    except OSError:
        return None


def wait_for(what: str, server: subprocess.Popen[bytes], path: str, good: Any) -> Any:
    """Ask until the answer is good."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"The server ended with {server.returncode} before {what}.")
        answer = call("GET", path)
        if answer is not None and good(answer):
            return answer
        time.sleep(0.1)
    sys.exit(f"Gave up waiting for {what}.")


def main(folder: Path) -> None:
    """Run the newcomer's steps and print when each was done."""
    start = time.monotonic()

    def lap(step: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {step}", flush=True)

    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    lap("cloned")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KEYTURN_", "VIRTUAL_ENV", "PYTHON"))}
    environment.pop("DATABASE_URL", None)
    # Started by root, Postgres runs as another account, which must get to its data.
    data = Path(tempfile.mkdtemp(prefix="keyturn-"))
    data.chmod(0o711)
    command = ["./run", "serve", "--port", str(PORT), "--data-dir", str(data / "data")]
    server = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        wait_for("/ok", server, "/ok", lambda answer: answer.get("ok"))
        lap(f"{URL} answers")
        [item] = wait_for("the first question", server, "/inbox", lambda answer: answer["items"])["items"]
        lap("the first question is in the inbox")
        call("POST", f"/inbox/{item['id']}/response", {"type": "accept", "args": None})
        wait_for("the answer's effect", server, f"/inbox/{item['id']}", lambda answer: answer["status"] == "settled")
        lap("answered, and the agent has gone on")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
        shutil.rmtree(data)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary) / "key turn")
