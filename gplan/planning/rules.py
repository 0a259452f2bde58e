"""Compatibility rules: what may not be combined, in one table.

A rule may strike a kernel set, or a backend from the candidates of a phase: what is chosen instead names the rule. It
never overrules a user: a rule against a lock is an error that names the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from formats.plan import DRAW_VARIANTS, BackendName, Rejection
from gplan.core import Phase
from gplan.errors import UnsupportedError
from gplan.graphs.compiler import NO_COMPILER

KernelsName = Literal["reference", "flashinfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What rules may look at. `head_dim` is of the model's attention, 0 where no rule on kernel sets is asked."""

    device: str
    kernels: str
    dtype: str
    head_dim: int = 0
    has_compiler: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """Forbids `backends` and `variants` in `phases`, and the kernel sets `kernels`, where `applies`."""

    name: str
    phases: tuple[Phase, ...]
    backends: tuple[BackendName, ...]
    applies: Callable[[Facts], bool]
    reason: str
    kernels: tuple[KernelsName, ...] = ()
    variants: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason} (rule {self.name})"


FLASHINFER_HEAD_DIMS = (64, 128, 256)

RULES: tuple[Rule, ...] = (
    Rule(
        "flashinfer-needs-a-gpu",
        (),
        (),
        lambda facts: facts.device != "cuda",
        "flashinfer needs a GPU",
        kernels=("flashinfer",),
    ),
    Rule(
        "flashinfer-in-half-precision",
        (),
        (),
        lambda facts: facts.dtype == "torch.float32",
        "flashinfer computes attention in half precision only",
        kernels=("flashinfer",),
    ),
    Rule(
        "flashinfer-head-dims",
        (),
        (),
        lambda facts: facts.head_dim not in FLASHINFER_HEAD_DIMS,
        f"flashinfer has kernels for a head_dim of {', '.join(map(str, FLASHINFER_HEAD_DIMS))} alone",
        kernels=("flashinfer",),
    ),
    Rule(
        "reference-reads-lengths-on-the-host",
        (Phase.DECODE, Phase.PREFILL),
        ("full",),
        lambda facts: facts.kernels == "reference" and facts.device == "cuda",
        "the reference kernels read lengths on the host, which a CUDA graph cannot replay",
    ),
    Rule(
        "no-compiler",
        (Phase.DECODE, Phase.PREFILL),
        ("piecewise",),
        lambda facts: not facts.has_compiler,
        NO_COMPILER,
    ),
    Rule(
        "metadata-decided-on-the-host",
        (Phase.PREFILL,),
        (),
        lambda facts: True,
        "the host lays out attention anew at each step (FlashInfer's plan): in a graph that would stay as captured",
        variants=DRAW_VARIANTS,
    ),
)

CANDIDATES: dict[Phase, tuple[BackendName, ...]] = {
    Phase.DECODE: ("full",),
    Phase.PREFILL: ("breakable",),
}
"""Graph backends measured where the user fixed none. Decode varies in requests alone: nothing is gained by cutting.
Prefill with its attention inside takes some batches only: it is a variant of buckets, not a backend of its own.
Compiling takes minutes: it is tried where that is asked for."""


def candidates(
    phase: Phase, locked: BackendName | None, facts: Facts, *, tries_compiler: bool = False
) -> tuple[BackendName, ...]:
    """Backends to measure for a phase; the locked one alone where the user fixed it.

    Raises:
        UnsupportedError: a rule forbids what the user fixed.
    """
    if locked is None:
        names = (*CANDIDATES[phase], "piecewise") if tries_compiler and phase is Phase.PREFILL else CANDIDATES[phase]
        return tuple(name for name in names if broken_rule(phase, name, facts) is None)
    rule = broken_rule(phase, locked, facts)
    if rule is not None:
        raise UnsupportedError(
            f"--{phase}-backend {locked}: {rule}",
            f"Leave out --{phase}-backend to let gplan choose.",
        )
    return (locked,)


def rejections(phase: Phase, facts: Facts) -> tuple[Rejection, ...]:
    """Backends that rules strike, with their reasons."""
    names: tuple[BackendName, ...] = ("full", "breakable", "piecewise")
    broken = ((name, broken_rule(phase, name, facts)) for name in names)
    return tuple(Rejection(backend=name, reason=str(rule)) for name, rule in broken if rule)


def broken_rule(phase: Phase, backend: BackendName, facts: Facts) -> Rule | None:
    """The first rule that forbids a backend, if any."""
    matching = (rule for rule in RULES if phase in rule.phases and backend in rule.backends)
    return next((rule for rule in matching if rule.applies(facts)), None)


def broken_kernels_rule(kernels: KernelsName, facts: Facts) -> Rule | None:
    """The first rule that forbids a kernel set, if any."""
    return next((rule for rule in RULES if kernels in rule.kernels and rule.applies(facts)), None)


def broken_variant_rule(phase: Phase, variant: str, facts: Facts) -> Rule | None:
    """The first rule that forbids a variant, if any."""
    matching = (rule for rule in RULES if phase in rule.phases and variant in rule.variants)
    return next((rule for rule in matching if rule.applies(facts)), None)
