"""A double of the messages API. Told to refund, it calls `refund`; after a tool it repeats what that said."""

from __future__ import annotations

import json
from typing import Any

from fakes.provider import Provider, pieces

ARGS = {"order_id": "12345", "amount": 1500}


class AnthropicDouble(Provider):
    """Answers at `/v1/messages`."""

    def error_body(self, status: int) -> dict[str, Any]:
        sent = self.requests[-1].headers.get("x-api-key", "")
        return {"type": "error", "error": {"type": "error", "message": f"Something about {sent}"}}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        content, reason = self._reply(body)
        usage = {"input_tokens": 1, "output_tokens": 1}
        return {**self._message(body), "content": content, "stop_reason": reason, "usage": usage}

    def events(self, body: dict[str, Any]) -> list[str]:
        content, reason = self._reply(body)
        events: list[dict[str, Any]] = [{"type": "message_start", "message": self._message(body)}]
        for i, block in enumerate(content):
            empty = {**block, "text": ""} if block["type"] == "text" else {**block, "input": {}}
            events.append({"type": "content_block_start", "index": i, "content_block": empty})
            if block["type"] == "text":
                deltas = [{"type": "text_delta", "text": p} for p in pieces(block["text"])]
            else:
                deltas = [{"type": "input_json_delta", "partial_json": p} for p in pieces(json.dumps(block["input"]))]
            events += [{"type": "content_block_delta", "index": i, "delta": d} for d in deltas]
            events.append({"type": "content_block_stop", "index": i})
        events.append({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 2}})
        events.append({"type": "message_stop"})
        return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events]

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{len(self.requests)}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 0},
        }

    def _reply(self, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        content = body["messages"][-1]["content"]
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        last = blocks[-1]
        if last["type"] == "tool_result":
            said = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
            return [{"type": "text", "text": f"It said: {said}"}], "end_turn"
        if "refund" in last["text"] and body.get("tools"):
            call = {"type": "tool_use", "id": f"toolu_{len(self.requests)}", "name": "refund", "input": ARGS}
            return [{"type": "text", "text": "I will refund it."}, call], "tool_use"
        return [{"type": "text", "text": f"You said: {last['text']}"}], "end_turn"
