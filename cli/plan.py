"""`gplan plan`: measures a checkpoint on this machine, decides, and writes the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from cli.config import config_option
from cli.failure import say, say_next
from cli.parameters import check_finite, check_size, read_buckets, read_variants
from cli.progress import show_progress
from cli.text import count
from cli.tokenizers import has_tokenizer, tokenizer_problem
from cli.views import NOISY, PlanView, spread_of, view_plan
from formats.container import MAGIC, read_plan, write_plan
from formats.errors import FileAccessError
from formats.files import check_writable
from formats.plan import PhasePlan, Plan
from gplan.planning.options import PlanOptions
from gplan.units import format_size

BACKENDS = click.Choice(["full", "breakable", "eager"])
PREFILL_BACKENDS = click.Choice(["full", "breakable", "piecewise", "eager"])
AT_LEAST_ONE = click.IntRange(min=1)


@click.command(short_help="Measures a checkpoint on this machine and writes the plan.")
@click.argument("checkpoint", required=False)
@click.option("-o", "--output", required=True, type=click.Path(), help="The file to write.")
@click.option(
    "--workload", metavar="TRACE", help="Traffic to choose the buckets for: a trace file, or words as `simulate` takes."
)
@click.option(
    "--from",
    "old",
    metavar="PLAN",
    type=click.Path(),
    help="Choose the buckets for another workload from what this plan measured; needs no model and no GPU.",
)
@click.option(
    "--speedup",
    type=click.FloatRange(0, min_open=True),
    callback=check_finite,
    help="Of the workload's arrivals; 1 unless given.",
)
@click.option("--max-batch", type=AT_LEAST_ONE, help="Requests at once, at most.")
@click.option("--max-len", type=AT_LEAST_ONE, help="Tokens of one request at most, prompt and answer together.")
@click.option("--chunk", type=AT_LEAST_ONE, help="Tokens of one step at most; longer prompts take several steps.")
@click.option("--page-size", type=AT_LEAST_ONE, help="Tokens of one page of the KV pool.")
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=None,
    help="Keep what was computed for requests that begin with the same tokens. On, unless given.",
)
@click.option("--memory", metavar="SIZE", callback=check_size, help="To spend: 24GiB, 512MiB, or 90% of the device's.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. A GPU where there is one, else the CPU.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the checkpoint, unless given.")
@click.option("--kernels", type=click.Choice(["reference", "flashinfer"]), help="The set of operators to run with.")
@click.option("--decode-backend", type=BACKENDS, help="How decode is captured. The fastest as measured, unless given.")
@click.option(
    "--prefill-backend", type=PREFILL_BACKENDS, help="The same for prefill; piecewise is compiled, in minutes."
)
@click.option(
    "--decode-buckets", metavar="SIZES", callback=read_buckets, help="Sizes to capture, in requests: 1,2,4,8 or 1-64:8."
)
@click.option("--prefill-buckets", metavar="SIZES", callback=read_buckets, help="Sizes to capture, in tokens.")
@click.option(
    "--try-compile",
    is_flag=True,
    help="Have prefill and small decode sizes compiled (minutes) and choose compiled graphs where they win.",
)
@click.option(
    "--prefill-slots",
    metavar="N",
    type=AT_LEAST_ONE,
    help="Capture prefill with its attention inside too, for steps of at most N requests. Where it pays, unless given.",
)
@click.option(
    "--decode-variants",
    metavar="NAMES",
    callback=read_variants,
    help="Decode graphs that choose the tokens: greedy, sampled, greedy,sampled or none. Where they pay, unless given.",
)
@click.option(
    "--startup-budget",
    "startup_budget_s",
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    callback=check_finite,
    help="What capturing may take when the plan is served.",
)
@click.option("--hash-contents", is_flag=True, help="Identify the checkpoint by all its bytes, not by its headers.")
@config_option
def plan(checkpoint: str | None, output: str, old: str | None, **flags: Any) -> None:
    """Measures CHECKPOINT on this machine, decides, and writes the plan.

    CHECKPOINT is a folder in Hugging Face's form (config.json and safetensors), or the name of one in the local cache
    of the hub. Whatever an option fixes is recorded as a lock; whatever none fixes is decided, and the plan says why.
    Prints the plan's id.

    \b
    Examples:
      gplan plan ./SmolLM2-135M-Instruct -o smollm2.gplan
      gplan plan ./Qwen3-8B -o qwen3.gplan --memory 90% --max-batch 64 --max-len 8192
      gplan plan ./Qwen3-8B -o qwen3.gplan --workload poisson:rate=8,in=512,out=128 --startup-budget 2
      gplan plan --config plan.toml
      gplan plan --from qwen3.gplan -o new.gplan --workload trace.csv
    """
    _check_output(Path(output))
    made = _measure(checkpoint, flags) if old is None else _solve_again(old, checkpoint, flags)
    write_plan(made, output)
    view = view_plan(made)
    say(_summary(view))
    if old is None and (spread := spread_of(made)) > NOISY:
        say(f"times spread by {spread:.0%}: something else keeps this machine busy; plan again when it is quiet")
    click.echo(f"{view.plan_id}  {output}")
    if old is not None:
        is_new = not os.path.samefile(old, output)
        say_next(*(("gplan", "diff", old, output) if is_new else ("gplan", "show", output)))
        return
    say_next("gplan", "show", output)
    # What has no tokenizer cannot be served.
    say_next("gplan", "serve" if made.model.tokenizer_digest else "verify", output, *_checkpoint_flag(checkpoint or ""))


def _measure(checkpoint: str | None, flags: Mapping[str, Any]) -> Plan:
    if checkpoint is None:
        raise click.UsageError("Missing argument 'CHECKPOINT'; or plan anew --from another plan.")
    is_servable = has_tokenizer(checkpoint)
    if not is_servable:
        say("there is no tokenizer in the checkpoint: the plan can be verified and simulated, but not served")
    from gplan.planning.planner import make_plan

    # The look takes seconds, most of them of importing: while weights are loaded, and over before anything is timed.
    with ThreadPoolExecutor(1) as pool, show_progress() as progress:
        looked = pool.submit(tokenizer_problem, checkpoint) if is_servable else None

        def require_tokenizer() -> None:
            problem = None if looked is None else looked.result()
            if problem is not None:
                raise problem

        options = PlanOptions(checkpoint=checkpoint, **flags)
        return make_plan(options, progress, before_measuring=require_tokenizer)


def _solve_again(old: str, checkpoint: str | None, flags: Mapping[str, Any]) -> Plan:
    plan = read_plan(old)
    from gplan.planning.replan import replan

    return replan(plan, PlanOptions(checkpoint=checkpoint or plan.model.source, **flags))


def _check_output(output: Path) -> None:
    """Finds out before the measuring, not after it, that the plan could not be written."""
    if os.path.isdir(output):
        raise click.BadParameter(
            f"{output} is a folder. Name a file, such as {output / 'model.gplan'}.", param_hint="-o"
        )
    if not os.path.isdir(output.parent):
        raise click.BadParameter(f"there is no folder {output.parent}. Make it, or name another.", param_hint="-o")
    if _holds_something_else(output):
        raise click.BadParameter(
            f"{output} is there, and is no plan. Remove it, or name another file.", param_hint="-o"
        )
    try:
        check_writable(output)
    except FileAccessError as error:
        raise click.BadParameter(f"{error.message}. {error.hint}", param_hint="-o") from error


def _holds_something_else(output: Path) -> bool:
    if not os.path.isfile(output):
        return False
    with suppress(OSError), open(output, "rb") as file:
        return file.read(len(MAGIC)) not in (b"", MAGIC)
    return False


def _summary(view: PlanView) -> str:
    made = view.plan
    return (
        f"decode {_phase(made.decode, 'request')}; prefill {_phase(made.prefill, 'token')}; "
        f"KV pool of {view.kv_tokens:,} tokens in {format_size(made.limits.memory_bytes)}"
    )


def _phase(phase: PhasePlan, unit: str) -> str:
    most = f"up to {count(phase.max_size, unit)}"
    return f"{phase.backend}, {count(len(phase.base_ladder), 'bucket') + ' ' if phase.ladder else ''}{most}"


def _checkpoint_flag(checkpoint: str) -> tuple[str, ...]:
    """A plan remembers a relative path or a hub name, but no absolute path."""
    return ("--checkpoint", checkpoint) if os.path.isabs(checkpoint) else ()
