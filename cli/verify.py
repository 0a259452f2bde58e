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
from formats.plan import Receipt
from formats.plan_id import plan_id
from gplan.errors import CaptureError, VerificationError


class VerifyView(msgspec.Struct, frozen=True, kw_only=True):
    """Of each key a receipt, or what is wrong with it; `cases` are batches of several sizes, lengths and cached
    prefixes."""

    plan_id: str
    receipts: tuple[Receipt, ...]
    failures: tuple[tuple[str, str], ...]


@click.command(short_help="Compares every graph of a plan with eager execution.")
@plan_argument
@click.option("--checkpoint", help="Where the checkpoint is, if not where it was when it was planned.")
@click.option("--accept-drift", multiple=True, metavar="FIELD", help="A field that may differ; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def verify(plan: str, checkpoint: str | None, accept_drift: tuple[str, ...], as_json: bool) -> None:
    """Captures every graph of the plan and compares each with eager execution at the same padded shape, to the bit and
    with poisoned padding; checks inputs against the batch, and addresses.

    Exit code 5 if a key fails, with the key, the slot where one is wrong, and the first row that differs.

    \b
    Examples:
      gplan verify model.gplan
      gplan verify model.gplan --checkpoint ./model --json
    """
    read = read_plan(plan)
    from gplan.serving.startup import start_executor, verify_all

    with show_progress() as progress:
        try:
            ready = start_executor(read, checkpoint_of(read, checkpoint), progress, accept_drift)
        except CaptureError as error:
            raise VerificationError(error.message, error.hint) from error
        verification = verify_all(ready.executor, read.model.vocab_size, progress)
    ready.executor.close()
    failures = tuple((str(key), sentence) for key, sentence in verification.failures)
    view = VerifyView(plan_id=plan_id(read), receipts=verification.receipts, failures=failures)
    if as_json:
        echo_json(view)
    else:
        click.echo("\n".join(columns(("key", "cases", "equals eager"), _rows(view), left=1)))
    verification.require()
    say(f"{len(view.receipts)} keys equal eager execution")


def _rows(view: VerifyView) -> list[tuple[str, str, str]]:
    passed = [(receipt.key, str(receipt.cases), _equality(receipt)) for receipt in view.receipts]
    return passed + [(key, "", "no") for key, _ in view.failures]


def _equality(receipt: Receipt) -> str:
    """Of compiled code, how far its rounding takes it from the operators that it was made of."""
    return "to the bit" if receipt.bitwise else f"to the bit; uncompiled within {receipt.max_abs_diff:.2g}"
