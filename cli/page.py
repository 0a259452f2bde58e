"""A plan as a page for people: what `gplan show` prints. Written from a `PlanView` alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from cli.drawing import drawn
from cli.text import columns, count, quantity, section, short
from cli.views import NOISY, PlanView, spread_of
from formats.measurements import Costs, Timing
from formats.plan import Bucket, Fingerprint, PhasePlan, Plan, ProductChoice
from gplan.units import format_size


def plan_page(view: PlanView, why: bool = False) -> str:
    """The page. `why` adds the reason of every value, with what it rests on."""
    plan = view.plan
    lines = [
        *section("plan", [view.plan_id]),
        *section("model", _model(plan)),
        *section("machine", [*_machine(plan.fingerprint), *_noise(plan)]),
        *section("limits", _limits(plan)),
        "",
        *section("decode", _phase(plan, plan.decode, "requests")),
        "",
        *section("prefill", _phase(plan, plan.prefill, "tokens")),
        "",
        *section("memory", _memory(view)),
        "",
        *_products(plan),
        *section("workload", _workload(plan)),
        *section("regret", _regrets(plan)),
        *section("receipts", _receipts(plan)),
    ]
    if why:
        lines += ["", *section("why", _choices(plan))]
        if plan.products:
            lines += ["", *section("products", _product_times(plan.products))]
    return "\n".join(lines)


def _model(plan: Plan) -> Iterator[str]:
    model = plan.model
    yield model.source
    yield (
        f"{model.architecture}, {quantity(model.num_parameters)} parameters, {count(model.num_layers, 'layer')}, "
        f"stored as {model.dtype}, run as {plan.dtype} with {plan.kernels} kernels"
    )
    hashed = f"contents {model.content_digest[:12]}" if model.content_digest else "contents not hashed"
    yield f"config {model.config_digest[:12]}, tensor headers {model.headers_digest[:12]}, {hashed}"
    parts = (
        ("tokenizer", model.tokenizer_digest),
        ("chat template", model.chat_template_digest),
        ("generation config", model.generation_digest),
    )
    yield ", ".join(f"{name} {digest[:12]}" if digest else f"no {name}" for name, digest in parts)


def _machine(found: Fingerprint) -> Iterator[str]:
    parts = [found.device, found.capability]
    if found.device == "cpu":
        parts.append(count(found.num_threads, "thread"))
    memory = f"{format_size(found.device_memory)}, of which {format_size(found.free_memory)} free"
    yield f"{found.device_name} ({', '.join(parts)}), {memory}"
    named = (
        ("torch", found.torch),
        ("CUDA", found.cuda),
        ("driver", found.driver),
        ("triton", found.triton),
        ("flashinfer", found.kernels_version),
        ("transformers", found.transformers),
        ("python", found.python),
    )
    yield ", ".join([*(f"{name} {version}" for name, version in named if version), found.os])


def _noise(plan: Plan) -> Iterator[str]:
    spread = spread_of(plan)
    if spread > NOISY:
        yield f"times spread by {spread:.0%}: something else kept it busy; what was decided on them may be wrong"


def _limits(plan: Plan) -> Iterator[str]:
    limits = plan.limits
    yield (
        f"{count(limits.max_batch, 'request')} at once, {count(limits.max_len, 'token')} each, "
        f"{count(limits.chunk, 'token')} a step, {format_size(limits.memory_bytes)} of memory"
        + ("" if limits.prefix_cache else ", no prefix cache")
    )


def _phase(plan: Plan, phase: PhasePlan, unit: str) -> Iterator[str]:
    reason = next((f": {choice.reason} ({choice.basis})" for choice in plan.choices if _chose(choice.field, phase)), "")
    yield phase.backend + reason
    for rejection in phase.rejected:
        yield f"not {rejection.backend}: {rejection.reason}"
    if phase.ladder:
        yield from _ladder(phase, unit)
        if any(bucket.interpolated for bucket in phase.ladder):
            yield "~ read off its neighbours, not measured"
    if phase.request_slots:
        which = "every graph" if phase.backend == "full" else "graphs of variant full"
        yield f"{count(phase.request_slots, 'request slot')} in {which}"
    for note in phase.variants:
        sizes = ", ".join(map(str, note.sizes))
        yield (f"variant {note.variant} at {sizes}: " if sizes else f"no variant {note.variant}: ") + note.reason
    if phase.padding_cap is not None:
        yield f"replayed only where padding adds at most {phase.padding_cap:.0%} of the rows"
    if phase.eager_sizes:
        yield f"eager although covered: {', '.join(_span(*span) for span in phase.eager_sizes)} {unit}"
    yield from _predictions(phase, unit)
    yield from _costs(phase.costs, plan.limits.max_len)
    steps = plan.workload.decode_steps if phase.phase == "decode" else plan.workload.prefill_steps
    if steps:
        yield ""
        yield from drawn(steps, [bucket.size for bucket in phase.base_ladder], phase.max_size, unit)


def _predictions(phase: PhasePlan, unit: str) -> Iterator[str]:
    """How well times between measured sizes are known."""
    if not phase.predictions:
        return
    errors = sorted((abs(p.predicted_us / p.measured_us - 1), p.size) for p in phase.predictions)
    worst, size = errors[-1]
    middle = errors[len(errors) // 2][0]
    yield (
        f"{count(len(errors), 'time')} between measured sizes foretold, then measured: off by {middle:.1%} in the "
        f"middle, {worst:.1%} at most ({size} {unit})"
    )


def _costs(costs: Costs, max_len: int) -> Iterator[str]:
    """What steps take beside what their size says, of 1,000 tokens or as many as a request may have."""
    cached, half = min(1000, max_len - 1), min(1000, max_len // 2)
    if costs.cached_us:
        timed = f"; sizes were timed at {count(costs.context, 'token')} each" if costs.context else ""
        slopes = ", ".join(f"{short(us * cached)} µs at {count(n, 'request')}" for n, us in costs.cached_us)
        yield f"{count(cached, 'cached token')} more for a request that decodes: {slopes}{timed}"
    if len(costs.rows_us) > 1:
        (few, least), (many, most) = costs.rows_us[0], costs.rows_us[-1]
        yield f"a step of {count(few, 'request')} replayed for {many}: {short(most - least)} µs less than one of {many}"
    if costs.pair_us:
        more = f"{short(costs.pair_us * half * half)} µs more than alone"
        yield f"{count(half, 'token')} of a prompt after {half:,} others: {more}"
    if costs.beyond_us:
        around = ", ".join(f"{short(us)} µs at {count(n, 'request')}" for n, us in costs.beyond_us)
        yield f"beyond the forward, step after step: {around}; before it on the host: {short(costs.host_us)} µs"


def _chose(field: str, phase: PhasePlan) -> bool:
    return field == f"{phase.phase}.backend"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _ladder(phase: PhasePlan, unit: str) -> list[str]:
    header = (unit, "graph µs", "spread", "eager µs", "spread", "speedup", "segments", "graph", "capture")
    return columns(header, [_bucket(bucket) for bucket in phase.ladder], left=0)


def _bucket(bucket: Bucket) -> tuple[str, ...]:
    name = (
        str(bucket.size) + (f"x{bucket.width}" if bucket.width != 1 else "") + (bucket.variant and f":{bucket.variant}")
    )
    graph = _timing(bucket.graph) if bucket.graph else ("", "")
    speedup = f"{bucket.eager.median_us / bucket.graph.median_us:.2f}x" if bucket.graph else ""
    return (
        name,
        *graph,
        *_timing(bucket.eager),
        ("~" if bucket.interpolated else "") + speedup,
        str(bucket.num_segments),
        format_size(bucket.graph_bytes),
        f"{short(bucket.capture_ms)} ms",
    )


def _timing(timing: Timing) -> tuple[str, str]:
    return short(timing.median_us), short(timing.spread_us)


def _memory(view: PlanView) -> Iterator[str]:
    plan, total = view.plan, view.ledger_total
    rows = [
        (row.name, format_size(row.planned_bytes), f"{row.planned_bytes / total:.1%}", row.basis) for row in plan.ledger
    ]
    table = columns(("row", "planned", "share"), [row[:3] for row in rows])
    yield table[0]
    for line, row in zip(table[1:], rows, strict=True):
        yield f"{line}  {row[3]}"
    yield f"adds up to {format_size(total)} ({total:,} bytes)"
    page = (
        f"{count(plan.num_kv_pages - 1, 'page')} of {count(plan.limits.page_size, 'token')}, "
        f"{format_size(plan.kv_bytes_per_page)} each; and the dummy page"
    )
    yield f"KV pool: {count(view.kv_tokens, 'token')} ({page}), {count(view.full_requests, 'request')} at full length"


def _workload(plan: Plan) -> Iterator[str]:
    workload = plan.workload
    if not workload.num_requests:
        yield workload.spec
        return
    steps = [
        count(sum(number for _, number in steps), f"{name} step")
        for name, steps in (("decode", workload.decode_steps), ("prefill", workload.prefill_steps))
    ]
    digest = f", digest {workload.digest[:12]}" if workload.digest else ""
    yield f"{workload.spec}: {count(workload.num_requests, 'request')}, {', '.join(steps)}{digest}"


def _regrets(plan: Plan) -> list[str]:
    rows = [
        (
            entry.phase,
            entry.ladder,
            entry.workload,
            str(entry.num_buckets),
            f"{entry.regret:.2%}",
            f"{short(entry.padding_ms)} ms",
        )
        for entry in plan.regrets
    ]
    if not rows:
        return []
    table = columns(("phase", "ladder", "workload", "buckets", "regret", "padding"), rows, left=3)
    return [*table, *_as_good(plan)]


def _as_good(plan: Plan) -> Iterator[str]:
    """Fixed ladders that do as well as this plan's for some traffic."""
    own = {(entry.phase, entry.workload): entry for entry in plan.regrets if entry.ladder == "gplan"}
    for entry in plan.regrets:
        ours = own.get((entry.phase, entry.workload))
        if ours is not None and entry is not ours and entry.regret <= ours.regret:
            buckets = f"{count(entry.num_buckets, 'bucket')} against {ours.num_buckets}"
            yield f"as good or better for {entry.phase}, {entry.workload}: {entry.ladder}, {buckets}"


def _receipts(plan: Plan) -> Iterator[str]:
    if not plan.receipts:
        return
    exact = sum(receipt.bitwise for receipt in plan.receipts)
    cases = sum(receipt.cases for receipt in plan.receipts)
    yield f"{exact} of {count(len(plan.receipts), 'key')} equal eager to the bit, over {count(cases, 'case')}"
    for receipt in plan.receipts:
        if not receipt.bitwise:
            yield f"{receipt.key}: differs by at most {receipt.max_abs_diff:.3g}"


def _products(plan: Plan) -> list[str]:
    """Matrix products by an algorithm that was chosen; no section where there was no choice."""
    reasons = [choice.reason for choice in plan.choices if choice.field == "products"]
    return section("products", reasons) if reasons else []


def _product_times(products: Sequence[ProductChoice]) -> list[str]:
    rows = [
        (
            str(product.m),
            f"{product.n} x {product.k}" + (", added" if product.adds else ""),
            *_timing(product.default),
            *_timing(product.chosen),
            f"{product.chosen.median_us / product.default.median_us - 1:+.1%}",
            hashlib.sha256(product.algorithm.encode()).hexdigest()[:8],
        )
        for product in products
    ]
    header = ("rows", "weight", "library µs", "spread", "chosen µs", "spread", "", "algorithm")
    return columns(header, rows, left=0)


def _choices(plan: Plan) -> Iterator[str]:
    for choice in plan.choices:
        yield f"{choice.field} = {choice.value} ({choice.basis}): {choice.reason}"
