"""What differs between two plans, in three parts: decisions, evidence beyond its spread, machine.

Decisions are what `formats.plan_id` covers. Of the evidence, a time counts as different when its medians lie
further apart than either spread; capture times and what is computed from times (regrets, reasons) are left out, since
they have no spread to be compared with. Of the machine, free memory is left out: it is what happened to be free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from cli.effects import Effect, effects
from formats.drift import FINGERPRINT_GRADES
from formats.measurements import Timing
from formats.plan import LEDGER_ROWS, Bucket, Fingerprint, PhasePlan, Plan, bucket_key
from formats.plan_id import plan_id
from gplan.units import format_size

Value = str | int | float | bool | None


class Difference(msgspec.Struct, frozen=True):
    """One field that differs. `note` says how much, or how much it matters."""

    field: str
    a: Value
    b: Value
    note: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two plans, by id, all in which they differ, and what that costs or gains."""

    a: str
    b: str
    decisions: tuple[Difference, ...]
    effects: tuple[Effect, ...]
    evidence: tuple[Difference, ...]
    machine: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        return not (self.decisions or self.evidence or self.machine)


def compare(a: Plan, b: Plan) -> Comparison:
    return Comparison(
        a=plan_id(a),
        b=plan_id(b),
        decisions=tuple(_decisions(a, b)),
        effects=effects(a, b),
        evidence=tuple(_evidence(a, b)),
        machine=tuple(_machine(a.fingerprint, b.fingerprint)),
    )


def _decisions(a: Plan, b: Plan) -> Iterator[Difference]:
    yield from _fields("model", a.model, b.model, leave_out=("source",))
    yield from _values((("kernels", a.kernels, b.kernels), ("dtype", a.dtype, b.dtype)))
    yield from _fields("limits", a.limits, b.limits)
    yield from _values((("num_kv_pages", a.num_kv_pages, b.num_kv_pages),))
    for before, after in ((a.decode, b.decode), (a.prefill, b.prefill)):
        yield from _phase(before, after)
    yield from _products(a, b)
    yield from _values((("locks", _locks(a), _locks(b)),))


def _products(a: Plan, b: Plan) -> Iterator[Difference]:
    """In one line: how many shapes have an algorithm of their own, and how many have lost, got or changed it."""
    before, after = _algorithms(a), _algorithms(b)
    if before == after:
        return
    counts = (
        ("given back to the library", len(before.keys() - after.keys())),
        ("new", len(after.keys() - before.keys())),
        ("by another algorithm", sum(before[shape] != after[shape] for shape in before.keys() & after.keys())),
    )
    yield Difference(
        "products", len(before), len(after), ", ".join(f"{number} {what}" for what, number in counts if number)
    )


def _algorithms(plan: Plan) -> dict[tuple[int, int, int, bool], str]:
    return {(each.m, each.n, each.k, each.adds): each.algorithm for each in plan.products}


def _phase(a: PhasePlan, b: PhasePlan) -> Iterator[Difference]:
    yield from _values(((f"{a.phase}.backend", a.backend, b.backend),))
    keys = [[bucket_key(phase.phase, bucket) for bucket in phase.ladder] for phase in (a, b)]
    if keys[0] != keys[1]:
        yield Difference(f"{a.phase}.ladder", _ladder(a), _ladder(b), _changes(*keys))
    yield from _values(
        (
            (f"{a.phase}.request_slots", a.request_slots, b.request_slots),
            (f"{a.phase}.padding_cap", a.padding_cap, b.padding_cap),
            (f"{a.phase}.eager_sizes", _spans(a), _spans(b)),
        )
    )


def _evidence(a: Plan, b: Plan) -> Iterator[Difference]:
    yield from _values((("model.source", a.model.source, b.model.source),))
    for before, after in ((a.decode, b.decode), (a.prefill, b.prefill)):
        yield from _buckets(before, after)
        yield from _other_sizes(before, after)
        yield from _values(((f"{before.phase}.rejected", _rejected(before), _rejected(after)),))
    for name in LEDGER_ROWS:
        yield from _bytes(f"ledger.{name}", a.planned_bytes(name), b.planned_bytes(name))
    yield from _values((("kv_bytes_per_page", a.kv_bytes_per_page, b.kv_bytes_per_page),))
    yield from _values((("workload", a.workload.spec, b.workload.spec),))
    yield from _values((("workload.digest", a.workload.digest, b.workload.digest),))
    yield from _receipts(a, b)
    yield from _product_times(a, b)


def _bytes(field: str, a: int, b: int) -> Iterator[Difference]:
    if a != b:
        yield Difference(field, a, b, ("+" if b > a else "-") + format_size(abs(b - a)))


def _buckets(a: PhasePlan, b: PhasePlan) -> Iterator[Difference]:
    """Times and bytes of the buckets that both have."""
    after = {bucket_key(b.phase, bucket): bucket for bucket in b.ladder}
    for bucket in a.ladder:
        key = bucket_key(a.phase, bucket)
        if key in after:
            yield from _bucket(key, bucket, after[key])


def _bucket(key: str, a: Bucket, b: Bucket) -> Iterator[Difference]:
    yield from _timing(f"{key} graph_us", a.graph, b.graph)
    yield from _timing(f"{key} eager_us", a.eager, b.eager)
    yield from _bytes(f"{key} graph_bytes", a.graph_bytes, b.graph_bytes)
    yield from _values(
        (
            (f"{key} num_segments", a.num_segments, b.num_segments),
            (f"{key} interpolated", a.interpolated, b.interpolated),
        )
    )


def _other_sizes(a: PhasePlan, b: PhasePlan) -> Iterator[Difference]:
    """Times of sizes that are a bucket of neither but that both have measured."""
    after = {entry.size: entry for entry in b.other_sizes}
    for entry in a.other_sizes:
        if entry.size in after:
            other = after[entry.size]
            yield from _timing(f"{a.phase} size {entry.size} graph_us", entry.graph, other.graph)
            yield from _timing(f"{a.phase} size {entry.size} eager_us", entry.eager, other.eager)


def _timing(field: str, a: Timing | None, b: Timing | None) -> Iterator[Difference]:
    if a is not None and b is not None and beyond_spread(a, b):
        yield Difference(field, a.median_us, b.median_us, f"{b.median_us / a.median_us - 1:+.1%}")


def beyond_spread(a: Timing, b: Timing) -> bool:
    """Whether two medians lie further apart than either was spread."""
    return abs(a.median_us - b.median_us) > max(a.spread_us, b.spread_us)


def _receipts(a: Plan, b: Plan) -> Iterator[Difference]:
    after = {receipt.key: receipt for receipt in b.receipts}
    for receipt in a.receipts:
        if receipt.key in after:
            pair = receipt.max_abs_diff, after[receipt.key].max_abs_diff
            yield from _values(((f"receipt {receipt.key} max_abs_diff", *pair),))


def _product_times(a: Plan, b: Plan) -> Iterator[Difference]:
    """Of products that both plans have by the same algorithm."""
    after = {(each.m, each.n, each.k, each.adds, each.algorithm): each for each in b.products}
    for each in a.products:
        other = after.get((each.m, each.n, each.k, each.adds, each.algorithm))
        if other is not None:
            name = f"product {each.m} x {each.n} x {each.k}{' added' if each.adds else ''}"
            yield from _timing(f"{name} chosen_us", each.chosen, other.chosen)
            yield from _timing(f"{name} default_us", each.default, other.default)


def _machine(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    for difference in _fields("", a, b, leave_out=("free_memory",)):
        yield msgspec.structs.replace(difference, note=str(FINGERPRINT_GRADES[difference.field]))


def _fields(prefix: str, a: msgspec.Struct, b: msgspec.Struct, leave_out: tuple[str, ...] = ()) -> Iterator[Difference]:
    names = [name for name in a.__struct_fields__ if name not in leave_out]
    dotted = f"{prefix}." if prefix else ""
    yield from _values((f"{dotted}{name}", getattr(a, name), getattr(b, name)) for name in names)


def _values(triples: Iterable[tuple[str, Value, Value]]) -> Iterator[Difference]:
    yield from (Difference(field, a, b) for field, a, b in triples if a != b)


def _ladder(phase: PhasePlan) -> str:
    return ",".join(bucket_key(phase.phase, bucket).partition(":")[2] for bucket in phase.ladder)


def _changes(a: list[str], b: list[str]) -> str:
    """The buckets that went and came: `-32 +48`."""
    names = [("-", key) for key in a if key not in b] + [("+", key) for key in b if key not in a]
    return " ".join(sign + key.partition(":")[2] for sign, key in names)


def _spans(phase: PhasePlan) -> str:
    return ",".join(f"{first}-{last}" for first, last in phase.eager_sizes)


def _rejected(phase: PhasePlan) -> str:
    return ",".join(sorted(rejection.backend for rejection in phase.rejected))


def _locks(plan: Plan) -> str:
    return ", ".join(sorted(f"{choice.field}={choice.value}" for choice in plan.choices if choice.basis == "locked"))
