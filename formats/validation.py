"""What the fields of a plan must say together. Types are checked before, by msgspec; machines are `drift`'s matter.

One sentence per inconsistency, naming the field. GPLAN.md lists the same rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from formats.errors import InconsistentError
from formats.paths import is_field, path_text, value_at
from formats.plan import BASE_VARIANTS, DRAW_VARIANTS, LEDGER_ROWS, Bucket, PhasePlan, Plan, bucket_key

_HINT = "Make the plan again: gplan plan CHECKPOINT -o FILE"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ALGORITHM = re.compile(r"[0-9a-f]{128}")
_ABSOLUTE = re.compile(r"/|~[^/ ]*/|\\\\|file:|[A-Za-z]:[\\/]")
_LARGEST = 2**63 - 1
_FEW = 20

_MAY_BE_NEGATIVE = frozenset({"regret"})
_AT_LEAST_ONE = (
    "model.num_parameters",
    "model.num_layers",
    "model.vocab_size",
    "fingerprint.device_count",
    "fingerprint.tp_size",
    "limits.max_batch",
    "limits.max_len",
    "limits.chunk",
    "limits.page_size",
    "limits.memory_bytes",
    "kv_bytes_per_page",
)
_NOT_EMPTY = (
    "model.source",
    "model.architecture",
    "model.dtype",
    "fingerprint.device_name",
    "fingerprint.torch",
    "dtype",
)

_DIGESTS = (
    "model.config_digest",
    "model.headers_digest",
    "model.content_digest",
    "model.tokenizer_digest",
    "model.chat_template_digest",
    "model.generation_digest",
    "workload.digest",
)

Problem = tuple[str, str]
"""Path of the field, and what is wrong with it."""


def validate(plan: Plan) -> None:
    """Raises InconsistentError for the first inconsistency of the plan, if there is one."""
    for path, problem in problems(plan):
        raise InconsistentError(f"{path}: {problem}", _HINT, path)


def problems(plan: Plan) -> Iterator[Problem]:
    """Every inconsistency of the plan. Later ones may follow from earlier ones."""
    yield from _values(plan)
    yield from _identity(plan)
    yield from _limits(plan)
    yield from _phase(plan.decode, "decode", plan.limits.max_batch, "limits.max_batch", plan)
    yield from _phase(plan.prefill, "prefill", plan.limits.chunk, "limits.chunk", plan)
    yield from _ledger(plan)
    yield from _choices(plan)
    yield from _workload(plan)
    yield from _evidence(plan)
    yield from _products(plan)


def _values(plan: Plan) -> list[Problem]:
    """What holds for every number and text wherever it stands; the first few that do not."""
    found: list[Problem] = []
    _walk(plan, [], found)
    return found


def _walk(value: Any, path: list[str | int], found: list[Problem]) -> None:
    """Adds to `found`. One pass over what may be a million values: a path becomes text only where it is needed."""
    kind = type(value)
    if kind is int or kind is float:
        if not 0 <= value <= _LARGEST and len(found) < _FEW:
            found.extend(_number(value, path))
    elif kind is tuple:
        path.append(0)
        for path[-1], item in enumerate(value):
            _walk(item, path, found)
        path.pop()
    elif kind is str:
        if _ABSOLUTE.match(value) and len(found) < _FEW:
            found.append((path_text(path), "is an absolute path; a plan holds none"))
    elif isinstance(value, msgspec.Struct):
        path.append("")
        for name in value.__struct_fields__:
            path[-1] = name
            _walk(getattr(value, name), path, found)
        path.pop()


def _number(value: float, path: list[str | int]) -> Iterator[Problem]:
    if not math.isfinite(value):
        yield path_text(path), f"{value} is not a finite number"
    elif value < 0 and path[-1] not in _MAY_BE_NEGATIVE:
        yield path_text(path), f"{value} is negative"
    elif value > _LARGEST:
        yield path_text(path), "is larger than 64 bits hold"


def _identity(plan: Plan) -> Iterator[Problem]:
    for path in _AT_LEAST_ONE:
        if value_at(plan, path) == 0:
            yield path, "is 0; it is at least 1"
    for path in _NOT_EMPTY:
        if not value_at(plan, path):
            yield path, "is empty"
    for path in _DIGESTS:
        digest = value_at(plan, path)
        may_be_empty = path not in ("model.config_digest", "model.headers_digest")
        if not _SHA256.fullmatch(digest) and not (may_be_empty and not digest):
            yield path, "is not a sha256 in lower-case hexadecimal"
    machine = plan.fingerprint
    if machine.tp_size > machine.device_count:
        yield "fingerprint.tp_size", f"{machine.tp_size} is more than the {machine.device_count} devices"
    if machine.free_memory > machine.device_memory:
        yield "fingerprint.free_memory", "is more than device_memory"
    if plan.kernels == "flashinfer" and machine.device != "cuda":
        yield "kernels", f"flashinfer does not run on {machine.device}"
    if (plan.kernels == "flashinfer") != bool(machine.kernels_version):
        yield "fingerprint.kernels_version", f"{machine.kernels_version!r} does not go with {plan.kernels} kernels"
    if (plan.kernels == "flashinfer") != bool(machine.prefill_kernel):
        yield "fingerprint.prefill_kernel", f"{machine.prefill_kernel!r} does not go with {plan.kernels} kernels"
    if plan.kernels != "flashinfer" and machine.blas_version:
        yield "fingerprint.blas_version", f"{machine.blas_version!r} does not go with {plan.kernels} kernels"


def _limits(plan: Plan) -> Iterator[Problem]:
    limits = plan.limits
    if limits.chunk < limits.max_batch:
        yield "limits.chunk", f"{limits.chunk} is less than max_batch {limits.max_batch}; a step holds a token of each"
    if limits.memory_bytes > plan.fingerprint.device_memory:
        yield "limits.memory_bytes", f"{limits.memory_bytes} is more than the device has"
    if limits.page_size < 1:
        return
    pages = -(-limits.max_len // limits.page_size)
    if plan.num_kv_pages - 1 < pages:
        yield (
            "num_kv_pages",
            f"{plan.num_kv_pages} pages, one of them the dummy, do not hold one request of max_len {limits.max_len} "
            f"({pages} pages of {limits.page_size})",
        )


def _phase(phase: PhasePlan, name: str, maximum: int, maximum_path: str, plan: Plan) -> Iterator[Problem]:
    if phase.phase != name:
        yield f"{name}.phase", f"says {phase.phase}"
    if phase.max_size != maximum:
        yield f"{name}.max_size", f"{phase.max_size} is not {maximum_path} {maximum}"
    yield from _ladder(phase, name)
    yield from _variants(phase, name)
    yield from _notes(phase, name)
    yield from _slots(phase, name, plan.limits.max_batch)
    yield from _eager_sizes(phase, f"{name}.eager_sizes")
    yield from _measured(phase, name, plan.limits.max_batch)
    rejected = [rejection.backend for rejection in phase.rejected]
    for index, backend in enumerate(rejected):
        if backend == phase.backend or backend in rejected[:index]:
            why = "is the chosen backend" if backend == phase.backend else "is rejected twice"
            yield f"{name}.rejected[{index}].backend", f"{backend} {why}"


def _ladder(phase: PhasePlan, name: str) -> Iterator[Problem]:
    path, ladder = f"{name}.ladder", phase.ladder
    if phase.backend == "eager":
        if ladder:
            yield path, f"has {len(ladder)} buckets, but the phase is eager"
        return
    if not ladder:
        yield path, f"is empty, but the phase is captured with {phase.backend}"
        return
    for index, bucket in enumerate(ladder):
        if not 1 <= bucket.size <= phase.max_size:
            yield f"{path}[{index}].size", f"{bucket.size} is outside 1 to max_size {phase.max_size}"
        if bucket.width != 1 and (name == "prefill" or bucket.width == 0):
            yield f"{path}[{index}].width", f"{bucket.width} tokens per request; prefill has 1, decode at least 1"
    for index in range(1, len(ladder)):
        before, after = _order(ladder[index - 1]), _order(ladder[index])
        if before == after:
            yield f"{path}[{index}]", f"repeats {bucket_key(phase.phase, ladder[index])}"
        elif before > after:
            yield f"{path}[{index}]", "is out of order: a ladder ascends by size, width and variant"
    if max(bucket.size for bucket in ladder) != phase.max_size:
        yield path, f"lacks its maximum {phase.max_size}"


def _order(bucket: Bucket) -> tuple[int, int, str]:
    return bucket.size, bucket.width, bucket.variant


def _variants(phase: PhasePlan, name: str) -> Iterator[Problem]:
    bases = [(bucket.size, bucket.width) for bucket in phase.base_ladder]
    for index, bucket in enumerate(phase.ladder):
        path, shape = f"{name}.ladder[{index}].variant", (bucket.size, bucket.width)
        if not _may_have(phase, bucket.variant):
            yield path, f"{bucket.variant!r} is no variant of {name} captured with {phase.backend}"
        elif bases.count(shape) != 1:
            found = "none" if shape not in bases else "more than one"
            yield path, f"of a bucket of {bucket.size} exactly one variant takes every batch; there is {found}"


def _notes(phase: PhasePlan, name: str) -> Iterator[Problem]:
    for index, note in enumerate(phase.variants):
        having = (b.size for b in phase.ladder if b.width == 1 and note.variant in b.variant.split("+"))
        found = tuple(dict.fromkeys(having))
        if note.sizes != found:
            yield f"{name}.variants[{index}].sizes", f"{note.variant} is of {list(found)} on the ladder"


def _may_have(phase: PhasePlan, variant: str) -> bool:
    base, _, special = variant.rpartition("+")
    if special in BASE_VARIANTS:
        return not base and (not special or phase.backend != "piecewise")
    if base not in BASE_VARIANTS:
        return False
    if special in DRAW_VARIANTS:
        return phase.phase == "decode" and phase.backend == "full"
    return special == "full" and not base and phase.phase == "prefill" and phase.backend in ("breakable", "piecewise")


def _slots(phase: PhasePlan, name: str, max_batch: int) -> Iterator[Problem]:
    holds_attention = phase.backend == "full" or any(bucket.variant == "full" for bucket in phase.ladder)
    wanted = name == "prefill" and holds_attention
    if wanted and not 1 <= phase.request_slots <= max_batch:
        yield f"{name}.request_slots", f"{phase.request_slots} is outside 1 to max_batch {max_batch}"
    if not wanted and phase.request_slots:
        yield f"{name}.request_slots", "is set, but only prefill captured with full has request slots"


def _eager_sizes(phase: PhasePlan, path: str) -> Iterator[Problem]:
    if phase.backend == "eager" and phase.eager_sizes:
        yield path, "is set, but the phase is eager throughout"
    end = -1
    for index, (first, last) in enumerate(phase.eager_sizes):
        if not 1 <= first <= last <= phase.max_size:
            yield f"{path}[{index}]", f"{first} to {last} is not a range within 1 to max_size {phase.max_size}"
        elif first <= end + 1:
            yield f"{path}[{index}]", "touches the range before it, or is out of order"
        end = last


def _measured(phase: PhasePlan, name: str, max_batch: int) -> Iterator[Problem]:
    """Times beside those of the ladder."""
    buckets = {bucket.size for bucket in phase.base_ladder if bucket.width == 1}
    for index, entry in enumerate(phase.other_sizes):
        path = f"{name}.other_sizes[{index}]"
        if entry.size in buckets:
            yield path, f"{entry.size} is a bucket"
        if entry.graph is None and entry.eager is None:
            yield path, "has no time"
    yield from _ascending([entry.size for entry in phase.other_sizes], f"{name}.other_sizes", phase.max_size)
    for index, prediction in enumerate(phase.predictions):
        if not 1 <= prediction.size <= phase.max_size:
            yield f"{name}.predictions[{index}].size", f"{prediction.size} is outside 1 to max_size {phase.max_size}"
        if not prediction.measured_us:
            yield f"{name}.predictions[{index}].measured_us", "is 0; nothing takes no time"
    for index, timed in enumerate(phase.costs.contexts):
        if not 1 <= timed.size <= phase.max_size:
            yield f"{name}.costs.contexts[{index}].size", f"{timed.size} is outside 1 to max_size {phase.max_size}"
    for field in ("cached_us", "rows_us", "beyond_us"):
        known = [requests for requests, _ in getattr(phase.costs, field)]
        yield from _ascending(known, f"{name}.costs.{field}", max_batch)


def _ledger(plan: Plan) -> Iterator[Problem]:
    names = [row.name for row in plan.ledger]
    for index, name in enumerate(names):
        if name not in LEDGER_ROWS:
            yield f"ledger[{index}].name", f"unknown row {name!r}"
        elif name in names[:index]:
            yield f"ledger[{index}].name", f"row {name} is there twice"
    for name in LEDGER_ROWS:
        if name not in names:
            yield "ledger", f"row {name} is missing"
    if set(names) != set(LEDGER_ROWS) or len(names) != len(LEDGER_ROWS):
        return
    if tuple(names) != LEDGER_ROWS:
        yield "ledger", f"rows are out of order; the order is {', '.join(LEDGER_ROWS)}"
    planned = {row.name: (f"ledger[{index}].planned_bytes", row.planned_bytes) for index, row in enumerate(plan.ledger)}
    path, nbytes = planned["kv_pool"]
    if nbytes != plan.num_kv_pages * plan.kv_bytes_per_page:
        yield path, f"kv_pool is {nbytes}, not {plan.num_kv_pages} pages of {plan.kv_bytes_per_page} bytes"
    for phase in (plan.decode, plan.prefill):
        path, nbytes = planned[f"graph_pool_{phase.phase}"]
        if phase.backend == "eager" and nbytes:
            yield path, f"{nbytes} bytes for graphs of {phase.phase}, which is eager"
    total = sum(nbytes for _, nbytes in planned.values())
    if total != plan.limits.memory_bytes:
        yield "ledger", f"rows add up to {total}, not to limits.memory_bytes {plan.limits.memory_bytes}"


def _choices(plan: Plan) -> Iterator[Problem]:
    fields = [choice.field for choice in plan.choices]
    for index, choice in enumerate(plan.choices):
        path = f"choices[{index}]"
        value = value_at(plan, choice.field)
        if value is None and not is_field(choice.field):
            yield f"{path}.field", f"the plan has no field {choice.field!r}"
        elif choice.field in fields[:index]:
            yield f"{path}.field", f"{choice.field} is chosen twice"
        elif isinstance(value, str | int) and str(value) != choice.value:
            yield f"{path}.value", f"says {choice.value!r}, but {choice.field} is {str(value)!r}"


def _workload(plan: Plan) -> Iterator[Problem]:
    workload = plan.workload
    if workload.digest and not workload.num_requests:
        yield "workload.num_requests", "is 0, but a trace was simulated"
    yield from _steps(workload.decode_steps, "workload.decode_steps", plan.limits.max_batch)
    yield from _steps(workload.prefill_steps, "workload.prefill_steps", plan.limits.chunk)


def _steps(steps: Sequence[tuple[int, int]], path: str, maximum: int) -> Iterator[Problem]:
    yield from _ascending([size for size, _ in steps], path, maximum)


def _ascending(sizes: Sequence[int], path: str, maximum: int) -> Iterator[Problem]:
    previous = 0
    for index, size in enumerate(sizes):
        if not 1 <= size <= maximum:
            yield f"{path}[{index}]", f"size {size} is outside 1 to {maximum}"
        elif size <= previous:
            yield f"{path}[{index}]", f"size {size} does not follow {previous}: sizes ascend"
        previous = size


def _evidence(plan: Plan) -> Iterator[Problem]:
    keys = {bucket_key(phase.phase, bucket) for phase in (plan.decode, plan.prefill) for bucket in phase.ladder}
    seen: set[str] = set()
    for index, receipt in enumerate(plan.receipts):
        path = f"receipts[{index}]"
        if receipt.key not in keys:
            yield f"{path}.key", f"{receipt.key!r} is on no ladder"
        elif receipt.key in seen:
            yield f"{path}.key", f"{receipt.key} has two receipts"
        if receipt.bitwise and receipt.max_abs_diff:
            yield f"{path}.bitwise", f"is true, but max_abs_diff is {receipt.max_abs_diff}"
        if not receipt.cases:
            yield f"{path}.cases", "is 0; a receipt is of at least one case"
        seen.add(receipt.key)
    for index, regret in enumerate(plan.regrets):
        if regret.regret <= -1:
            yield f"regrets[{index}].regret", f"{regret.regret} is -1 or less: no time can be saved beyond all of it"


def _products(plan: Plan) -> Iterator[Problem]:
    if plan.products and not plan.fingerprint.blas_version:
        yield "products", "name algorithms, but fingerprint.blas_version does not say of what"
    previous = (0, 0, 0, False)
    for index, product in enumerate(plan.products):
        path, shape = f"products[{index}]", (product.m, product.n, product.k, product.adds)
        if not 1 <= product.m <= plan.limits.chunk:
            yield f"{path}.m", f"{product.m} rows are outside 1 to limits.chunk {plan.limits.chunk}"
        if not product.n or not product.k:
            yield path, "has no results or no columns"
        if shape <= previous:
            yield path, f"{shape} does not follow {previous}: products ascend by m, n, k and adds"
        if not _ALGORITHM.fullmatch(product.algorithm):
            yield f"{path}.algorithm", "is not 64 bytes in lower-case hexadecimal"
        if product.chosen.median_us >= product.default.median_us:
            yield f"{path}.chosen", "is no faster than the library's own choice"
        previous = shape
