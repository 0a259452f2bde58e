"""Which capture backend a phase gets: the fastest as measured at a few sizes, eager included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.measurements import Timing
from formats.plan import BackendName, Rejection

DRAW = 0.03
"""Backends whose times differ by no more than this part are taken for equal."""


MAX_NOISE = 0.1
"""Of times that spread by more than this part, the medians are believed all the same."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A backend's times at the probed sizes."""

    backend: BackendName
    times: Mapping[int, Timing]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The chosen backend, the sentence that says why, and the ones it beat."""

    backend: BackendName
    reason: str
    rejected: tuple[Rejection, ...]


def choose_backend(graphs: Sequence[Trial], eager: Trial, asked_by: str = "") -> Verdict:
    """Picks the backend with the least time, each size weighing the same relative to its eager time.

    A draw goes to the graph backend that comes first in `graphs`, which takes the most batches: one with a fixed number
    of request slots has to be faster by more than `DRAW`. Eager is chosen only where it is faster than every graph by
    more than the measurements spread, because a replay leaves the host free; and never where graphs were asked for.

    Args:
        asked_by: the flag that names sizes to capture; empty where none does.
    """
    ratios = {trial.backend: _ratio(trial, eager) for trial in graphs}
    if not ratios:
        return Verdict("eager", "no graph backend may be used here", ())
    least = min(ratios.values())
    # What needs a compiler has to win by more than its times spread, too.
    draw = DRAW if "piecewise" not in ratios else max(DRAW, min(MAX_NOISE, max(_noise(trial) for trial in graphs)))
    best = next(name for name in ratios if ratios[name] <= least * (1 + draw))
    noise = min(MAX_NOISE, max(_noise(trial) for trial in (eager, *graphs)))
    if ratios[best] > 1 + noise and not asked_by:
        rejected = tuple(Rejection(backend=n, reason=f"{r:.2f} times slower than eager") for n, r in ratios.items())
        return Verdict(
            "eager", f"eager is faster than every graph: {best} takes {ratios[best]:.2f} of its time", rejected
        )
    losers = [Rejection(backend=n, reason=_against(n, best, ratios)) for n in ratios if n != best]
    losers.append(Rejection(backend="eager", reason=_against_eager(best, ratios[best], noise, asked_by)))
    sizes = ", ".join(str(size) for size in sorted(graphs[0].times))
    return Verdict(best, f"takes {ratios[best]:.2f} of the eager time over sizes {sizes}", tuple(losers))


def _ratio(trial: Trial, eager: Trial) -> float:
    ratios = [time.median_us / eager.times[size].median_us for size, time in trial.times.items()]
    return sum(ratios) / len(ratios)


def _noise(trial: Trial) -> float:
    return max(time.spread_us / time.median_us for time in trial.times.values())


def _against(loser: BackendName, best: BackendName, ratios: Mapping[BackendName, float]) -> str:
    ratio = ratios[loser] / ratios[best]
    if ratio >= 1:
        return f"{ratio:.2f} times slower than {best}"
    why = "needs no compiler" if loser == "piecewise" else "takes more batches"
    return f"{1 / ratio:.2f} times faster than {best}, which {why} and goes first in a draw"


def _against_eager(best: BackendName, ratio: float, noise: float, asked_by: str) -> str:
    if ratio <= 1:
        return f"{1 / ratio:.2f} times slower than {best}"
    if ratio > 1 + noise:
        return f"{ratio:.2f} times faster than {best}, but {asked_by} asks for graphs"
    return f"{ratio:.2f} times faster than {best}, within the noise; a replay leaves the host free"
