"""`keyturn inbox`: the questions that wait, answered from a terminal or a script. A client of the public API, nothing more."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from app.inbox_client import Client, Failure
from app.settings import Settings

VERBS = {"a": "accept", "e": "edit", "r": "response", "i": "ignore"}
FLAGS = {"accept": "allow_accept", "edit": "allow_edit", "response": "allow_respond", "ignore": "allow_ignore"}
EXAMPLES = """examples:
  keyturn inbox                                   answer questions one by one
  keyturn inbox list --json                       the pending questions, for a script
  keyturn inbox accept ID                         let the call run as shown
  keyturn inbox edit ID --args '{"amount": 900}'  let it run with other arguments
  keyturn inbox respond ID 'Ask for a photo.'     do not run it; tell the agent this
  keyturn inbox ignore ID                         do not run it; end the turn

ID is the item's id, or the id of LangGraph's interrupt. After an answer the rest of the run is streamed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options and sub-commands. `run` takes what they parse to."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--url", default=os.environ.get("KEYTURN_URL"), help="the server; default from KEYTURN_HOST and _PORT")
    parser.add_argument("--key", default=os.environ.get("KEYTURN_API_KEY"), help="API key; default KEYTURN_API_KEY")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="print what is pending")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    for action in ("accept", "edit", "respond", "ignore"):
        command = actions.add_parser(action, help=f"{action} one item and stream the rest of its run")
        command.add_argument("id")
        if action == "edit":
            command.add_argument("--args", required=True, dest="arguments", metavar="JSON", help="all arguments of the call")
        if action == "respond":
            command.add_argument("text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out a parsed command. Returns the exit status."""
    settings = Settings()
    try:
        with Client(args.url or f"http://{settings.host}:{settings.port}", args.key) as client:
            return _carry_out(client, args)
    except Failure as error:
        print(plain(str(error)), file=sys.stderr)
    except httpx.HTTPError as error:
        print(f"The server cannot be reached: {error}", file=sys.stderr)
    except (KeyboardInterrupt, EOFError):
        print()
        return 130
    return 1


def _carry_out(client: Client, args: argparse.Namespace) -> int:
    if args.action is None:
        return _interactive(client)
    if args.action == "list":
        return _list(client, as_json=args.json)
    item = client.item(args.id)
    verb = "response" if args.action == "respond" else args.action
    answer: Any = None
    if verb == "edit":
        answer = _edited(item, args.arguments)
    elif verb == "response":
        answer = _told(item, args.text)
    return _follow(client, item, client.answer(item, verb, answer))


def main(argv: list[str] | None = None) -> int:
    """`keyturn inbox` on its own."""
    parser = argparse.ArgumentParser(prog="keyturn inbox")
    configure(parser)
    return run(parser.parse_args(argv))


def plain(text: str) -> str:
    """Text without control characters: what agents write must not steer the reviewer's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def summary(item: dict[str, Any]) -> str:
    """One line of an item: what will run."""
    call = item.get("action_request")
    if not call:
        return plain(item["kind"] + " " + json.dumps(item.get("value"), ensure_ascii=False)).replace("\n", " ")[:200]
    args = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in (call.get("args") or {}).items())
    return plain(f"{call['action']}({args})").replace("\n", " ")


def _list(client: Client, *, as_json: bool) -> int:
    for item in client.pending():
        print(json.dumps(item) if as_json else f"{item['id']}  {summary(item)}")
    return 0


def _interactive(client: Client) -> int:
    while True:
        items = client.pending()
        if not items:
            print("Nothing waits for an answer.")
            return 0
        for number, item in enumerate(items, 1):
            print(f"{number:3}  {summary(item)}")
        choice = input("Number, or q to quit: ").strip().lower()
        if choice in ("q", ""):
            return 0
        if not choice.isdecimal() or not 0 < int(choice) <= len(items):
            print("There is no such number.")
            continue
        try:
            _ask(client, items[int(choice) - 1])
        except Failure as error:
            print(plain(str(error)))


def _ask(client: Client, item: dict[str, Any]) -> None:
    print(plain(f"\n{item.get('description') or item['kind']}"))
    shown = (item.get("action_request") or {}).get("args", item.get("value"))
    print(plain(json.dumps(shown, indent=2, ensure_ascii=False)))
    allowed = {k: verb for k, verb in VERBS.items() if item["config"].get(FLAGS[verb])}
    choice = input(" ".join(f"[{k}]{verb[1:]}" for k, verb in allowed.items()) + ", or enter for none: ").strip().lower()[:1]
    if choice not in allowed:
        return
    verb = allowed[choice]
    answer: Any = None
    if verb == "edit":
        answer = _edited(item, _editor(json.dumps(shown, indent=2, ensure_ascii=False)))
    elif verb == "response":
        answer = _told(item, input("Tell the agent: "))
    _follow(client, item, client.answer(item, verb, answer))
    print()


def _editor(text: str) -> str:
    """Let the user change the text, in an editor if one is set."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor or not sys.stdin.isatty():
        return input("Arguments as JSON: ")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arguments.json"
        file.write_text(text + "\n", "utf-8")
        subprocess.run([*shlex.split(editor), str(file)], check=False)
        return file.read_text("utf-8")


def _told(item: dict[str, Any], text: str) -> Any:
    """A question of no known shape is answered with any JSON; all others with the text."""
    try:
        return json.loads(text) if item["kind"] == "raw" else text
    except ValueError:
        return text


def _edited(item: dict[str, Any], text: str) -> dict[str, Any]:
    call = item.get("action_request")
    if not call:
        raise Failure("This question has no arguments to edit. Respond to it.")
    try:
        return {"action": call["action"], "args": json.loads(text)}
    except ValueError as error:
        raise Failure(f"The arguments are not valid JSON: {error}") from None


def _follow(client: Client, item: dict[str, Any], run_id: str) -> int:
    """Print the rest of the run as it comes. Returns the exit status."""
    transcript = Transcript()
    failed = asks = False
    for event, data in client.events(item["thread_id"], run_id):
        asks = asks or (isinstance(data, dict) and "__interrupt__" in data)
        if event == "messages":
            transcript.add(data[0])
        elif event == "values" and isinstance(data.get("messages"), list):
            transcript.values(data["messages"])
        elif event == "error":
            failed = True
            transcript.note(f"The run failed: {data['message']}")
    if asks:
        transcript.note("The agent asks again.")
    print()
    return 1 if failed else 0


class Transcript:
    """Prints messages as they grow. Runs that stream only `values` show what each state adds."""

    def __init__(self) -> None:
        self._before: set[str] | None = None  # messages that were there before the answer
        self._shown: set[str] = set()
        self._speaker: str | None = None

    def add(self, message: dict[str, Any]) -> None:
        """Print a message, or the next piece of one."""
        content = message.get("content")
        if not isinstance(content, str):
            content = "".join(block.get("text", "") for block in content or [] if isinstance(block, dict))
        if not content or message["type"] == "human":
            return
        if self._speaker != message["id"]:
            self.note(f"{message['name']} returned: " if message["type"] == "tool" else "agent: ")
            self._speaker = message["id"]
        self._shown.add(message["id"])
        print(plain(content), end="", flush=True)

    def values(self, messages: list[dict[str, Any]]) -> None:
        """Print the messages of a state that were not there before."""
        if self._before is None:
            self._before = {m["id"] for m in messages}
        for message in messages:
            if message["id"] not in self._before | self._shown:
                self.add(message)

    def note(self, text: str) -> None:
        """Start a new line with the text."""
        print(plain(text if self._speaker is None else f"\n{text}"), end="", flush=True)
        self._speaker = ""


if __name__ == "__main__":
    sys.exit(main())
