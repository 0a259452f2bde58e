"""`gplan diff`: in what two plans differ."""

from __future__ import annotations

from collections.abc import Sequence

import click

from cli.comparison import Comparison, Difference, Value, compare
from cli.effects import Effect
from cli.text import columns, section, short
from cli.views import echo_json
from formats.container import read_plan
from formats.drift import field_text

DIFFERENT = 1


@click.command(short_help="Compares two plans: decisions, costs, measurements, machine.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.pass_context
def diff(context: click.Context, a: str, b: str, as_json: bool) -> None:
    """Compares plans A and B: what they decide and what that costs or gains, what was measured, then the machine.

    Times count as different beyond their spread; capture times, and free memory, are not compared. Exit code 0 if
    nothing differs, 1 if something does.

    \b
    Examples:
      gplan diff old.gplan new.gplan
      gplan diff old.gplan new.gplan --json | jq .decisions
    """
    comparison = compare(read_plan(a), read_plan(b))
    if as_json:
        echo_json(comparison)
    else:
        click.echo(_page(comparison))
    context.exit(0 if comparison.same else DIFFERENT)


def _page(comparison: Comparison) -> str:
    ids = f"{comparison.a}, both" if comparison.a == comparison.b else f"{comparison.a} -> {comparison.b}"
    lines = section("plan", [ids])
    lines += section("decisions", _table(comparison.decisions) or ["the same"])
    if comparison.effects:
        lines += section("effect", [_sentence(effect) for effect in comparison.effects])
    lines += section("evidence", _table(comparison.evidence) or ["the same"])
    lines += section("machine", _table(comparison.machine) or ["the same"])
    return "\n".join(lines)


def _sentence(effect: Effect) -> str:
    change = "" if effect.change is None else f", {effect.change:+.1%}"
    note = f" ({effect.note})" if effect.note else ""
    return f"{effect.what}: {_figure(effect.a)} -> {_figure(effect.b)} {effect.unit}{change}{note}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else short(value)


def _table(differences: Sequence[Difference]) -> list[str]:
    rows = [(entry.field, _text(entry, entry.a), "->", _text(entry, entry.b), entry.note) for entry in differences]
    return columns(("field", "a", "", "b", ""), rows, left=5) if rows else []


def _text(difference: Difference, value: Value) -> str:
    if value is None or isinstance(value, float):
        return "none" if value is None else short(value)
    return field_text(difference.field, value)
