"""Templates and conditions: what they can do, and that they cannot run away."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from app.graphs.templates import Condition, TemplateProblem, Text

VARIABLES: dict[str, Any] = {
    "context": {"name": "bob", "items": [1, 2]},
    "memories": [{"text": "Likes tea."}, {"text": "Has a dog."}],
    "now": datetime(2026, 12, 1, 12, 30, tzinfo=UTC),
}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Hi {{ context.name | title }}.", "Hi Bob."),
        ("{% for m in memories %}{{ loop.index }}. {{ m.text }} {% endfor %}", "1. Likes tea. 2. Has a dog. "),
        ("{{ now.strftime('%Y-%m-%d') }} {{ now.hour }}", "2026-12-01 12"),
        ("{{ context.items | sum }} {{ context['name'] }}", "3 bob"),
        ("{{ context.tone | default('kind') }}{% if context.x is defined %}!{% endif %}", "kind"),
        ("{{ context.get('x', 'y') }} {{ 'a' ~ 1 ~ context.name }}", "y a1bob"),
        ("{% set x = 2 %}{{ x ** 3 + x * 4 % 3 }} {{ 2.5 | round | int }}", "10 2"),
        ("{{ memories | map(attribute='text') | join(' ') | replace('tea', 'mate') }}", "Likes mate. Has a dog."),
        ("{{ [{'a': 1}] | tojson }} {{ range(3) | list }}", '[{"a": 1}] [0, 1, 2]'),
    ],
)
def test_what_a_template_can_do(source: str, text: str) -> None:
    assert Text(source).render(VARIABLES) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ context.__class__.__mro__ }}",
        "{{ now.__reduce__() }}",
        "{{ range.__globals__ }}",
        "{{ context.pop('name') }}",
        "{{ memories.append(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ lipsum }}",
        "{{ self }}",
        "{{ _budget }}",
        "{{ nothing }}",
        "{{ context.nothing }}",
        "{{ 1 / 0 }}",
        "{{ context + 1 }}",
    ],
)
def test_what_a_template_cannot_reach(source: str) -> None:
    with pytest.raises(TemplateProblem):
        Text(source).render(VARIABLES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' %}" * 4 + "{% endfor %}" * 4,
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ ('a' * 90000) | replace('a', 'b' * 90000) }}",
        "{{ (['a'] * 9000) | join('a' * 9000) }}",
        "{% set a = 'a' * 90000 %}{{ a ~ a }}",
        "{% set a = ['a'] * 1000 %}" + "{% set a = [a, a, a, a, a, a, a, a, a, a] %}" * 12 + "{{ a }}",
        "{% for i in range(9000) %}{% if 'a' * 90000 == 'b' %}{% endif %}{% endfor %}",
        "{% for i in range(5000) %}" + "x" * 100 + "{% endfor %}",
        "x" * 60_000,
        "{{ (" * 5000,
        "{{ " + "not " * 5000 + "x }}",
        "{{ x" + ".a" * 200 + " }}",
        "{% if x %}" * 99 + "{% endif %}" * 99,
    ],
    ids=lambda s: s[:40],
)
def test_a_template_cannot_run_away(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(TemplateProblem):
        Text(source).render(VARIABLES)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "source", ["{{", "{% if %}", "{{ x | nofilter }}", "{% include 'x' %}", "{% set x %}a{% endset %}", "{{ x }}"]
)
def test_mistakes_show_when_it_is_made(source: str) -> None:
    with pytest.raises(TemplateProblem):
        Text(source, names=["context"])


@pytest.mark.parametrize(
    ("source", "variables", "holds"),
    [
        ("amount >= 1000", {"amount": 5}, False),
        ("amount >= 1000", {"amount": 1000}, True),
        ("amount >= 1000 and not order_id.startswith('V')", {"amount": 5000, "order_id": "V1"}, False),
        ("args.items | length > 1", {"args": {"items": [1, 2]}}, True),
        ("to in ['bob', 'eve']", {"to": "eve"}, True),
        ("false", {}, False),
        ("amount >= 1000", {"amount": "many"}, True),
        ("amount >= 1000", {}, True),
        ("nothing", {}, True),
        ("range(100000) | map('string') | join | length < 0", {}, True),
    ],
)
def test_conditions(source: str, variables: dict[str, Any], holds: bool) -> None:
    assert Condition(source)(variables) is holds


@pytest.mark.parametrize("source", ["a ==", "{{ a }}", "a }}{{ b", "a) %}x{% endif %}{% if (b", "", "a b"])
def test_what_is_no_condition(source: str) -> None:
    with pytest.raises(TemplateProblem):
        Condition(source)
