"""Command line values that several commands read: sizes, bucket lists, the plan's path. A wrong value is a usage error
(exit 2) that says how to write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from cli.failure import Failure
from formats.plan import DRAW_VARIANTS, Plan
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


def check_finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A number that is one: no range excludes `nan`."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number to plan with.", context, parameter)
    return value


def checkpoint_of(plan: Plan, given: str | None) -> str:
    """Where the checkpoint is: as given, else where the plan remembers it.

    Raises:
        Failure: the plan remembers but the last part of a path, and it is not here.
    """
    if given is not None:
        return given
    source = plan.model.source
    if "/" not in source and not Path(source).exists():
        raise Failure(
            f"the plan was made from a checkpoint named {source}, which is not in this folder",
            "A plan holds no absolute path: say where it is with --checkpoint DIR.",
        )
    return source


def read_buckets(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1,2,4,8` or `8-64:8`, read into ascending sizes."""
    try:
        return None if value is None else parse_buckets(value)
    except GplanError as error:
        raise click.BadParameter(f"{error.message}. {error.hint}", context, parameter) from None


def read_variants(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """`greedy`, `sampled`, both with a comma between, or `none`."""
    if value is None or value == "none":
        return None if value is None else ()
    names = tuple(sorted({name.strip() for name in value.split(",")}))
    unknown = [name for name in names if name not in DRAW_VARIANTS]
    if unknown:
        known = ", ".join(DRAW_VARIANTS)
        raise click.BadParameter(f"{unknown[0]!r} is no variant. Use {known}, or none.", context, parameter)
    return names
