"""Times and traffic as a picture, for `--plot`: what a step takes by size, where buckets stand, how many steps ran."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.failure import Failure
from formats.files import write_atomic
from formats.plan import PhasePlan, Plan
from formats.plan_id import plan_id
from gplan.scheduling.times import PhaseTimes, StepTimes

SUFFIXES = {".png": "png", ".html": "svg"}
INK, GRAPH, EAGER, TRAFFIC = "#333333", "#1f5fa8", "#c46a1b", "#b9c6d6"

Steps = tuple[tuple[int, int], ...]
Command = TypeVar("Command", bound=Callable[..., object])


def plot_option(command: Command) -> Command:
    """`--plot FILE`, checked before anything is computed."""
    text = "Draw times, buckets and traffic into FILE.png or FILE.html."
    return click.option("--plot", metavar="FILE", type=click.Path(), callback=_check, help=text)(command)


def _check(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    if Path(value).suffix not in SUFFIXES:
        raise click.BadParameter(f"{value} ends neither in .png nor in .html.", context, parameter)
    if os.path.isdir(value) or not Path(value).parent.is_dir():
        raise click.BadParameter(f"{value} cannot be a file: its folder is missing, or it is one.", context, parameter)
    return value


def write_plot(path: str, plan: Plan, times: StepTimes, decode: Steps, prefill: Steps, title: str) -> None:
    """Draws both phases.

    Args:
        decode, prefill: (size, number of steps) of the traffic.

    Raises:
        Failure: matplotlib is missing.
        FileAccessError: the file cannot be written.
    """
    matplotlib = _matplotlib()
    figure = matplotlib.figure.Figure(figsize=(10, 8), layout="constrained", dpi=120)
    top, bottom = figure.subplots(2, 1)
    _draw(top, plan.decode, times.decode, decode, "requests")
    _draw(bottom, plan.prefill, times.prefill, prefill, "tokens")
    heading = f"{title} · plan {plan_id(plan)}"
    figure.suptitle(heading, color=INK, fontsize=11)
    picture = io.BytesIO()
    kind = SUFFIXES[Path(path).suffix]
    with matplotlib.rc_context({"svg.hashsalt": "gplan"}):  # the same names of parts in every picture
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(path, picture.getvalue() if kind == "png" else _page(heading, picture.getvalue().decode()))


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError:
        raise Failure("--plot needs matplotlib, which is not installed", "pip install 'gplan[plot]'") from None


def _draw(axes: Any, plan: PhasePlan, times: PhaseTimes, steps: Steps, unit: str) -> None:
    """One phase: bars of traffic behind, then measured points, the time of every step, and a mark at every bucket."""
    traffic = axes.twinx()
    traffic.bar([size for size, _ in steps], [count for _, count in steps], width=1.0, color=TRAFFIC)
    traffic.set_ylabel("steps of the traffic", color=INK)
    axes.set_zorder(traffic.get_zorder() + 1)
    axes.patch.set_visible(False)
    for name, points, colour in (("graph", plan.graph_us, GRAPH), ("eager", plan.eager_us, EAGER)):
        measured = sorted(points.items())
        axes.plot(
            [size for size, _ in measured],
            [us / 1e3 for _, us in measured],
            marker="o",
            markersize=3,
            linewidth=0.8,
            linestyle="--",
            color=colour,
            label=f"{name}, measured",
        )
    sizes = range(1, times.max_size + 1)
    padded = [(times.padded_ps(size) + times.rows_ps[size]) / 1e9 for size in sizes]
    axes.step(sizes, padded, where="mid", color=INK, linewidth=1.2, label="a step of this size")
    for bucket in plan.base_ladder:
        axes.axvline(bucket.size, ymax=0.03, color=INK, linewidth=1.5)
    axes.set_xlim(0.5, times.max_size + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{plan.phase}: {unit} of a step ({len(plan.base_ladder)} buckets marked)", color=INK)
    axes.set_ylabel("ms", color=INK)
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _page(heading: str, svg: str) -> bytes:
    picture = svg[svg.index("<svg") :]
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title></head>\n'
    return f"{head}<body>{picture}</body></html>\n".encode()
