"""A graph of one's own, as `langgraph.json` loads it by path: it writes a poem and asks before it publishes it.

The question is a plain `interrupt()` with a HumanInterrupt, so the inbox shows it with all four verbs. It is asked again
after every response, until someone accepts, edits or ignores it. Each line is streamed (mode `custom`) as it is written.
No model is needed.
"""

from __future__ import annotations

from typing import Any, Literal

from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

LINES = (
    "A word about {topic}, set down in the rain,",
    "then read by a stranger and set down again;",
    "it waits for a nod from whoever is near:",
    "no {topic} goes out that nobody wants here.",
)


class State(TypedDict, total=False):
    """What the graph keeps. `feedback` is what the reviewer wants changed."""

    topic: str
    poem: str
    feedback: str
    published: bool


def write(state: State) -> State:
    """Write the poem, or write it again with what the reviewer said."""
    lines = [line.format(topic=state.get("topic") or "nothing") for line in LINES]
    if feedback := state.get("feedback"):
        lines.append(f"({feedback})")
    stream = get_stream_writer()
    for line in lines:
        stream({"line": line})
    return {"poem": "\n".join(lines), "published": False}


def review(state: State) -> Command[Literal["write", "publish", "__end__"]]:
    """Ask a human. Nothing with an effect stands before the interrupt: this function starts anew when the answer comes."""
    answer: Any = interrupt(
        {
            "action_request": {"action": "publish", "args": {"poem": state["poem"]}},
            "config": {"allow_accept": True, "allow_edit": True, "allow_respond": True, "allow_ignore": True},
            "description": f"Publish this poem about {state.get('topic') or 'nothing'}?",
        }
    )
    if isinstance(answer, list):
        answer = answer[0]
    verb, args = answer["type"], answer.get("args")
    if verb == "accept":
        return Command(goto="publish")
    if verb == "edit":
        return Command(goto="publish", update={"poem": args["args"]["poem"]})
    if verb == "response":
        return Command(goto="write", update={"feedback": str(args)})
    return Command(goto="__end__")


def publish(state: State) -> State:
    """The effect that had to wait."""
    return {"published": True}


builder = StateGraph(State)
builder.add_node("write", write)
builder.add_node("review", review)
builder.add_node("publish", publish)
builder.add_edge(START, "write")
builder.add_edge("write", "review")
graph = builder.compile()
