"""A small valid plan for tests: consistent whatever sizes and backends are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from formats.measurements import Timing
from formats.plan import (
    LEDGER_ROWS,
    BackendName,
    Bucket,
    Choice,
    Fingerprint,
    LedgerRow,
    Limits,
    ModelIdentity,
    PhaseName,
    PhasePlan,
    Plan,
    ProductChoice,
    Receipt,
    Regret,
    Rejection,
    Workload,
)

MIB = 1 << 20

MODEL = ModelIdentity(
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    config_digest=hashlib.sha256(b"config").hexdigest(),
    headers_digest=hashlib.sha256(b"headers").hexdigest(),
    tokenizer_digest=hashlib.sha256(b"tokenizer").hexdigest(),
    chat_template_digest=hashlib.sha256(b"template").hexdigest(),
    generation_digest="",
    num_parameters=134_515_008,
    num_layers=30,
    vocab_size=49_152,
)

CPU = Fingerprint(
    device="cpu",
    device_name="AMD EPYC 9R14",
    capability="avx512",
    device_count=1,
    tp_size=1,
    device_memory=16 << 30,
    free_memory=12 << 30,
    num_threads=2,
    driver="",
    torch="2.13.0+cpu",
    cuda="",
    triton="",
    transformers="5.24.0",
    kernels_version="",
    python="3.11.7",
    os="Linux 6.8.0",
    clocks_mhz=0,
)

CUDA = Fingerprint(
    device="cuda",
    device_name="NVIDIA H200",
    capability="9.0",
    device_count=1,
    tp_size=1,
    device_memory=139 << 30,
    free_memory=138 << 30,
    num_threads=0,
    driver="570.133.20",
    torch="2.13.0+cu130",
    cuda="13.0",
    triton="3.7.0",
    transformers="5.24.0",
    kernels_version="0.6.18",
    prefill_kernel="fa3",
    blas_version="130101",
    python="3.11.7",
    os="Linux 6.8.0",
    clocks_mhz=1980,
)


def make_bucket(size: int, *, width: int = 1, variant: str = "", captured: bool = True) -> Bucket:
    eager = Timing(median_us=900.0 + 4 * size, spread_us=12.5, runs=20)
    if not captured:
        return Bucket(size=size, width=width, variant=variant, eager=eager)
    graph = Timing(median_us=400.0 + 4 * size, spread_us=3.25, runs=20)
    return Bucket(
        size=size,
        width=width,
        variant=variant,
        graph=graph,
        eager=eager,
        graph_bytes=64 * 1024,
        capture_ms=11.5,
        num_segments=1,
    )


def make_phase(
    phase: PhaseName, backend: BackendName, sizes: Sequence[int], max_size: int, request_slots: int = 0, **fields: Any
) -> PhasePlan:
    """One phase with its ladder; an eager phase has none, whatever `sizes` says. `fields` replace what was made."""
    made = PhasePlan(
        phase=phase,
        backend=backend,
        max_size=max_size,
        ladder=() if backend == "eager" else tuple(make_bucket(size) for size in sizes),
        request_slots=request_slots,
        rejected=() if backend == "eager" else (Rejection(backend="eager", reason="slower at every size"),),
    )
    return msgspec.structs.replace(made, **fields)


def make_product(m: int = 32, n: int = 4096, k: int = 4096, adds: bool = False, **fields: Any) -> ProductChoice:
    """A product whose chosen algorithm saves a tenth; `fields` replace what was made."""
    made = ProductChoice(
        m=m,
        n=n,
        k=k,
        adds=adds,
        algorithm="0f" * 64,
        chosen=Timing(median_us=18.0, spread_us=0.1, runs=6),
        default=Timing(median_us=20.0, spread_us=0.1, runs=6),
    )
    return msgspec.structs.replace(made, **fields)


def make_ledger(memory_bytes: int, kv_bytes: int, **planned: int) -> tuple[LedgerRow, ...]:
    """Rows that add up to `memory_bytes`: those not named get a small figure, headroom what remains."""
    rows = dict.fromkeys(LEDGER_ROWS, 2 * MIB) | {"non_torch": 0, "kv_pool": kv_bytes} | planned
    rows["headroom"] = memory_bytes - sum(nbytes for name, nbytes in rows.items() if name != "headroom")
    return tuple(LedgerRow(name=name, planned_bytes=rows[name], basis="computed") for name in LEDGER_ROWS)


def make_plan(
    *,
    max_batch: int = 8,
    max_len: int = 256,
    chunk: int = 64,
    page_size: int = 16,
    num_kv_pages: int | None = None,
    kv_bytes_per_page: int = 4096,
    memory_bytes: int = 1 << 30,
    decode_backend: BackendName = "full",
    prefill_backend: BackendName = "breakable",
    decode_sizes: Sequence[int] | None = None,
    prefill_sizes: Sequence[int] | None = None,
    fingerprint: Fingerprint = CPU,
    **fields: Any,
) -> Plan:
    """A valid plan. Sizes default to powers of two up to the maximum; the KV pool to all requests at their longest.

    Args:
        fields: replacements of top-level fields of `Plan`, made last and unchecked: the way to an inconsistent plan.
    """
    pages = 1 + max_batch * -(-max_len // page_size) if num_kv_pages is None else num_kv_pages
    decode = make_phase("decode", decode_backend, decode_sizes or _powers_of_two(max_batch), max_batch)
    slots = max_batch if prefill_backend == "full" else 0
    prefill = make_phase("prefill", prefill_backend, prefill_sizes or _powers_of_two(chunk), chunk, slots)
    pools = {f"graph_pool_{phase.phase}": 0 for phase in (decode, prefill) if phase.backend == "eager"}
    plan = Plan(
        model=MODEL,
        fingerprint=fingerprint,
        kernels="flashinfer" if fingerprint.device == "cuda" else "reference",
        dtype="bfloat16",
        limits=Limits(
            max_batch=max_batch, max_len=max_len, chunk=chunk, page_size=page_size, memory_bytes=memory_bytes
        ),
        num_kv_pages=pages,
        kv_bytes_per_page=kv_bytes_per_page,
        decode=decode,
        prefill=prefill,
        ledger=make_ledger(memory_bytes, pages * kv_bytes_per_page, **pools),
        choices=(
            Choice(field="decode.backend", value=decode_backend, basis="measured", reason="fastest at most sizes"),
            Choice(field="prefill.backend", value=prefill_backend, basis="locked", reason="--prefill-backend"),
        ),
        workload=Workload(
            spec="uniform:16-64",
            digest=hashlib.sha256(b"trace").hexdigest(),
            num_requests=100,
            decode_steps=((1, 40), (max_batch, 500)) if max_batch > 1 else ((1, 540),),
            prefill_steps=((chunk, 120),),
        ),
        regrets=(
            Regret(
                phase="decode",
                ladder="this plan",
                num_buckets=len(decode.ladder),
                workload="uniform:16-64",
                regret=0.0125,
                padding_ms=3.5,
            ),
        ),
        receipts=tuple(
            Receipt(key=f"{phase.phase}:{bucket.size}", cases=3, max_abs_diff=0.0, bitwise=True)
            for phase in (decode, prefill)
            for bucket in phase.ladder
        ),
    )
    return msgspec.structs.replace(plan, **fields)


def _powers_of_two(maximum: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 < maximum:
        sizes.append(sizes[-1] * 2)
    return sizes if maximum == 1 else [*sizes, maximum]
