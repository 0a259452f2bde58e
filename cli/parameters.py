"""Command line values that several commands read: sizes, bucket lists, the plan's path. A wrong value is a usage error
(exit 2) that says how to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from gplan.errors import GplanError
from gplan.planning.options import parse_buckets
from gplan.units import TIB, parse_size

Command = TypeVar("Command", bound=Callable[..., object])


def plan_argument(command: Command) -> Command:
    """The path of a plan file; whether it is one, `formats.container` says."""
    return click.argument("plan", type=click.Path())(command)


def check_size(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """`24GiB`, `512MiB` or `90%`, kept as written: of what a percentage is, only the machine knows."""
    if value is not None:
        try:
            parse_size(value, total=TIB)
        except GplanError as error:
            raise click.BadParameter(f"{error.message}. {error.hint}", context, parameter) from None
    return value


def read_buckets(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1,2,4,8` or `8-64:8`, read into ascending sizes."""
    try:
        return None if value is None else parse_buckets(value)
    except GplanError as error:
        raise click.BadParameter(f"{error.message}. {error.hint}", context, parameter) from None
