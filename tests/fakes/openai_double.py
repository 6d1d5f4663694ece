"""A double of the chat completions API. Told to refund, it calls `refund`; after a tool it repeats what that said."""

from __future__ import annotations

import json
from typing import Any

from fakes.provider import Provider, pieces

ARGS = '{"order_id": "12345", "amount": 1500}'


class OpenAIDouble(Provider):
    """Answers at `/chat/completions`, whatever comes before it. Calls are numbered from `call_0` in every answer."""

    def error_body(self, status: int) -> dict[str, Any]:
        sent = self.requests[-1].headers.get("authorization", "")
        return {"error": {"message": f"Something about {sent}", "type": "error", "code": str(status)}}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        text, calls = self._reply(body)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}}
                for i, (n, a) in enumerate(calls)
            ]
        finish = "tool_calls" if calls else "stop"
        return {
            "id": "chatcmpl-double",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    def events(self, body: dict[str, Any]) -> list[str]:
        text, calls = self._reply(body)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in (pieces(text) if text else [])]
        for i, (name, args) in enumerate(calls):
            function = {"name": name, "arguments": ""}
            deltas.append({"tool_calls": [{"index": i, "id": f"call_{i}", "type": "function", "function": function}]})
            deltas += [{"tool_calls": [{"index": i, "function": {"arguments": piece}}]} for piece in pieces(args)]
        chunks = [self._chunk(body, delta, None) for delta in deltas]
        chunks.append(self._chunk(body, {}, "tool_calls" if calls else "stop"))
        return [*(f"data: {json.dumps(c)}\n\n" for c in chunks), "data: [DONE]\n\n"]

    def _reply(self, body: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return f"It said: {last['content']}", []
        if "refund" in str(last["content"]) and body.get("tools"):
            args = ARGS[:-3] if self.behave == "bad_json" else ARGS
            self.behave = "ok" if self.behave == "bad_json" else self.behave
            return None, [("refund", args)] * (2 if "twice" in str(last["content"]) else 1)
        return f"You said: {last['content']}", []

    @staticmethod
    def _chunk(body: dict[str, Any], delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        return {
            "id": "chatcmpl-double",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"],
            "choices": choices,
        }
