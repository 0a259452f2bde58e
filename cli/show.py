"""`gplan show`: a plan as a page, or as JSON."""

from __future__ import annotations

import click

from cli.page import plan_page
from cli.parameters import plan_argument
from cli.views import echo_json, view_plan
from formats.container import read_plan


@click.command()
@plan_argument
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.option("--why", is_flag=True, help="Add the reason of every choice, and what it rests on.")
def show(plan: str, as_json: bool, why: bool) -> None:
    """Shows a plan: decisions, measurements, memory, and why.

    \b
    Examples:
      gplan show model.gplan --why
      gplan show model.gplan --json | jq .plan.decode.ladder
    """
    view = view_plan(read_plan(plan))
    if as_json:
        echo_json(view)
    else:
        click.echo(plan_page(view, why))
