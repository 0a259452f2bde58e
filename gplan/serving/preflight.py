"""What is checked before a byte is spent: that checkpoint and machine are the ones that were planned for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from formats.drift import ACCEPTABLE, Drift, diff_plan, refusals
from formats.plan import Fingerprint, Plan
from gplan.errors import DriftError
from gplan.graphs.compiler import require_compiler
from gplan.graphs.machine import read_fingerprint
from gplan.graphs.variants import COMPILED
from gplan.kernels import kernels_class
from gplan.models import ModelSpec, read_headers, read_spec


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found.

    Attributes:
        drifts: every difference, advisory ones included.
        refused: those that stand against serving.
        accepted: those that would, had the user not accepted them by name.
    """

    spec: ModelSpec
    drifts: tuple[Drift, ...]
    refused: tuple[Drift, ...]
    accepted: tuple[Drift, ...]

    def require(self) -> None:
        """
        Raises:
            DriftError: names every refused field, planned and found.
        """
        if self.refused:
            lines = "\n".join(f"  {drift.sentence}" for drift in self.refused)
            raise DriftError(
                f"this is not what was planned for:\n{lines}", _remedy([drift.field for drift in self.refused])
            )


def _remedy(refused: Sequence[str]) -> str:
    again = "Plan again here: gplan plan CHECKPOINT -o FILE."
    never = [field for field in refused if field not in ACCEPTABLE]
    if never:
        return f"{again} ({', '.join(never)} cannot be accepted: it makes another deployment.)"
    return f"{again} Or accept it: {' '.join(f'--accept-drift {field}' for field in refused)}."


def inspect(plan: Plan, checkpoint: str, accept: Collection[str] = ()) -> Preflight:
    """Compares a plan with a checkpoint and with this machine; loads no weights.

    Raises:
        GplanError: the checkpoint cannot be read, or what the plan wants compiled cannot be here.
        UnknownFieldError: a name in `accept` that cannot be accepted.
    """
    headers = read_headers(checkpoint, hash_contents=bool(plan.model.content_digest))
    spec = read_spec(checkpoint, headers, plan.limits.max_len)
    fingerprint = _fingerprint_here(plan, spec)
    drifts = diff_plan(plan, headers.identity(spec), fingerprint)
    refused = refusals(drifts, accept)
    if not refused and _compiles(plan):
        require_compiler(torch.device(plan.fingerprint.device).type)
    accepted = tuple(drift for drift in refusals(drifts) if drift not in refused)
    return Preflight(spec, drifts, refused, accepted)


def _compiles(plan: Plan) -> bool:
    """Whether serving the plan has forwards compiled."""
    buckets = (*plan.decode.ladder, *plan.prefill.ladder)
    return plan.prefill.backend == "piecewise" or any(COMPILED in bucket.variant.split("+") for bucket in buckets)


def _fingerprint_here(plan: Plan, spec: ModelSpec) -> Fingerprint:
    """This machine as the plan would use it; where there is no such device, its CPU, which is then what differs."""
    device = torch.device(plan.fingerprint.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return read_fingerprint("cpu", "reference")
    kernels = kernels_class(plan.kernels)
    prefill_kernel = kernels.prefill_kernel(getattr(torch, plan.dtype), spec.head_dim, device)
    return read_fingerprint(device, plan.kernels, prefill_kernel, kernels.blas_version())
