"""A capture budget that compiling alone exceeds."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from formats.plan import BackendName, Bucket, Rejection
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.planning.choices import Choices
from gplan.planning.decisions import Decisions, PhaseDecision
from gplan.planning.uncompiled import uncompiled
from gplan.planning.variants import NONE, Pairs, with_pairs
from tests.formats.plans import make_bucket

PAIRS = Pairs({(1, "compiled"): 5.0, (1, "greedy"): 3.0, (4, "greedy"): 3.0}, {"compiled": "a", "greedy": "b"})


def setup(phase: Phase, backend: BackendName, *sizes: int) -> PhaseSetup:
    return PhaseSetup(phase=phase, backend=backend, keys=tuple(ShapeKey(phase, n) for n in sizes), max_size=sizes[-1])


def decisions(prefill: BackendName = "breakable") -> Decisions:
    decode = PhaseDecision(with_pairs(setup(Phase.DECODE, "full", 1, 4), PAIRS, 0), (), {}, False, PAIRS)
    rejected = (Rejection(backend="breakable", reason="slower"), Rejection(backend="eager", reason="slowest"))
    return {
        Phase.DECODE: decode,
        Phase.PREFILL: PhaseDecision(setup(Phase.PREFILL, prefill, 8, 16), rejected, {}, False, NONE),
    }


def buckets(made: Decisions, compile_ms: float) -> dict[ShapeKey, Bucket]:
    def took(key: ShapeKey) -> float:
        is_compiled = "compiled" in key.variant.split("+") or made[key.phase].setup.backend == "piecewise"
        return compile_ms if is_compiled else 10.0

    keys = [key for decision in made.values() for key in decision.setup.keys]
    return {key: msgspec.structs.replace(make_bucket(key.size), capture_ms=took(key)) for key in keys}


def test_what_fits_stays_compiled() -> None:
    made = decisions("piecewise")
    assert uncompiled(made, buckets(made, 500), 2.0, Choices(), slots=4, keeps_prefill=False) is None


def test_what_does_not_fit_is_planned_uncompiled_and_says_why() -> None:
    made, choices = decisions("piecewise"), Choices()
    choices.measured("prefill.backend", "piecewise", "it was faster")
    slower = uncompiled(made, buckets(made, 15_000), 2.0, choices, slots=4, keeps_prefill=False)
    assert slower is not None
    decode, prefill = slower[Phase.DECODE], slower[Phase.PREFILL]
    assert [str(key) for key in decode.setup.keys] == ["decode:1", "decode:1:greedy", "decode:4", "decode:4:greedy"]
    assert decode.pairs.saved_us == {(1, "greedy"): 3.0, (4, "greedy"): 3.0}
    reason = "compiling takes 60.0 s, and capturing may take 2 s at start (--startup-budget)"
    assert decode.pairs.reasons == {"compiled": f"a; {reason}", "greedy": "b"}
    assert prefill.setup == replace(made[Phase.PREFILL].setup, backend="breakable")
    assert [(entry.backend, entry.reason) for entry in prefill.rejected] == [
        ("piecewise", reason),
        ("eager", "slowest"),
    ]
    ((field, value, said),) = ((entry.field, entry.value, entry.reason) for entry in choices.entries)
    assert (field, value, said) == ("prefill.backend", "breakable", f"in place of piecewise: {reason}")


def test_a_backend_that_was_asked_for_stays() -> None:
    made, choices = decisions("piecewise"), Choices()
    slower = uncompiled(made, buckets(made, 15_000), 2.0, choices, slots=4, keeps_prefill=True)
    assert slower is not None
    assert slower[Phase.PREFILL] == made[Phase.PREFILL]
    assert not choices.entries
    made = {**made, Phase.DECODE: replace(made[Phase.DECODE], pairs=NONE, setup=setup(Phase.DECODE, "full", 1, 4))}
    assert uncompiled(made, buckets(made, 15_000), 2.0, choices, slots=4, keeps_prefill=True) is None
