"""`gplan serve`: answers the OpenAI API with a plan that was made before, and decides nothing."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

import click

from cli.failure import say, say_next
from cli.parameters import checkpoint_of, plan_argument
from cli.progress import show_progress
from cli.text import count
from formats.container import read_plan
from formats.plan_id import plan_id


@click.command(short_help="Serves a plan: the OpenAI API over HTTP.")
@plan_argument
@click.option("--checkpoint", help="Where the checkpoint is, if not where it was when it was planned.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 for any free port.")
@click.option("--accept-drift", multiple=True, metavar="FIELD", help="A field that may differ; repeatable.")
@click.option("--api-key", envvar="GPLAN_API_KEY", help="Key that requests must carry; also read from GPLAN_API_KEY.")
@click.option("--model-name", help="Name that requests give; by default the last part of the checkpoint's path.")
@click.option(
    "--debug-graphs",
    is_flag=True,
    help="Replay nothing: run every captured function eagerly, on the same buffers. Says what it costs.",
)
@click.option(
    "--check-addresses",
    is_flag=True,
    help="Before every replay, check that no buffer of its graph has moved. Says what it costs.",
)
@click.option(
    "--check-kv",
    is_flag=True,
    help="Check what every step reads and writes of the KV pool. Says what it costs.",
)
@click.option(
    "--request-timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Time that a request may take; the header X-Request-Timeout asks for less.",
)
@click.option("--log-requests", is_flag=True, help="Log a line for each request (never its contents).")
def serve(
    plan: str,
    checkpoint: str | None,
    host: str,
    port: int,
    accept_drift: tuple[str, ...],
    api_key: str | None,
    model_name: str | None,
    debug_graphs: bool,
    check_addresses: bool,
    check_kv: bool,
    request_timeout: float,
    log_requests: bool,
) -> int:
    """Serves a plan: checks the machine, takes memory as planned, captures the planned graphs, answers.

    Decides nothing: what there is to decide is in the plan. Prints the API's address when it answers. SIGTERM or Ctrl-C
    finishes what runs and ends; a second one ends at once. Exit code 3 if checkpoint or machine are not those planned
    for.

    \b
    Examples:
      gplan serve model.gplan
      gplan serve model.gplan --checkpoint ./model --port 9000
      gplan serve model.gplan --debug-graphs
    """
    read = read_plan(plan)
    where = checkpoint_of(read, checkpoint)
    from gplan.serving.protocol import Debug, Ready
    from gplan.serving.server import ServeOptions
    from gplan.serving.server import serve as serve_plan

    if log_requests:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = ServeOptions(
        checkpoint=where,
        host=host,
        port=port,
        accept_drift=accept_drift,
        api_key=api_key,
        model_name=model_name or os.path.basename(os.path.abspath(where)),
        plan_path=plan,
        debug=Debug(graphs=debug_graphs, addresses=check_addresses, kv=check_kv),
        request_timeout_s=request_timeout,
    )

    with ExitStack() as until_ready:
        progress = until_ready.enter_context(show_progress())

        def on_ready(ready: Ready, url: str) -> None:
            until_ready.close()
            for sentence in (*ready.accepted_drift, *ready.advisory_drift):
                say(f"drift: {sentence}")
            for sentence in ready.debug_costs:
                say(sentence)
            tokens = ready.num_pages * read.limits.page_size
            say(
                f"plan {plan_id(read)} ready in {ready.seconds:.1f} s: {tokens:,} KV tokens, model {options.model_name}"
            )
            click.echo(f"{url}/v1")
            say_next("curl", f"{url}/v1/models")

        return serve_plan(read, options, progress, on_ready, _on_stop)


def _on_stop(num_open: int) -> None:
    if num_open:
        say(f"finishing {count(num_open, 'answer')}; told again, the server ends at once")
