"""`gplan verify`: every graph of a plan, captured here and now, against eager execution."""

from __future__ import annotations

import click
import msgspec

from cli.failure import say
from cli.parameters import checkpoint_of, plan_argument
from cli.progress import show_progress
from cli.text import columns
from cli.views import echo_json
from formats.container import read_plan
from formats.plan import Receipt, plan_id


class VerifyView(msgspec.Struct, frozen=True, kw_only=True):
    """One receipt per key; `cases` are batches of several sizes, lengths and cached prefixes."""

    plan_id: str
    receipts: tuple[Receipt, ...]


@click.command()
@plan_argument
@click.option("--checkpoint", help="Where the checkpoint is, if not where it was when it was planned.")
@click.option("--accept-drift", multiple=True, metavar="FIELD", help="A field that may differ; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def verify(plan: str, checkpoint: str | None, accept_drift: tuple[str, ...], as_json: bool) -> None:
    """Captures every graph of the plan and compares each with eager execution at the same padded shape, to the bit and
    with poisoned padding.

    Exit code 5 if one differs, with its key and the first row that does.

    \b
    Examples:
      gplan verify model.gplan
      gplan verify model.gplan --checkpoint ./model --json
    """
    read = read_plan(plan)
    from gplan.serving.startup import start_executor, verify_all

    with show_progress() as progress:
        ready = start_executor(read, checkpoint_of(read, checkpoint), progress, accept_drift)
        receipts = verify_all(ready.executor, read.model.vocab_size, progress)
    ready.executor.close()
    view = VerifyView(plan_id=plan_id(read), receipts=receipts)
    if as_json:
        echo_json(view)
    else:
        rows = [(receipt.key, str(receipt.cases), "to the bit") for receipt in receipts]
        click.echo("\n".join(columns(("key", "cases", "equals eager"), rows, left=1)))
    say(f"{len(receipts)} keys equal eager execution")
