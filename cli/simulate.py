"""`gplan simulate`: a workload through the serving scheduler on a plan's measured times; needs no model, no device."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from cli.drawing import drawn
from cli.failure import say
from cli.parameters import check_finite, checkpoint_of, plan_argument
from cli.plotting import plot_option, write_plot
from cli.text import columns, count, section, short
from cli.views import echo_json
from formats.container import read_plan
from formats.plan import PhasePlan, Plan
from formats.plan_id import plan_id
from formats.workload import read_workload
from gplan.scheduling.packing import packer_of
from gplan.scheduling.report import Distribution, PhaseReport, SimulationReport
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate as run_simulation
from gplan.scheduling.times import times_of_plan


class SimulationView(msgspec.Struct, frozen=True, kw_only=True):
    """What was simulated, and what came of it.

    Attributes:
        workload_digest: of the trace as simulated, sped up and cut to the plan's maximum length.
        num_skipped: requests of the workload without an answer, left out.
        num_cut: requests cut to the plan's maximum length.
    """

    plan_id: str
    workload: str
    workload_digest: str
    speedup: float
    num_skipped: int
    num_cut: int
    report: SimulationReport


@click.command(short_help="Runs traffic through a plan's scheduler; needs no model.")
@plan_argument
@click.option("--workload", required=True, metavar="TRACE", help="A trace file, or traffic stated in words.")
@click.option(
    "--speedup",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    callback=check_finite,
    help="Of arrivals.",
)
@click.option("--checkpoint", help="Whose tokenizer counts the texts of a ShareGPT file, if not the planned one's.")
@plot_option
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def simulate(plan: str, workload: str, speedup: float, checkpoint: str | None, plot: str | None, as_json: bool) -> None:
    """Runs a workload through the scheduler that serves, on a clock that goes by the plan's measured times.

    TRACE is a file (gplan's own JSONL, Azure, Mooncake, BurstGPT, ShareGPT) or words: uniform:100-1024,
    poisson:rate=8,in=512,out=128 or closed:64,in=512,out=128. Requests longer than the plan allows are cut.

    \b
    Examples:
      gplan simulate model.gplan --workload poisson:rate=8,in=512,out=128
      gplan simulate model.gplan --workload trace.csv --speedup 2 --json
      gplan simulate model.gplan --workload trace.csv --plot steps.html
    """
    read = read_plan(plan)
    trace = read_workload(workload, lambda text: _count_tokens(text, read, checkpoint))
    whole = trace.sped_up(speedup)
    trace = whole.truncated(read.limits.max_len)
    times = times_of_plan(read)
    lag = 1 if read.fingerprint.device == "cuda" else 0
    scheduler = Scheduler(read.limits, read.num_kv_pages, packer_of(times.prefill))
    view = SimulationView(
        plan_id=plan_id(read),
        workload=workload,
        workload_digest=trace.digest(),
        speedup=speedup,
        num_skipped=trace.num_skipped,
        num_cut=sum(cut is not asked for cut, asked in zip(trace.requests, whole.requests, strict=True)),
        report=run_simulation(trace, scheduler, times, lag=lag),
    )
    if plot is not None:
        write_plot(plot, read, times, view.report.decode.steps, view.report.prefill.steps, workload)
        say(f"drawn into {plot}")
    if as_json:
        echo_json(view)
    else:
        click.echo("\n".join(_page(view, read)))


def _count_tokens(text: str, plan: Plan, checkpoint: str | None) -> int:
    from gplan.models.token_counts import token_counter

    return token_counter(checkpoint_of(plan, checkpoint))(text)


def _page(view: SimulationView, plan: Plan) -> list[str]:
    report = view.report
    return [
        *section("plan", [view.plan_id]),
        *section("workload", _workload(view)),
        *section("throughput", _throughput(report)),
        *section("latency", _latency(report)),
        *section(
            "KV pages", [f"{short(report.kv_pages_mean)} mean, {report.kv_pages_peak} peak, of {report.kv_pages}"]
        ),
        *section("prefixes", _prefixes(report)),
        *section("preemptions", [count(report.preemptions, "request") if report.preemptions else "none"]),
        "",
        *section("decode", _phase(report.decode, plan.decode, "requests")),
        "",
        *section("prefill", _phase(report.prefill, plan.prefill, "tokens")),
    ]


def _workload(view: SimulationView) -> Iterator[str]:
    report = view.report
    yield f"{view.workload}" + (f", {view.speedup:g} times as fast" if view.speedup != 1 else "")
    yield (
        f"{count(report.num_requests, 'request')}, {count(report.input_tokens, 'prompt token')}, "
        f"{count(report.output_tokens, 'answer token')}, digest {view.workload_digest[:12]}"
    )
    if view.num_skipped:
        yield f"{count(view.num_skipped, 'request')} without an answer left out"
    if view.num_cut:
        yield f"{count(view.num_cut, 'request')} cut to the maximum length"


def _throughput(report: SimulationReport) -> Iterator[str]:
    yield (
        f"{short(report.output_tokens_per_s)} tokens/s, {short(report.requests_per_s)} requests/s over "
        f"{short(report.duration_s)} s, {short(report.busy_s)} s of them busy, {count(report.num_steps, 'step')}"
    )


def _prefixes(report: SimulationReport) -> Iterator[str]:
    if report.prefix_hits:
        tokens = count(report.prefix_hit_tokens, "token")
        yield f"{count(report.prefix_hits, 'request')} found {tokens} of their prompts in the prefix cache"
    else:
        yield "no request found a part of its prompt in the prefix cache"


def _latency(report: SimulationReport) -> list[str]:
    rows = [
        ("to first token", *_milliseconds(report.ttft_ms)),
        ("between tokens", *_milliseconds(report.inter_token_ms)),
        ("to last token", *_milliseconds(report.latency_ms)),
    ]
    return columns(("ms", "mean", "p50", "p90", "p95", "p99", "max"), rows)


def _milliseconds(found: Distribution) -> tuple[str, ...]:
    return tuple(short(value) for value in (found.mean, found.p50, found.p90, found.p95, found.p99, found.max))


def _phase(report: PhaseReport, plan: PhasePlan, unit: str) -> Iterator[str]:
    yield (
        f"{count(report.replayed, 'step')} replayed, {report.eager:,} eager, {short(report.busy_ms)} ms; "
        f"padding {count(report.padding_rows, 'row')}, {short(report.padding_ms)} ms"
    )
    yield from drawn(report.steps, [bucket.size for bucket in plan.base_ladder], plan.max_size, unit)
