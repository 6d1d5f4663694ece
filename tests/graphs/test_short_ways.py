"""Where nobody traces, models and tools are called a shorter way. Nobody may see a difference but in time."""

from __future__ import annotations

import re
from typing import Any

import pytest
from graphs.harness import Agent, Agents, script
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool, tool
from langgraph.config import get_stream_writer
from langgraph.prebuilt import ToolRuntime

from app.graphs.listeners import listeners
from app.graphs.modelrun import DirectModel
from app.graphs.toolrun import PlainTool
from app.graphs.tools import ToolSpec

IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|call_[0-9a-f]{12}_\d")


class Tracer(AsyncCallbackHandler):
    """Somebody who listens, and so has everything go the long way."""


def plain(value: Any) -> Any:
    """A chunk of a stream as text, with ids replaced."""
    if isinstance(value, BaseMessage):
        return type(value).__name__, IDS.sub("ID", str(value.model_dump()))
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("langgraph_checkpoint_ns", "checkpoint_ns")}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return IDS.sub("ID", str(value))


async def stream(agent: Agent, *modes: str, traced: bool) -> list[Any]:
    config = {**agent.config(), "tags": ["mine"], "metadata": {"run_attempt": 1}}
    if traced:
        config["callbacks"] = [Tracer()]
    given = {"messages": [{"type": "human", "content": "go", "id": "m"}]}
    return [plain(c) async for c in agent.graph.astream(given, config, stream_mode=list(modes))]  # type: ignore[arg-type]


@pytest.mark.parametrize("modes", [("messages", "updates", "custom"), ("values", "updates")])
@pytest.mark.parametrize("is_async", [True, False])
async def test_both_ways_stream_the_same(agents: Agents, modes: tuple[str, ...], is_async: bool) -> None:
    graphs = agents.graphs()

    def act(amount: int, note: str = "none") -> str:
        """Tells what it does."""
        get_stream_writer()({"amount": amount})
        return f"did {amount} {note}"

    async def act_async(amount: int, note: str = "none") -> str:
        """Tells what it does."""
        return act(amount, note)

    graphs.tools.add("act", act_async if is_async else act)
    model = script(("act", {"amount": 3}), end="All is done now.")
    short, long = [
        await stream(agents.agent(graphs=graphs, model=model, tools=["act"], prompt="Be kind."), *modes, traced=traced)
        for traced in (False, True)
    ]
    for a, b in zip(short, long, strict=True):
        assert a == b
    if "messages" in modes:
        metadata = short[0][1][1]
        assert metadata["ls_provider"] == "scripted"
        assert metadata["tags"] == ["mine"]


class Failing(BaseChatModel):
    """A model without streaming, which may fail."""

    fails: bool = False

    @property
    def _llm_type(self) -> str:
        return "failing"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        if self.fails:
            raise ValueError("no answer")
        return ChatResult(generations=[ChatGeneration(message=AIMessage("whole"))], llm_output={"model_name": "x"})


async def test_a_model_that_cannot_stream_comes_as_one_message(agents: Agents) -> None:
    direct = DirectModel.of(Failing())
    assert direct is not None
    answer = await direct.call([], {}, [])
    assert answer.text == "whole"
    assert answer.response_metadata == {"model_name": "x"}
    assert str(answer.id).startswith("lc_run--")
    failing = DirectModel.of(Failing(fails=True))
    assert failing is not None
    with pytest.raises(ValueError, match="no answer"):
        await failing.call([], {}, [])


def test_models_with_calls_of_their_own_go_the_long_way() -> None:
    class Own(Failing):
        async def ainvoke(self, *args: Any, **kwargs: Any) -> AIMessage:
            return AIMessage("mine")

    assert DirectModel.of(Own()) is None
    assert DirectModel.of(Failing(callbacks=[Tracer()])) is None
    assert DirectModel.of(Failing().with_config(tags=["a"])) is None
    assert DirectModel.of(Failing().bind(stop=["x"])) is None
    assert DirectModel.of(Failing().bind(tools=[])) is not None
    assert listeners(RunnableConfig(callbacks=[Tracer()])) is None


async def with_runtime(x: int, runtime: ToolRuntime[Any, Any]) -> str:
    """Needs what LangGraph injects."""
    return runtime.tool_call_id or ""


async def with_config(x: int, config: RunnableConfig) -> str:
    """Needs what LangGraph injects."""
    return str(config)


async def of_any_type(x: int):  # type: ignore[no-untyped-def]
    """Does not say what it returns."""
    return AIMessageChunk("")


async def of_dict(x: int) -> dict[str, int]:
    """Returns something else."""
    return {"x": x}


async def of_text(x: int, y: list[str] | None = None) -> str:
    """Returns text."""
    return str(x)


@pytest.mark.parametrize("function", [with_runtime, with_config, of_any_type, of_dict])
def test_tools_that_need_more_go_the_long_way(function: Any) -> None:
    assert PlainTool.of(ToolSpec.of(tool(function))) is None


def test_which_tools_are_plain() -> None:
    assert PlainTool.of(ToolSpec.of(tool(of_text))) is not None
    assert PlainTool.of(ToolSpec.of(tool(response_format="content_and_artifact")(of_text))) is None
    raw = StructuredTool(name="raw", description="d", args_schema={"type": "object", "properties": {}}, func=lambda: "x")
    assert PlainTool.of(ToolSpec.of(raw)) is None
