"""The inbox page: who gets it, and that nothing but its own script can run on it."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from starlette.requests import Request

from app.dashboard.router import PAGE, page, wants_page

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


def request(accept: str | None) -> Request:
    headers = [] if accept is None else [(b"accept", accept.encode())]
    return Request({"type": "http", "method": "GET", "path": "/inbox", "headers": headers})


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (CHROME, True),
        ("text/html", True),
        ("application/json, text/html;q=0.5", False),
        ("text/html, application/json", False),
        ("text/html;q=0", False),
        ("text/html;q=oops", False),
        ("text/event-stream", False),
        ("*/*", False),
        ("", False),
        (None, False),
    ],
)
def test_only_who_prefers_html_gets_the_page(accept: str | None, html: bool) -> None:
    assert wants_page(request(accept)) is html


def test_the_policy_names_the_script_and_the_style_by_hash() -> None:
    response = page()
    text = bytes(response.body).decode()
    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["vary"] == "Accept"


def test_data_never_becomes_markup() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.splitlines()) <= 200
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|\bstyle=|\son\w+=\"", text)
    assert not re.search(r"(src|href)=\"(?!data:,)", text)
