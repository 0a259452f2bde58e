"""What a command shows, as one struct: `--json` encodes it, the human view is written from it and from nothing else."""

from __future__ import annotations

import statistics

import click
import msgspec

from formats.plan import Plan
from formats.plan_id import plan_id

NOISY = 0.2
"""Of times that spread by more than this part, a user is told."""


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what follows from it.

    Attributes:
        kv_tokens: tokens that the KV pool holds, the dummy page left out.
        full_requests: requests of the maximum length that it holds at once; a page is one request's.
        ledger_total: planned bytes of all rows; equal to `plan.limits.memory_bytes`.
    """

    plan_id: str
    kv_tokens: int
    full_requests: int
    ledger_total: int
    plan: Plan


def view_plan(plan: Plan) -> PlanView:
    return PlanView(
        plan_id=plan_id(plan),
        kv_tokens=(plan.num_kv_pages - 1) * plan.limits.page_size,
        full_requests=full_requests(plan),
        ledger_total=sum(row.planned_bytes for row in plan.ledger),
        plan=plan,
    )


def full_requests(plan: Plan) -> int:
    return (plan.num_kv_pages - 1) // -(-plan.limits.max_len // plan.limits.page_size)


def spread_of(plan: Plan) -> float:
    """The middle of the buckets' spreads, as a part of their times."""
    buckets = (*plan.decode.ladder, *plan.prefill.ladder)
    spreads = [bucket.graph.spread_us / bucket.graph.median_us for bucket in buckets if bucket.graph is not None]
    return statistics.median(spreads) if spreads else 0.0


def echo_json(view: msgspec.Struct) -> None:
    """Writes a view to stdout as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(view), indent=2).decode())
