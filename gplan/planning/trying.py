"""Variants tried on the bench: which pairs save enough to be captured, unless the user says so."""

from __future__ import annotations

from formats.plan import DRAW_VARIANTS
from gplan.core import Phase
from gplan.errors import UnsupportedError
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.compiler import has_compiler
from gplan.graphs.variants import COMPILED, FULL
from gplan.planning.bench import Bench
from gplan.planning.choices import Choices
from gplan.planning.options import PlanOptions
from gplan.planning.resolve import Resolved
from gplan.planning.rules import Facts, broken_rule, broken_variant_rule
from gplan.planning.variants import NONE, Pairs, Saving, found, together

MOST_COMPILED, MOST_COMPILED_BUCKETS = 16, 4
"""Requests of a decode bucket that is compiled, and how many are: compiling each takes up to a minute."""

TRIED_AT_ONCE = {"cpu": 1, "cuda": 4}
"""Prefill buckets tried with attention inside, before it is asked whether larger ones may pay."""

CUT = ("breakable", "piecewise")
"""Backends of prefill whose attention runs between graphs."""


def facts_of(resolved: Resolved) -> Facts:
    device = resolved.device.type
    return Facts(device=device, kernels=resolved.kernels, dtype=str(resolved.dtype), has_compiler=has_compiler(device))


def compiled(bench: Bench, setup: PhaseSetup, options: PlanOptions) -> Pairs:
    """Decode buckets whose forward goes through a compiler: of small ones, where that was asked for.

    Raises:
        UnsupportedError: asked for, and there is no compiler.
    """
    if not options.try_compile or setup.backend != "full":
        return NONE
    rule = broken_rule(Phase.DECODE, "piecewise", facts_of(bench.resolved))
    if rule is not None:
        raise UnsupportedError(f"--try-compile: {rule.reason} (rule {rule.name})", "Leave it out.")
    sizes = [key.size for key in setup.base_keys if key.size <= MOST_COMPILED] or [setup.base_keys[0].size]
    return found(COMPILED, bench.savings(Phase.DECODE, "full", sizes[:MOST_COMPILED_BUCKETS], COMPILED), "the forward")


def draws(bench: Bench, setup: PhaseSetup, options: PlanOptions, choices: Choices) -> Pairs:
    """Decode graphs that choose the tokens. At the smallest size they save most: where they do not save enough there,
    larger ones are not tried.

    Raises:
        UnsupportedError: asked for where decode is not captured whole.
    """
    asked = options.decode_variants
    if asked:
        if setup.backend != "full":
            raise UnsupportedError(
                f"--decode-variants {','.join(asked)}: decode is {setup.backend}, and only a whole graph can draw",
                "Leave it out, or ask for --decode-backend full.",
            )
        choices.lock("decode.variants", ",".join(asked), "--decode-variants")
        return Pairs({}, dict.fromkeys(asked, "--decode-variants was given"), asked)
    if asked is not None:
        choices.lock("decode.variants", "none", "--decode-variants")
    if asked is not None or setup.backend != "full":
        return NONE
    facts = facts_of(bench.resolved)
    first, *others = (key.size for key in setup.base_keys)
    pairs = []
    for part in (part for part in DRAW_VARIANTS if broken_variant_rule(Phase.DECODE, part, facts) is None):
        savings = bench.savings(Phase.DECODE, "full", [first], part)
        if savings[0].is_worth_it and others:
            savings += bench.savings(Phase.DECODE, "full", others, part)
        pairs.append(found(part, savings, "a served step"))
    return together(*pairs)


def whole(bench: Bench, setup: PhaseSetup, options: PlanOptions, choices: Choices) -> Pairs:
    """Prefill graphs that hold their attention, beside graphs cut at it; not tried where the user fixed the backend.
    What they save is the same at every size, a smaller part of larger ones: where the next few sizes save too little,
    larger ones are not tried.

    Raises:
        UnsupportedError: asked for where a rule forbids them, or nothing is captured.
    """
    resolved = bench.resolved
    rule = broken_rule(Phase.PREFILL, "full", facts_of(resolved))
    if options.prefill_slots is not None:
        _refuse_slots(options.prefill_slots, setup, None if rule is None else f"{rule.reason} (rule {rule.name})")
        choices.lock("prefill.request_slots", options.prefill_slots, "--prefill-slots")
        return NONE if setup.backend == "full" else Pairs({}, {FULL: "--prefill-slots was given"}, (FULL,))
    if rule is not None or setup.backend not in CUT or resolved.prefill_backend is not None:
        return NONE
    sizes = [key.size for key in setup.base_keys]
    savings: list[Saving] = []
    at_once = TRIED_AT_ONCE[resolved.device.type]
    for start in range(0, len(sizes), at_once):
        few = bench.savings(Phase.PREFILL, setup.backend, sizes[start : start + at_once], FULL)
        savings += few
        if not any(saving.is_worth_it for saving in few):
            break
    return found(FULL, savings, "the forward")


def _refuse_slots(slots: int, setup: PhaseSetup, rule: str | None) -> None:
    reason = f"prefill is {setup.backend}" if setup.backend == "eager" else rule
    if reason is not None:
        raise UnsupportedError(f"--prefill-slots {slots}: {reason}", "Leave it out.")
