"""One test for each way in which the fields of a plan can contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.container import encode
from formats.errors import InconsistentError
from formats.measurements import Timing
from formats.plan import LEDGER_ROWS, Choice, Plan, Receipt, Regret, Rejection, bucket_key
from formats.validation import problems, validate
from gplan.core import Phase, ShapeKey
from tests.formats.plans import CPU, CUDA, make_bucket, make_ledger, make_phase, make_plan, make_product

Change = Callable[[Plan], Plan]


def put(path: str, value: Any) -> Change:
    """A change of one field of a plan, by its path: `limits.max_batch` or `decode.ladder[1].size`."""
    names = path.replace("[", ".").replace("]", "").split(".")

    def change(part: Any, names: list[str]) -> Any:
        if not names:
            return value
        head, rest = names[0], names[1:]
        if isinstance(part, tuple):
            index = int(head)
            return (*part[:index], change(part[index], rest), *part[index + 1 :])
        return msgspec.structs.replace(part, **{head: change(getattr(part, head), rest)})

    return lambda plan: change(plan, names)


def row(name: str) -> int:
    return LEDGER_ROWS.index(name)


PLAN = make_plan()
BUCKETS = PLAN.decode.ladder
TIMING = Timing(median_us=1.0, spread_us=0.1, runs=1)

# what is changed, the path the error names, a part of its sentence
CASES: dict[str, tuple[Change, str, str]] = {
    "products of no library": (
        put("products", (make_product(),)),
        "products",
        "fingerprint.blas_version does not say of what",
    ),
    "library of the reference kernels": (
        put("fingerprint.blas_version", "130101"),
        "fingerprint.blas_version",
        "does not go with reference kernels",
    ),
    "product of more rows than a step": (put("products", (make_product(65),)), "products[0].m", "65 rows are outside"),
    "product of no rows": (put("products", (make_product(0),)), "products[0].m", "0 rows are outside"),
    "product of nothing": (put("products", (make_product(k=0),)), "products[0]", "no results or no columns"),
    "products out of order": (
        put("products", (make_product(32), make_product(16))),
        "products[1]",
        "does not follow",
    ),
    "product twice": (put("products", (make_product(), make_product())), "products[1]", "does not follow"),
    "algorithm of another length": (
        put("products", (make_product(algorithm="0f" * 63),)),
        "products[0].algorithm",
        "is not 64 bytes",
    ),
    "algorithm in capitals": (
        put("products", (make_product(algorithm="0F" * 64),)),
        "products[0].algorithm",
        "is not 64 bytes",
    ),
    "product that is no faster": (
        put("products", (make_product(chosen=make_product().default),)),
        "products[0].chosen",
        "no faster",
    ),
    "ladder without its maximum": (put("decode.ladder", BUCKETS[:-1]), "decode.ladder", "lacks its maximum 8"),
    "prefill ladder without its maximum": (
        put("prefill.ladder", PLAN.prefill.ladder[:-1]),
        "prefill.ladder",
        "lacks its maximum 64",
    ),
    "ladder not ascending": (
        put("decode.ladder", (BUCKETS[1], BUCKETS[0], *BUCKETS[2:])),
        "decode.ladder[1]",
        "is out of order",
    ),
    "ladder not ascending by width": (
        put("decode.ladder", (make_bucket(8, width=2), make_bucket(8))),
        "decode.ladder[1]",
        "is out of order",
    ),
    "ladder not ascending by variant": (
        put("decode.ladder", (make_bucket(8, variant="greedy"), make_bucket(8))),
        "decode.ladder[1]",
        "is out of order",
    ),
    "bucket twice": (put("decode.ladder", (*BUCKETS, BUCKETS[-1])), "decode.ladder[4]", "repeats decode:8"),
    "bucket of a variant twice": (
        put("decode.ladder", (make_bucket(8, width=2, variant="a"),) * 2),
        "decode.ladder[1]",
        "repeats decode:8x2:a",
    ),
    "variant of another phase": (
        put("prefill.ladder", (make_bucket(64), make_bucket(64, variant="greedy"))),
        "prefill.ladder[1].variant",
        "'greedy' is no variant of prefill",
    ),
    "variant that nobody knows": (
        put("decode.ladder", (make_bucket(8), make_bucket(8, variant="fast"))),
        "decode.ladder[1].variant",
        "'fast' is no variant",
    ),
    "parts of a variant in another order": (
        put("decode.ladder", (make_bucket(8), make_bucket(8, variant="greedy+compiled"))),
        "decode.ladder[1].variant",
        "is no variant",
    ),
    "bucket that takes not every batch": (
        put("decode.ladder", (make_bucket(4, variant="greedy"), make_bucket(8))),
        "decode.ladder[0].variant",
        "there is none",
    ),
    "bucket with two graphs for every batch": (
        put("decode.ladder", (make_bucket(8), make_bucket(8, variant="compiled"))),
        "decode.ladder[0].variant",
        "more than one",
    ),
    "bucket above the maximum": (put("decode.ladder[3].size", 9), "decode.ladder[3].size", "9 is outside 1 to"),
    "bucket of nothing": (put("decode.ladder[0].size", 0), "decode.ladder[0].size", "0 is outside 1 to"),
    "bucket of no width": (put("decode.ladder[0].width", 0), "decode.ladder[0].width", "0 tokens per request"),
    "wide prefill bucket": (put("prefill.ladder[0].width", 2), "prefill.ladder[0].width", "2 tokens per request"),
    "captured without a ladder": (put("decode.ladder", ()), "decode.ladder", "is empty"),
    "eager with a ladder": (put("decode.backend", "eager"), "decode.ladder", "has 4 buckets"),
    "phases swapped": (put("decode.phase", "prefill"), "decode.phase", "says prefill"),
    "decode maximum": (put("decode.max_size", 16), "decode.max_size", "16 is not limits.max_batch 8"),
    "prefill maximum": (put("prefill.max_size", 32), "prefill.max_size", "32 is not limits.chunk 64"),
    "request slots outside full": (put("prefill.request_slots", 4), "prefill.request_slots", "only prefill"),
    "request slots in decode": (put("decode.request_slots", 4), "decode.request_slots", "only prefill"),
    "no request slots": (put("prefill.backend", "full"), "prefill.request_slots", "0 is outside 1 to max_batch 8"),
    "more request slots than requests": (
        put("prefill", make_phase("prefill", "full", [64], 64, 9)),
        "prefill.request_slots",
        "9 is outside",
    ),
    "eager sizes of an eager phase": (
        put("decode", make_phase("decode", "eager", [], 8, eager_sizes=((1, 2),))),
        "decode.eager_sizes",
        "eager throughout",
    ),
    "eager size of nothing": (put("decode.eager_sizes", ((0, 2),)), "decode.eager_sizes[0]", "0 to 2 is not a range"),
    "eager sizes backwards": (put("decode.eager_sizes", ((3, 2),)), "decode.eager_sizes[0]", "3 to 2 is not a range"),
    "eager size above the maximum": (put("decode.eager_sizes", ((7, 9),)), "decode.eager_sizes[0]", "7 to 9 is not"),
    "eager sizes overlap": (put("decode.eager_sizes", ((1, 3), (3, 4))), "decode.eager_sizes[1]", "touches"),
    "eager sizes in two forms": (put("decode.eager_sizes", ((1, 2), (3, 4))), "decode.eager_sizes[1]", "touches"),
    "chosen backend rejected": (
        put("decode.rejected", (Rejection(backend="full", reason=""),)),
        "decode.rejected[0].backend",
        "full is the chosen backend",
    ),
    "backend rejected twice": (
        put("decode.rejected", (Rejection(backend="eager", reason=""),) * 2),
        "decode.rejected[1].backend",
        "eager is rejected twice",
    ),
    "unknown ledger row": (put("ledger[0].name", "gold"), "ledger[0].name", "unknown row 'gold'"),
    "ledger row missing": (put("ledger", PLAN.ledger[:-1]), "ledger", "row headroom is missing"),
    "ledger row twice": (put("ledger", (*PLAN.ledger, PLAN.ledger[0])), "ledger[9].name", "row weights is there twice"),
    "ledger out of order": (
        put("ledger", (PLAN.ledger[1], PLAN.ledger[0], *PLAN.ledger[2:])),
        "ledger",
        "rows are out of order",
    ),
    "ledger too small": (
        put("ledger[0].planned_bytes", PLAN.ledger[0].planned_bytes - 1),
        "ledger",
        "rows add up to 1073741823, not to limits.memory_bytes 1073741824",
    ),
    "ledger too large": (
        put("ledger[0].planned_bytes", PLAN.ledger[0].planned_bytes + 1),
        "ledger",
        "rows add up to 1073741825",
    ),
    "KV pool is not its pages": (
        put("ledger", make_ledger(1 << 30, 128 * 4096)),
        f"ledger[{row('kv_pool')}].planned_bytes",
        "kv_pool is 524288, not 129 pages of 4096 bytes",
    ),
    "graph pool of an eager phase": (
        put("decode", make_phase("decode", "eager", [], 8)),
        f"ledger[{row('graph_pool_decode')}].planned_bytes",
        "graphs of decode, which is eager",
    ),
    "chunk below the batch": (put("limits.chunk", 7), "limits.chunk", "7 is less than max_batch 8"),
    "KV pool below one request": (put("num_kv_pages", 16), "num_kv_pages", "do not hold one request of max_len 256"),
    "more memory than there is": (put("fingerprint.device_memory", 1 << 29), "fingerprint.free_memory", "is more than"),
    "more memory planned than there is": (
        put("fingerprint", msgspec.structs.replace(CPU, device_memory=1 << 29, free_memory=1 << 29)),
        "limits.memory_bytes",
        "is more than the device has",
    ),
    "more parts than devices": (put("fingerprint.tp_size", 2), "fingerprint.tp_size", "2 is more than the 1 devices"),
    "no part": (put("fingerprint.tp_size", 0), "fingerprint.tp_size", "is 0"),
    "no page size": (put("limits.page_size", 0), "limits.page_size", "is 0"),
    "no batch": (put("limits.max_batch", 0), "limits.max_batch", "is 0"),
    "flashinfer on a CPU": (put("kernels", "flashinfer"), "kernels", "flashinfer does not run on cpu"),
    "a version of no kernels": (put("fingerprint.kernels_version", "0.6"), "fingerprint.kernels_version", "'0.6'"),
    "no version of kernels": (
        lambda _: make_plan(fingerprint=msgspec.structs.replace(CUDA, kernels_version="")),
        "fingerprint.kernels_version",
        "'' does not go with",
    ),
    "negative size": (put("limits.max_len", -1), "limits.max_len", "-1 is negative"),
    "negative time": (put("decode.ladder[0].eager.median_us", -0.5), "decode.ladder[0].eager.median_us", "negative"),
    "NaN": (put("decode.ladder[0].graph.spread_us", float("nan")), "decode.ladder[0].graph.spread_us", "nan is not"),
    "infinite": (put("decode.padding_cap", float("inf")), "decode.padding_cap", "inf is not a finite number"),
    "beyond 64 bits": (put("num_kv_pages", 1 << 63), "num_kv_pages", "larger than 64 bits"),
    "a time beyond them": (put("decode.costs.pair_us", 1e300), "decode.costs.pair_us", "larger than 64 bits"),
    "absolute source": (put("model.source", "/data/model"), "model.source", "absolute path"),
    "source in a home": (put("model.source", "~/model"), "model.source", "absolute path"),
    "source in another's home": (put("model.source", "~me/model"), "model.source", "absolute path"),
    "source on a drive": (put("model.source", "C:\\model"), "model.source", "absolute path"),
    "source as an address of a file": (put("model.source", "file:///model"), "model.source", "absolute path"),
    "absolute trace": (put("workload.spec", "/data/trace.csv"), "workload.spec", "absolute path"),
    "no source": (put("model.source", ""), "model.source", "is empty"),
    "no dtype": (put("dtype", ""), "dtype", "is empty"),
    "digest in capitals": (put("model.config_digest", "A" * 64), "model.config_digest", "is not a sha256"),
    "digest too short": (put("model.headers_digest", "a" * 63), "model.headers_digest", "is not a sha256"),
    "digest of nothing": (put("model.headers_digest", ""), "model.headers_digest", "is not a sha256"),
    "content digest": (put("model.content_digest", "x"), "model.content_digest", "is not a sha256"),
    "tokenizer digest": (put("model.tokenizer_digest", "x"), "model.tokenizer_digest", "is not a sha256"),
    "choice of an unknown field": (put("choices[0].field", "decode.color"), "choices[0].field", "no field"),
    "choice of no field": (put("choices[0].field", ""), "choices[0].field", "no field ''"),
    "choice of a method": (put("choices[0].field", "planned_bytes"), "choices[0].field", "no field"),
    "choice below a value": (put("choices[0].field", "dtype.x"), "choices[0].field", "no field"),
    "field chosen twice": (
        put("choices", (PLAN.choices[0],) * 2),
        "choices[1].field",
        "decode.backend is chosen twice",
    ),
    "choice of another value": (put("choices[0].value", "eager"), "choices[0].value", "decode.backend is 'full'"),
    "choice of another number": (
        put("choices[0]", Choice(field="limits.max_batch", value="9", basis="locked", reason="")),
        "choices[0].value",
        "limits.max_batch is '8'",
    ),
    "steps out of order": (put("workload.decode_steps", ((2, 1), (1, 1))), "workload.decode_steps[1]", "ascend"),
    "steps of one size twice": (put("workload.decode_steps", ((2, 1), (2, 1))), "workload.decode_steps[1]", "ascend"),
    "steps above the maximum": (
        put("workload.prefill_steps", ((65, 1),)),
        "workload.prefill_steps[0]",
        "65 is outside",
    ),
    "steps of nothing": (put("workload.decode_steps", ((0, 1),)), "workload.decode_steps[0]", "0 is outside"),
    "trace without requests": (put("workload.num_requests", 0), "workload.num_requests", "is 0"),
    "receipt of no key": (put("receipts[0].key", "decode:3"), "receipts[0].key", "'decode:3' is on no ladder"),
    "two receipts": (put("receipts", (PLAN.receipts[0],) * 2), "receipts[1].key", "decode:1 has two receipts"),
    "equal to the bit, and not": (put("receipts[0].max_abs_diff", 0.5), "receipts[0].bitwise", "max_abs_diff is 0.5"),
    "receipt of nothing": (put("receipts[0].cases", 0), "receipts[0].cases", "is 0"),
    "regret of everything": (put("regrets[0].regret", -1.0), "regrets[0].regret", "-1 or less"),
}


@pytest.mark.parametrize("name", CASES)
def test_inconsistency_is_named(name: str) -> None:
    change, path, sentence = CASES[name]
    broken = change(PLAN)
    found = list(problems(broken))
    assert any(path == where and sentence in what for where, what in found), found
    with pytest.raises(InconsistentError) as caught:
        encode(broken)
    assert caught.value.path == found[0][0]
    assert caught.value.message == f"{found[0][0]}: {found[0][1]}"
    assert caught.value.hint


@pytest.mark.parametrize("decode", ["full", "breakable", "piecewise", "eager"])
@pytest.mark.parametrize("prefill", ["full", "breakable", "piecewise", "eager"])
def test_every_pair_of_backends_is_consistent(decode: Any, prefill: Any) -> None:
    validate(make_plan(decode_backend=decode, prefill_backend=prefill))


@given(
    max_batch=st.integers(1, 64),
    max_len=st.integers(1, 4096),
    extra=st.integers(0, 512),
    page_size=st.integers(1, 64),
    machine=st.sampled_from([CPU, CUDA]),
)
def test_any_sizes_are_consistent(max_batch: int, max_len: int, extra: int, page_size: int, machine: Any) -> None:
    validate(
        make_plan(
            max_batch=max_batch,
            max_len=max_len,
            chunk=max_batch + extra,
            page_size=page_size,
            fingerprint=machine,
            kv_bytes_per_page=256,
        )
    )


@pytest.mark.parametrize(
    "change",
    [
        put("model.source", "models/tiny"),
        put("model.source", "../tiny"),
        put("model.content_digest", "0" * 64),
        put("model.tokenizer_digest", ""),
        put("model.dtype", "float32"),
        put("workload", msgspec.structs.replace(PLAN.workload, spec="default", digest="", num_requests=0)),
        put("decode.eager_sizes", ((1, 1), (3, 4))),
        put("decode.padding_cap", 0.0),
        put(
            "decode.ladder", (make_bucket(1), make_bucket(8), make_bucket(8, variant="greedy"), make_bucket(8, width=2))
        ),
        put(
            "regrets", (Regret(phase="decode", ladder="x", num_buckets=1, workload="y", regret=-0.01, padding_ms=0.0),)
        ),
        put("receipts", (Receipt(key="decode:8", cases=1, max_abs_diff=0.25, bitwise=False),)),
        put("receipts", ()),
        put("choices", ()),
        put("choices[0]", Choice(field="decode.ladder", value="1,2,4,8", basis="default", reason="~3% slower")),
        put("choices[0]", Choice(field="decode.padding_cap", value="none", basis="rule", reason="")),
        put("decode.ladder[0].graph", None),
    ],
)
def test_what_looks_odd_but_holds(change: Change) -> None:
    plan = change(PLAN)
    plan = msgspec.structs.replace(plan, receipts=() if plan.decode.ladder != BUCKETS else plan.receipts)
    assert list(problems(plan)) == []


def test_a_problem_is_reported_once_per_field() -> None:
    broken = put("limits.max_batch", -1)(put("model.source", "/a")(PLAN))
    paths = [path for path, _ in problems(broken)]
    assert paths[:2] == ["model.source", "limits.max_batch"]


@given(size=st.integers(1, 4096), width=st.integers(1, 4), variant=st.sampled_from(["", "greedy", "prefix:4"]))
def test_a_bucket_key_is_the_text_of_its_shape_key(size: int, width: int, variant: str) -> None:
    for phase in Phase:
        key = ShapeKey(phase, size, width, variant)
        assert bucket_key(phase, make_bucket(size, width=width, variant=variant)) == str(key)
