"""Which pairs of bucket and variant are worth a graph: what each saves, and which of them the traffic pays for.

A variant takes some of the batches of a bucket whose base takes them all, so leaving one out costs time and never an
answer. Each is measured against the base beside it: a draw as whole served steps, since what it saves is around the
forward; attention inside as forwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from formats.measurements import Timing
from formats.plan import VariantNote
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.variants import COMPILED, FULL, with_part
from gplan.planning.backends import MAX_NOISE

MIN_SAVING = 0.03
"""Part of a step that a variant must save: less is not worth its capture and its receipts."""

DRAW_SHARE = 0.5
"""Of the decode steps that a draw could take, the part that it is taken to: traces do not tell how tokens are drawn."""

BUDGET_STEP_MS = 0.1


@dataclass(frozen=True, slots=True)
class Saving:
    """One bucket's base against one variant of it, measured in turns."""

    size: int
    variant: str
    base: Timing
    special: Timing

    @property
    def saved_us(self) -> float:
        return self.base.median_us - self.special.median_us

    @property
    def part(self) -> float:
        """Of the base's time; negative where the variant is slower."""
        return self.saved_us / self.base.median_us

    @property
    def noise(self) -> float:
        return min(MAX_NOISE, (self.base.spread_us + self.special.spread_us) / self.base.median_us)

    @property
    def is_worth_it(self) -> bool:
        return self.part >= max(MIN_SAVING, self.noise)

    @property
    def sentence(self) -> str:
        more = "less" if self.saved_us >= 0 else "more"
        special, base = self.special.median_us / 1e3, self.base.median_us / 1e3
        return f"{special:.2f} ms, {abs(self.part):.1%} {more} than {base:.2f}, at {self.size}"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Variants of a phase: the pairs that may be captured, what each saves, and what was found of every variant.

    Attributes:
        saved_us: of a step, by pair; of a locked pair nothing is known and nothing asked.
        locked: variants that the user fixed: each is captured at every size.
    """

    saved_us: Mapping[tuple[int, str], float]
    reasons: Mapping[str, str]
    locked: tuple[str, ...] = ()

    def keys(self, phase: Phase, bases: Sequence[ShapeKey]) -> tuple[ShapeKey, ...]:
        """Base keys and the pairs of their sizes, as a setup lists them."""
        found = []
        for base in bases:
            pairs = [part for size, part in self.saved_us if size == base.size]
            variant = COMPILED if COMPILED in pairs else base.variant
            parts = sorted({*pairs, *self.locked} - {COMPILED})
            found += [ShapeKey(phase, base.size, variant=variant)]
            found += [ShapeKey(phase, base.size, variant=with_part(variant, part)) for part in parts]
        return tuple(sorted(found))

    def notes(self, keys: Sequence[ShapeKey]) -> tuple[VariantNote, ...]:
        """What is written down of each variant, given the keys that are captured in the end."""
        return tuple(
            VariantNote(variant=part, sizes=sizes_with(keys, part), reason=reason)
            for part, reason in sorted(self.reasons.items())
        )


NONE = Pairs({}, {})


def with_pairs(setup: PhaseSetup, pairs: Pairs, slots: int) -> PhaseSetup:
    """A setup of base keys with the pairs of their sizes.

    Args:
        slots: request slots of graphs that hold their attention, if there are any.
    """
    keys = pairs.keys(setup.phase, setup.base_keys)
    is_whole = setup.phase is Phase.PREFILL and (setup.backend == "full" or bool(sizes_with(keys, FULL)))
    return replace(setup, keys=keys, request_slots=slots if is_whole else 0)


def sizes_with(keys: Sequence[ShapeKey], part: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(key.size for key in keys if part in key.variant.split("+")))


def found(variant: str, savings: Sequence[Saving], what: str) -> Pairs:
    """The pairs of one variant that save enough, each at its own size.

    Args:
        what: what was timed. The reason has the best figures of those that save enough, or of all where none does.
    """
    kept = {(saving.size, variant): saving.saved_us for saving in savings if saving.is_worth_it}
    best = max(savings, key=lambda saving: (saving.is_worth_it, saving.part))
    rule = f"at least {MIN_SAVING:.0%}, and more than the times spread ({best.noise:.1%}), is asked for"
    reason = f"{what} takes {best.sentence}; {rule}"
    short = [saving.size for saving in savings if not saving.is_worth_it]
    if kept and short:
        reason += f"; not at {_list(short)}: it saves less than that there"
    return Pairs(kept, {variant: reason})


def together(*pairs: Pairs) -> Pairs:
    saved: dict[tuple[int, str], float] = {}
    reasons: dict[str, str] = {}
    for each in pairs:
        saved.update(each.saved_us)
        reasons.update(each.reasons)
    return Pairs(saved, reasons, tuple(part for each in pairs for part in each.locked))


# Under traffic ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that could be captured: what it saves under the traffic, net of its bytes, and what capturing costs."""

    size: int
    part: str
    gain_us: float
    capture_ms: float


def worth_capturing(candidates: Sequence[Candidate], room_ms: float | None) -> tuple[Candidate, ...]:
    """The pairs that save most within the capture time that is left: all that gain where there is no limit."""
    gaining = [each for each in candidates if each.gain_us > 0]
    if room_ms is None:
        return tuple(gaining)
    room = max(0, math.floor(round(room_ms / BUDGET_STEP_MS, 6)))
    # best[m]: the largest gain of pairs that take at most m steps of time, and which they are.
    best: list[tuple[float, tuple[Candidate, ...]]] = [(0.0, ())] * (room + 1)
    for each in gaining:
        cost = math.ceil(round(each.capture_ms / BUDGET_STEP_MS, 6))
        for left in range(room, cost - 1, -1):
            gain, chosen = best[left - cost]
            if gain + each.gain_us > best[left][0]:
                best[left] = (gain + each.gain_us, (*chosen, each))
    return best[room][1]


def restricted(pairs: Pairs, kept: Sequence[Candidate], asked: Sequence[Candidate]) -> Pairs:
    """The pairs that were kept; of those that were not, why."""
    names = {(each.size, each.part) for each in kept}
    reasons = dict(pairs.reasons)
    for part in reasons:
        out = sorted(each.size for each in asked if each.part == part and (each.size, part) not in names)
        idle = [each.size for each in asked if each.size in out and each.part == part and each.gain_us <= 0]
        over = [size for size in out if size not in idle]
        if idle:
            reasons[part] += f"; not at {_list(idle)}: the traffic's steps do not pay for it"
        if over:
            reasons[part] += f"; not at {_list(over)}: no capture time is left"
    return replace(pairs, saved_us={pair: us for pair, us in pairs.saved_us.items() if pair in names}, reasons=reasons)


def share_of(part: str) -> float:
    """Of a bucket's steps those that the variant takes."""
    return DRAW_SHARE if part in ("greedy", "sampled") else 1.0


def steps_by_bucket(setup: PhaseSetup, steps: Sequence[tuple[int, int]]) -> dict[int, int]:
    """How many of the traffic's steps each base bucket of a setup takes."""
    sizes = sorted(key.size for key in setup.base_keys)
    taken = dict.fromkeys(sizes, 0)
    for size, count in steps:
        bucket = next((each for each in sizes if each >= size), None)
        if bucket is not None and not any(first <= size <= last for first, last in setup.eager_sizes):
            taken[bucket] += count
    return taken


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(sizes))))
