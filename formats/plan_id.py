"""What makes two plans the same decisions: the plan id, and what of a machine it holds for."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from formats.plan import PLAN_FORMAT, Fingerprint, PhasePlan, Plan

MATCHED_FIELDS = ("device", "device_name", "capability", "tp_size", "prefill_kernel", "blas_version")
MATCHED_VERSIONS = ("torch", "cuda", "kernels_version")
"""What of a fingerprint must be the same for a plan to hold; of versions, major and minor."""


def matched_part(machine: Fingerprint) -> dict[str, str | int]:
    """What of a machine must be the same where the plan is served, by field; versions are cut to major and minor."""
    exact = {name: getattr(machine, name) for name in MATCHED_FIELDS}
    return exact | {name: _major_minor(getattr(machine, name)) for name in MATCHED_VERSIONS}


def plan_id(plan: Plan) -> str:
    """Names the decisions of a plan, as in `7k3m-x9qd-2f4h`: 60 bits of a sha256 in base 32 without i, l, o and u.

    Covers what serve acts on; not where the checkpoint lay, nor evidence: timings, ledger bytes other than the KV
    pool's pages, rejected backends, regrets, receipts, workload, reasons.
    """
    digest = hashlib.sha256(msgspec.json.encode(_decisions(plan), order="deterministic")).digest()
    number = int.from_bytes(digest[:8], "big") >> 4
    digits = [_BASE32[number >> shift & 31] for shift in range(55, -5, -5)]
    return "-".join("".join(digits[start : start + 4]) for start in (0, 4, 8))


_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


def _decisions(plan: Plan) -> dict[str, Any]:
    model = msgspec.structs.asdict(plan.model)
    del model["source"]
    return {
        "format": PLAN_FORMAT,
        "model": model,
        "machine": matched_part(plan.fingerprint),
        "kernels": plan.kernels,
        "dtype": plan.dtype,
        "limits": msgspec.structs.asdict(plan.limits),
        "num_kv_pages": plan.num_kv_pages,
        "phases": [_phase_decisions(phase) for phase in (plan.decode, plan.prefill)],
        "products": [(each.m, each.n, each.k, each.adds, each.algorithm) for each in plan.products],
        "locks": sorted((choice.field, choice.value) for choice in plan.choices if choice.basis == "locked"),
    }


def _phase_decisions(phase: PhasePlan) -> dict[str, Any]:
    return {
        "backend": phase.backend,
        "ladder": [(bucket.size, bucket.width, bucket.variant) for bucket in phase.ladder],
        "request_slots": phase.request_slots,
        "padding_cap": None if phase.padding_cap is None else phase.padding_cap + 0.0,
        "eager_sizes": phase.eager_sizes,
    }


def _major_minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`; a version in another form is taken whole."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return f"{match[1]}.{match[2]}" if match else version
