"""How a failure is told: what is wrong, what to do next, and the exit code. Nothing else writes `error:`."""

from __future__ import annotations

import shlex
from typing import IO, Any

import click

from formats.errors import FormatError
from gplan.errors import GplanError


class Failure(click.ClickException):
    """An error as a person reads it.

    Args:
        message: what is wrong.
        hint: what to do next; empty where the message says all.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc, unused-ignore]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure that `error` is: an expected one as it says itself, any other in one line."""
        if isinstance(error, GplanError | FormatError):
            return cls(error.message, error.hint, error.exit_code)
        if isinstance(error, OSError) and error.strerror:
            about = f"{error.filename}: " if error.filename else ""
            return cls(f"{about}{error.strerror}", "The system refused it. GPLAN_DEBUG=1 shows where it happened.")
        text = " ".join(str(error).split())
        kind = type(error).__name__
        return cls(
            f"unexpected {kind}: {text}" if text else f"unexpected {kind}",
            "This is a fault of gplan. Run it again with GPLAN_DEBUG=1 for the traceback.",
        )

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{click.style('error:', fg='red', bold=True)} {self.message}", file=file, err=file is None)
        if self.hint:
            click.echo(f"{click.style('hint:', fg='cyan', bold=True)} {self.hint}", file=file, err=file is None)


def say(text: str) -> None:
    """Talk: progress, notices and what to do next, on stderr."""
    click.echo(text, err=True)


def say_next(*words: str) -> None:
    """The command that follows from what was done, as a shell takes it."""
    say(f"next: {shlex.join(words)}")
