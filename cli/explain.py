"""`gplan explain`: what happens to a batch of one size, and why."""

from __future__ import annotations

import click
import msgspec

from cli.parameters import plan_argument
from cli.text import count
from cli.views import echo_json
from formats.container import read_plan
from formats.plan import DRAW_VARIANTS, Bucket, PhasePlan, Plan, bucket_key, is_base
from formats.plan_id import plan_id
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.graphs.admission import Admission, PhaseSetup
from gplan.scheduling.times import interpolate, rows_us

REASONS = {
    "eager_backend": "the plan captures nothing in this phase",
    "above_ladder": "it is above the largest bucket",
    "eager_cheaper": "eager execution is cheaper than padding to the bucket above, as measured",
    "padding_cap": "the bucket above is further away than the padding cap allows",
}


TAKES = {
    "greedy": "whose requests are all greedy",
    "sampled": "whose requests are drawn without penalties, biases or log probabilities",
    "full": "of at most {slots} requests",
}


class VariantView(msgspec.Struct, frozen=True, kw_only=True):
    """A graph of the same bucket for some of its batches. `step_us` is None where the plan holds no time of it."""

    key: str
    takes: str
    step_us: float | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch of one size gets.

    Attributes:
        key: the bucket that is replayed; empty where the batch runs eagerly.
        reason: why it runs eagerly; empty where it is replayed.
        step_us: expected time of the step, each request with as much behind it as when it was timed; None where the
            plan holds no times.
        padding_us: of it, beyond a replay at the exact size, were that a bucket.
        alternative: the other way to run it, and its expected time.
        variants: graphs that replace the key's for some batches.
    """

    plan_id: str
    phase: str
    size: int
    key: str
    reason: str
    padding_rows: int
    step_us: float | None
    padding_us: float
    alternative: str
    alternative_us: float | None
    variants: tuple[VariantView, ...] = ()


@click.command(short_help="Says which graph a batch of one size is replayed from.")
@plan_argument
@click.option("--phase", type=click.Choice(["decode", "prefill"]), required=True)
@click.option("--size", type=click.IntRange(1), required=True, help="Requests in decode, tokens in prefill.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def explain(plan: str, phase: str, size: int, as_json: bool) -> None:
    """Says which graph a batch of SIZE is replayed from, what its padding costs and what else could be done; or why it
    runs eagerly.

    \b
    Examples:
      gplan explain model.gplan --phase decode --size 37
      gplan explain model.gplan --phase prefill --size 300 --json
    """
    view = explanation(read_plan(plan), phase, size)
    if as_json:
        echo_json(view)
    else:
        click.echo("\n".join(_page(view)))


def explanation(plan: Plan, phase: str, size: int) -> Explanation:
    """
    Raises:
        GplanError: no step is as large as `size`.
    """
    part = plan.phase(phase)
    if size > part.max_size:
        most = count(part.max_size, "request" if phase == "decode" else "token")
        raise GplanError(f"--size {size}: no {phase} step has more than {most}", "Ask for a size up to that.")
    verdict = Admission(PhaseSetup.from_plan(part)).at(size)
    graph_us, eager_us = part.graph_us, part.eager_us
    eager = interpolate(eager_us, size) if eager_us else None
    rows = rows_us(Phase(phase), part.costs, part.max_size, plan.limits.max_len, graph_us)
    above = next((bucket.size for bucket in part.base_ladder if bucket.size >= size), None)
    if verdict.key is None:
        return Explanation(
            plan_id=plan_id(plan),
            phase=phase,
            size=size,
            key="",
            reason=_reason(plan, phase, verdict.reason),
            padding_rows=0,
            step_us=eager,
            padding_us=0.0,
            alternative="" if above is None else f"replay {phase}:{above}",
            alternative_us=None if above is None else graph_us[above] - rows[above] + rows[size],
        )
    bucket = verdict.key.size
    spared_us = rows[bucket] - rows[size]
    step_us = graph_us[bucket] - spared_us
    others = (other for other in part.ladder if other.size == bucket and not is_base(other.variant))
    return Explanation(
        plan_id=plan_id(plan),
        phase=phase,
        size=size,
        key=str(verdict.key),
        reason="",
        padding_rows=bucket - size,
        step_us=step_us,
        padding_us=max(0.0, step_us - interpolate(graph_us, size)),
        alternative="eager",
        alternative_us=eager,
        variants=tuple(_variant(part, other, spared_us) for other in others),
    )


def _variant(phase: PhasePlan, bucket: Bucket, spared_us: float) -> VariantView:
    takes = TAKES[bucket.variant.rpartition("+")[2]].format(slots=phase.request_slots)
    step_us = None if bucket.graph is None else max(0.0, bucket.graph.median_us - spared_us)
    return VariantView(key=bucket_key(phase.phase, bucket), takes=takes, step_us=step_us)


def _reason(plan: Plan, phase: str, reason: str) -> str:
    choice = next((choice for choice in plan.choices if choice.field == f"{phase}.backend"), None)
    if reason != "eager_backend" or choice is None:
        return REASONS[reason]
    return f"{REASONS[reason]}: {choice.reason}"


def _page(view: Explanation) -> list[str]:
    lines = [f"{view.phase} of {count(view.size, 'request' if view.phase == Phase.DECODE else 'token')}"]
    if view.key:
        lines.append(f"  is replayed from {view.key}, {count(view.padding_rows, 'row')} of padding")
        lines.append(f"  expected to take {view.step_us:.0f} µs, {view.padding_us:.0f} µs of it for padding")
        for variant in view.variants:
            drawn = ", drawing included" if variant.key.endswith(DRAW_VARIANTS) else ""
            time = "" if variant.step_us is None else f", {variant.step_us:.0f} µs{drawn}"
            lines.append(f"  a batch {variant.takes}: {variant.key}{time}")
    else:
        lines.append(f"  runs eagerly: {view.reason}")
        if view.step_us is not None:
            lines.append(f"  expected to take {view.step_us:.0f} µs")
    if view.alternative and view.alternative_us is not None:
        lines.append(f"  otherwise: {view.alternative}, {view.alternative_us:.0f} µs")
    return lines
