"""How often one run may call the model and tools. Counted in private state, so that a takeover goes on counting.

A run that asks a human ends there: the run that brings the answer counts anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig

from app.graphs.calls import Job, message_for
from app.graphs.config import Limits
from app.graphs.models import ModelError

CALLS = "__calls"
"""Private state: `{run, model, tools}`, the calls of the newest run."""


@dataclass(slots=True)
class Calls:
    """The calls of a run so far."""

    run: str
    model: int = 0
    tools: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any], config: RunnableConfig) -> Calls:
        """Counted in the state, if that is this run's. Anything may stand there: a client may have written it."""
        run = str(config.get("configurable", {}).get("run_id") or "")
        match state.get(CALLS):
            case {"run": str(counted), "model": int(model), "tools": int(tools)} if counted == run:
                return cls(run, model, tools)
        return cls(run)

    def plain(self) -> dict[str, Any]:
        """For the state."""
        return {"run": self.run, "model": self.model, "tools": self.tools}


class CallLimits:
    """The limits of one agent."""

    def __init__(self, limits: Limits) -> None:
        self._model = limits.model_calls
        self._tools = limits.tool_calls

    def __bool__(self) -> bool:
        return self._model is not None or self._tools is not None

    def count_model(self, calls: Calls) -> None:
        """Before the model is called. One call too many ends the run: ModelError `model_call_limit`."""
        if self._model is not None and calls.model >= self._model:
            raise ModelError(
                "model_call_limit",
                f"The run has called the model as often as it may ({self._model} times). "
                "Raise limits.model_calls of the assistant, or simplify the task.",
            )
        calls.model += 1

    def count_tools(self, calls: Calls, jobs: list[Job]) -> list[ToolMessage]:
        """Results of those calls of a message that are too many: they are not run, and the model goes on without them."""
        left = len(jobs) if self._tools is None else max(0, self._tools - calls.tools)
        calls.tools += min(left, len(jobs))
        return [message_for(job, self._refusal(job), status="error") for job in jobs[left:]]

    def _refusal(self, job: Job) -> str:
        return (
            f"Error: {job.call['name']} was not run: this run has made all the tool calls that it may make ({self._tools}). "
            "Call no more tools."
        )
