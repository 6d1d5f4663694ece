"""What was measured beside what is promised, as a table of Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
Medians = dict[str, dict[str, Any]]


def rate(medians: Medians, row: str, against: str) -> float:
    """How many times as many per second."""
    return float(medians[row]["per_second"] / medians[against]["per_second"])


PROMISES: tuple[tuple[str, str, float, Callable[[Medians], float]], ...] = (
    (
        "`stream` c20, runs/s against bare LangGraph",
        "≥",
        1.5,
        lambda m: rate(m, "stream c20", "bare c20"),
    ),
    ("`stream` c20, CPU ms per run", "≤", 11, lambda m: m["stream c20"]["cpu_ms"]),
    (
        "kind `react` c20, runs/s against bare LangGraph",
        "≥",
        2.2,
        lambda m: rate(m, "react c20", "bare c20"),
    ),
    ("two processes against one, runs/s", "≥", 1.7, lambda m: rate(m, "two c20", "stream c20")),
    ("`hitl` c20, cycles/s", "≥", 65, lambda m: m["hitl c20"]["per_second"]),
    ("decision → first resumed event, ms p50", "≤", 15, lambda m: m["decision"]["first_event_ms"]["p50"]),
    ("decision → first resumed event, ms p99", "≤", 60, lambda m: m["decision"]["first_event_ms"]["p99"]),
    ("one run read by 100, CPU against one reader", "≤", 2, lambda m: m["fan-out"]["ratio"]),
    ("`tokens`, events/s on one stream", "≥", 8000, lambda m: m["tokens"]["events_per_second"]),
    ("`stream` c1, first event, ms p50", "≤", 6, lambda m: m["stream c1"]["first_event_ms"]["p50"]),
    ("`stream` c1, last event, ms p50", "≤", 20, lambda m: m["stream c1"]["last_event_ms"]["p50"]),
    ("turn 200 of a thread against turn 5, ms", "≤", 1.3, lambda m: m["long thread"]["late_ms"] / m["long thread"]["early_ms"]),
    ("bytes stored by 200 turns against 100", "≤", 2.2, lambda m: m["long thread"]["kb"] / m["long thread"]["kb_100"]),
    ("500 idle streams, cores", "≤", 0.03, lambda m: m["idle"]["core"]),
    ("500 idle streams, kB each", "≤", 60, lambda m: m["idle"]["kb_per_stream"]),
)


def table(medians: Medians) -> str:
    """Promises first, then the rows that they come from."""
    lines = ["| | promised | measured | |", "|---|---|---|---|"]
    for name, relation, bound, figure in PROMISES:
        value = figure(medians)
        kept = value >= bound if relation == "≥" else value <= bound
        lines.append(f"| {name} | {relation} {bound:g} | {shown(value)} | {'yes' if kept else '**no**'} |")
    lines += ["", "| | per second | first event ms p50 | last event ms p50 / p99 | CPU ms |", "|---|---|---|---|---|"]
    for row in ("stream c1", "stream c20", "react c20", "two c20", "hitl c20", "bare c1", "bare c20"):
        m = medians[row]
        last = m["last_event_ms"]
        lines.append(
            f"| {row} | {shown(m['per_second'])} | {shown(m['first_event_ms']['p50'])} "
            f"| {shown(last['p50'])} / {shown(last['p99'])} | {shown(m['cpu_ms'])} |"
        )
    long = medians["long thread"]
    lines += [
        "",
        f"A thread of 200 turns: {shown(long['early_ms'])} → {shown(long['late_ms'])} ms and "
        f"{shown(long['early_cpu_ms'])} → {shown(long['late_cpu_ms'])} ms of CPU a turn; "
        f"{shown(long['kb_100'])} kB stored after 100 turns, {shown(long['kb'])} after 200.",
    ]
    return "\n".join(lines)


def shown(value: float) -> str:
    """Three digits that say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write(page: Path, text: str) -> None:
    """Put the table between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
