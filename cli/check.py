"""`gplan check`: what serve would check before it loads anything."""

from __future__ import annotations

import click
import msgspec

from cli.failure import say, say_next
from cli.parameters import checkpoint_of, plan_argument
from cli.text import columns
from cli.tokenizers import tokenizer_problem
from cli.views import echo_json
from formats.container import read_plan
from formats.drift import Drift, field_text
from formats.plan_id import plan_id


class CheckView(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the plan, and what follows.

    Attributes:
        drifts: every difference, advisory ones included.
        refused, accepted: names of the fields that stand against serving, and of those that would.
        tokenizer_problem: why the checkpoint's tokenizer cannot be used; empty where it can.
    """

    plan_id: str
    checkpoint: str
    drifts: tuple[Drift, ...]
    refused: tuple[str, ...]
    accepted: tuple[str, ...]
    tokenizer_problem: str


@click.command(short_help="Checks that checkpoint and machine are as planned.")
@plan_argument
@click.option("--checkpoint", help="Where the checkpoint is, if not where it was when it was planned.")
@click.option("--accept-drift", multiple=True, metavar="FIELD", help="A field that may differ; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def check(plan: str, checkpoint: str | None, accept_drift: tuple[str, ...], as_json: bool) -> None:
    """Checks that checkpoint and machine are the ones planned for, as serve does first; loads no weights.

    Prints every field that differs, what was planned, what was found, and how much that matters. Exit code 3 if serve
    would refuse.

    \b
    Examples:
      gplan check model.gplan
      gplan check model.gplan --checkpoint ./model --accept-drift torch
    """
    read = read_plan(plan)
    from gplan.serving.preflight import inspect

    where = checkpoint_of(read, checkpoint)
    preflight = inspect(read, where, accept_drift)
    view = CheckView(
        plan_id=plan_id(read),
        checkpoint=where,
        drifts=preflight.drifts,
        refused=tuple(drift.field for drift in preflight.refused),
        accepted=tuple(drift.field for drift in preflight.accepted),
        tokenizer_problem=broken.message if (broken := tokenizer_problem(where)) else "",
    )
    if as_json:
        echo_json(view)
    else:
        click.echo(_page(view))
    preflight.require()
    if broken is not None:
        raise broken
    say("serve would go on")
    say_next("gplan", "serve", plan, *(("--checkpoint", checkpoint) if checkpoint else ()))


def _page(view: CheckView) -> str:
    if not view.drifts:
        return f"{view.plan_id}: checkpoint and machine are as planned"
    return "\n".join(columns(("field", "planned", "found", "grade", "verdict"), _rows(view), left=5))


def _rows(view: CheckView) -> list[tuple[str, ...]]:
    return [(*_values(drift), str(drift.grade), _verdict(drift, view)) for drift in view.drifts]


def _values(drift: Drift) -> tuple[str, str, str]:
    return drift.field, field_text(drift.field, drift.planned), field_text(drift.field, drift.found)


def _verdict(drift: Drift, view: CheckView) -> str:
    if drift.field in view.refused:
        return "refused"
    return "accepted" if drift.field in view.accepted else "goes on"
