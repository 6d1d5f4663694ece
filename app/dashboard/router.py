"""Serves the inbox page: one file, no build, no requests to other hosts. Data never reaches it as markup.

The page's script and style are named by hash in the content security policy, so that nothing else can run there.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

PAGE = Path(__file__).parent / "inbox.html"


def wants_page(request: Request) -> bool:
    """Whether the client prefers HTML to JSON, as a browser's address bar does. `*/*` alone asks for JSON."""
    qualities = dict(_quality(part) for part in request.headers.get("accept", "").split(","))
    html = max(qualities.get("text/html", 0.0), qualities.get("application/xhtml+xml", 0.0))
    return html > max(qualities.get("application/json", 0.0), qualities.get("text/event-stream", 0.0))


def page() -> Response:
    """The inbox page."""
    html, policy = _load()
    return HTMLResponse(
        html,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "Vary": "Accept",
        },
    )


def _quality(part: str) -> tuple[str, float]:
    media, *parameters = (piece.strip() for piece in part.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return media.lower(), float(value)
            except ValueError:
                return media.lower(), 0.0
    return media.lower(), 1.0


@cache
def _load() -> tuple[bytes, str]:
    text = PAGE.read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _hash(text: str, tag: str) -> str:
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
