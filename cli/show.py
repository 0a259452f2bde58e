"""`gplan show`: a plan as a page, or as JSON."""

from __future__ import annotations

import click

from cli.failure import say
from cli.page import plan_page
from cli.parameters import plan_argument
from cli.plotting import plot_option, write_plot
from cli.views import echo_json, view_plan
from formats.container import read_plan
from gplan.scheduling.times import times_of_plan


@click.command()
@plan_argument
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@plot_option
@click.option("--why", is_flag=True, help="Add the reason of every choice, and what it rests on.")
def show(plan: str, as_json: bool, why: bool, plot: str | None) -> None:
    """Shows a plan: decisions, measurements, memory, and why.

    \b
    Examples:
      gplan show model.gplan --why
      gplan show model.gplan --json | jq .plan.decode.ladder
      gplan show model.gplan --plot times.html
    """
    view = view_plan(read_plan(plan))
    if plot is not None:
        workload = view.plan.workload
        times = times_of_plan(view.plan)
        write_plot(plot, view.plan, times, workload.decode_steps, workload.prefill_steps, workload.spec)
        say(f"drawn into {plot}")
    if as_json:
        echo_json(view)
    else:
        click.echo(plan_page(view, why))
