"""The `gplan` command: what its commands share. Each command is a file of its own; nothing heavy is imported here.

stdout is data, stderr is talk. Exit codes: 0 done, 1 error (or, of `diff`, different), 2 usage, 3 drift, 4 does not
fit, 5 verification failed, 6 the device failed, 70 the engine failed in a way that nobody foresaw, 130 interrupted,
141 nobody reads stdout any more.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from cli.check import check
from cli.diff import diff
from cli.explain import explain
from cli.failure import Failure
from cli.interrupts import INTERRUPTED, handle_interrupts
from cli.plan import plan
from cli.quickstart import quickstart
from cli.serve import serve
from cli.show import show
from cli.simulate import simulate
from cli.verify import verify
from formats.errors import FormatError
from gplan import __version__
from gplan.errors import GplanError

BROKEN_PIPE = 141


class Commands(click.Group):
    """Turns whatever a command raises into an error with a remedy and an exit code; lists commands in working order."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (GplanError, FormatError) as error:
            raise Failure.of(error) from error
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _stdout_is_closed():
                raise click.exceptions.Exit(BROKEN_PIPE) from None
            if os.environ.get("GPLAN_DEBUG") == "1":
                raise
            raise Failure.of(error) from error
        return result

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="gplan", message="%(prog)s %(version)s")
def cli() -> None:
    """Plans CUDA graphs, buckets and memory for a language model once; serves the plan.

    \b
      gplan quickstart                         all of it once, with a small real model
      gplan plan CHECKPOINT -o model.gplan     measure this machine, decide, write the plan
      gplan show model.gplan                   read it
      gplan serve model.gplan                  serve it: the OpenAI API over HTTP

    Exit codes: 0 done, 1 error (of diff: different), 2 usage, 3 drift, 4 memory does not hold it, 5 verification
    failed, 6 the device failed, 70 the engine failed, 130 interrupted. Set GPLAN_DEBUG=1 for tracebacks.
    """


for command in (plan, show, explain, check, serve, verify, diff, simulate, quickstart):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        result = cli.main(args=list(arguments), prog_name="gplan", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> None:
    handle_interrupts()
    code = run(sys.argv[1:])
    if any(thread.daemon for thread in threading.enumerate()):
        # Such a thread may be importing, which cannot be ended, and the interpreter must not be taken down under it.
        _flush()
        os._exit(code)
    sys.exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _stdout_is_closed() -> bool:
    """Whether the reader of stdout has gone, as in `gplan show … | head`. If so, nothing more is written there."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


if __name__ == "__main__":
    main()
