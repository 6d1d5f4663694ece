"""`keyturn inbox` against a real server: a script's commands, and a person's answers at the prompt."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.inbox_cli import main, plain, summary

ROOT = Path(__file__).parents[1]


@pytest.fixture
def item(live_server: Any) -> dict[str, Any]:
    """A refund that waits."""
    with httpx.Client(base_url=live_server.url, timeout=30) as client:
        thread = client.post("/threads", json={}).json()["thread_id"]
        message = {"role": "user", "content": "Please refund 1500 for order 12345."}
        body = {"assistant_id": "demo", "input": {"messages": [message]}, "stream_mode": ["values", "messages-tuple"]}
        client.post(f"/threads/{thread}/runs/wait", json=body).raise_for_status()
        found: dict[str, Any] = client.get("/inbox", params={"thread_id": thread}).json()["items"][0]
    return found


@dataclass
class Done:
    """What a command printed and returned."""

    returncode: int
    stdout: str
    stderr: str


def keyturn_inbox(url: str, *args: str, typed: str = "") -> Done:
    """The command, without the second that a new interpreter takes."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code = main(["--url", url, *args])
    return Done(code, out.getvalue(), err.getvalue())


def test_the_command_of_keyturn(live_server: Any) -> None:
    command = [sys.executable, "-m", "app", "inbox", "--url", live_server.url, "list"]
    subprocess.run(command, capture_output=True, timeout=60, cwd=ROOT, check=True)


def test_list_and_accept(live_server: Any, item: dict[str, Any]) -> None:
    listed = keyturn_inbox(live_server.url, "list")
    assert f"{item['id']}  audit(" in listed.stdout
    as_json = keyturn_inbox(live_server.url, "list", "--json")
    assert item["id"] in [json.loads(line)["id"] for line in as_json.stdout.splitlines()]

    accepted = keyturn_inbox(live_server.url, "accept", item["id"])
    assert accepted.returncode == 0, accepted.stderr
    tool, agent = accepted.stdout.strip().splitlines()
    assert tool.startswith("audit returned: ")
    assert agent.startswith("agent: The audit is back: ")

    late = keyturn_inbox(live_server.url, "ignore", item["id"])
    assert late.returncode == 1
    assert "Decided: accept by local" in late.stderr


def test_edit_by_the_interrupt_s_id(live_server: Any, item: dict[str, Any]) -> None:
    wrong = keyturn_inbox(live_server.url, "edit", item["interrupt_id"], "--args", '{"amount": "many"}')
    assert wrong.returncode == 1
    assert "amount" in wrong.stderr
    broken = keyturn_inbox(live_server.url, "edit", item["id"], "--args", "{")
    assert "not valid JSON" in broken.stderr
    right = keyturn_inbox(live_server.url, "edit", item["interrupt_id"], "--args", '{"order_id": "12345", "amount": 1200}')
    assert right.returncode == 0, right.stderr
    assert "1200" in right.stdout


def test_respond(live_server: Any, item: dict[str, Any]) -> None:
    done = keyturn_inbox(live_server.url, "respond", item["id"], "Ask for a photo first.")
    assert "Ask for a photo first." in done.stdout


def test_the_prompt(live_server: Any, item: dict[str, Any]) -> None:
    pending = [json.loads(line)["id"] for line in keyturn_inbox(live_server.url, "list", "--json").stdout.splitlines()]
    number = pending.index(item["id"]) + 1
    done = keyturn_inbox(live_server.url, typed=f"0\n{number}\ni\nq\n")
    assert "There is no such number." in done.stdout
    assert "[a]ccept [e]dit [r]esponse [i]gnore" in done.stdout
    assert item["id"] not in keyturn_inbox(live_server.url, "list").stdout


def test_an_unknown_item_and_no_server(live_server: Any) -> None:
    unknown = keyturn_inbox(live_server.url, "accept", "00000000-0000-4000-8000-000000000000")
    assert unknown.returncode == 1
    assert "There is no inbox item" in unknown.stderr
    nobody = keyturn_inbox("http://127.0.0.1:9", "list")
    assert nobody.returncode == 1
    assert "cannot be reached" in nobody.stderr


def test_what_agents_write_does_not_steer_the_terminal() -> None:
    assert plain("a\x1b[2Jb\r\x9bc\n") == "a\ufffd[2Jb\ufffd\ufffdc\n"
    call = {"action": "run\x1b]0;x\x07", "args": {"a": "1\n2"}}
    assert "\x1b" not in summary({"kind": "tool", "action_request": call})
    assert "\n" not in summary({"kind": "question", "value": "a\nb"})
