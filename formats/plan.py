"""The plan: everything `gplan plan` decided, and the evidence it decided on.

These structs are the whole of a `.gplan` file. They hold no timestamp, no absolute path and no device serial, so the
same decisions on the same evidence are the same bytes. This module owns the fields but for what a phase measured
(`measurements`); the bytes around them belong to `container`, their consistency to `validation`, the id to `plan_id`,
comparison with a machine to `drift`.
"""

from __future__ import annotations

from typing import Literal

from formats.measurements import Costs, Prediction, SizeTiming, Timing
from formats.record import Record

PLAN_FORMAT = 4
"""Version of the fields and of the container. Another version is refused, never migrated."""

PhaseName = Literal["decode", "prefill"]
BackendName = Literal["full", "breakable", "piecewise", "eager"]

BASE_VARIANTS = ("", "compiled")
"""Variants of a bucket that take every batch of its size; a bucket has exactly one of them."""

DRAW_VARIANTS = ("greedy", "sampled")
"""Variants of decode that choose the tokens: on their own, or after a base variant and `+`."""

LEDGER_ROWS = (
    "weights",
    "non_torch",
    "workspace",
    "static_buffers",
    "activation_reserve",
    "graph_pool_decode",
    "graph_pool_prefill",
    "kv_pool",
    "headroom",
)
"""Every ledger row, in the order in which serve spends them."""


class TensorHeader(Record, frozen=True, kw_only=True):
    """One tensor as its safetensors header states it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class ModelIdentity(Record, frozen=True, kw_only=True):
    """What makes a checkpoint the same checkpoint, wherever it lies.

    Attributes:
        source: where it was, as the user wrote it: a hub name or a relative path; of an absolute path the last part.
            For display and as a default for `--checkpoint`; not part of the identity.
        config_digest: sha256 of the canonical JSON of config.json.
        headers_digest: sha256 over name, dtype, shape, file and offset of every tensor, and every file's size.
        content_digest: sha256 over the tensor files' bytes where full hashing was asked for, else empty.
        tokenizer_digest: sha256 over the tokenizer's files but for its chat template; empty where there is none.
        chat_template_digest: sha256 over the chat templates, wherever they are written; empty where there is none.
        generation_digest: sha256 of the canonical JSON of generation_config.json; empty where there is none.
        num_parameters: elements over all tensors.
    """

    source: str
    architecture: str
    dtype: str
    config_digest: str
    headers_digest: str
    content_digest: str = ""
    tokenizer_digest: str
    chat_template_digest: str
    generation_digest: str
    num_parameters: int
    num_layers: int
    vocab_size: int


class Fingerprint(Record, frozen=True, kw_only=True):
    """The machine and the libraries. `drift` grades each field.

    Attributes:
        device_name: the GPU's or the CPU's model name.
        capability: compute capability as `9.0`; for a CPU its vector extension (`avx2`).
        num_threads: threads torch computes with on a CPU, 0 on a GPU.
        kernels_version: of flashinfer; empty for the reference kernels.
        prefill_kernel: which of flashinfer's runs prefill attention, `fa2` or `fa3`; empty for the reference kernels.
        blas_version: of the library whose algorithms `Plan.products` names, as it tells it; empty where the kernels
            leave no product to one.
    """

    device: Literal["cuda", "cpu"]
    device_name: str
    capability: str
    device_count: int
    tp_size: int
    device_memory: int
    free_memory: int
    num_threads: int
    driver: str
    torch: str
    cuda: str
    triton: str
    transformers: str
    kernels_version: str
    prefill_kernel: Literal["", "fa2", "fa3"] = ""
    blas_version: str = ""
    python: str
    os: str
    clocks_mhz: int


class Limits(Record, frozen=True, kw_only=True):
    """What a deployment may ask for. `chunk` bounds the tokens of any one step; `max_len` prompt plus output.
    `prefix_cache`: full pages of keys and values are kept for requests that begin with the same tokens."""

    max_batch: int
    max_len: int
    chunk: int
    page_size: int
    memory_bytes: int
    prefix_cache: bool = True


class Bucket(Record, frozen=True, kw_only=True):
    """One captured size. `eager` is the same padded shape run eagerly. `interpolated`: not measured but read off its
    neighbours."""

    size: int
    width: int = 1
    variant: str = ""
    graph: Timing | None = None
    eager: Timing
    graph_bytes: int = 0
    capture_ms: float = 0.0
    num_segments: int = 0
    interpolated: bool = False


class VariantNote(Record, frozen=True, kw_only=True):
    """What was found of a variant, and the sizes of the buckets that have it."""

    variant: str
    sizes: tuple[int, ...]
    reason: str


class Rejection(Record, frozen=True, kw_only=True):
    """A backend that was not chosen, and the reason with its figures."""

    backend: BackendName
    reason: str


class Choice(Record, frozen=True, kw_only=True):
    """Why something is as it is: measured here, forced by a rule, or locked by the user; in one sentence."""

    field: str
    value: str
    basis: Literal["measured", "rule", "locked", "default"]
    reason: str


class PhasePlan(Record, frozen=True, kw_only=True):
    """How one phase runs.

    Attributes:
        backend: capture backend; `eager` has an empty ladder.
        ladder: ascending; the last bucket is the phase's maximum where the phase is captured.
        request_slots: request slots of a prefill graph that holds its attention (backend or variant `full`), else 0.
        padding_cap: a batch is replayed only if bucket <= size * (1 + padding_cap), compared in rows.
        eager_sizes: sizes up to the maximum that run eagerly although a bucket covers them, as [first, last] ranges.
        other_sizes: times of sizes that are no bucket, ascending.
        variants: what was found of variants, whether any bucket has them or not.
        predictions: how well times between measured sizes were foretold.
    """

    phase: PhaseName
    backend: BackendName
    max_size: int
    ladder: tuple[Bucket, ...]
    request_slots: int = 0
    padding_cap: float | None = None
    eager_sizes: tuple[tuple[int, int], ...] = ()
    rejected: tuple[Rejection, ...] = ()
    other_sizes: tuple[SizeTiming, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    costs: Costs = Costs()
    variants: tuple[VariantNote, ...] = ()

    @property
    def graph_us(self) -> dict[int, float]:
        """Replays by size, as measured: of buckets and of other sizes."""
        return {entry.size: entry.graph.median_us for entry in self._timed if entry.graph is not None}

    @property
    def eager_us(self) -> dict[int, float]:
        """Eager steps by size, as measured."""
        return {entry.size: entry.eager.median_us for entry in self._timed if entry.eager is not None}

    @property
    def _timed(self) -> tuple[Bucket | SizeTiming, ...]:
        return (*self.other_sizes, *(bucket for bucket in self.base_ladder if bucket.width == 1))

    @property
    def slot_limit(self) -> int:
        """Requests of a step at most for it to be replayed at all; 0 for no limit."""
        return self.request_slots if self.backend == "full" else 0

    @property
    def base_ladder(self) -> tuple[Bucket, ...]:
        """The buckets that take every batch of their size: each size once."""
        return tuple(bucket for bucket in self.ladder if is_base(bucket.variant))


class LedgerRow(Record, frozen=True, kw_only=True):
    """Device bytes planned for one purpose, and how the figure came about."""

    name: str
    planned_bytes: int
    basis: str


class Workload(Record, frozen=True, kw_only=True):
    """The traffic the ladders were solved for.

    Attributes:
        spec: as the user wrote it, or `default`.
        digest: sha256 of the trace that was simulated; empty for none.
        decode_steps, prefill_steps: (size, steps) ascending by size: how many steps the simulated scheduler ran.
    """

    spec: str
    digest: str = ""
    num_requests: int = 0
    decode_steps: tuple[tuple[int, int], ...] = ()
    prefill_steps: tuple[tuple[int, int], ...] = ()


class Regret(Record, frozen=True, kw_only=True):
    """Expected step time of a ladder over that of a ladder with every size, minus 1."""

    phase: PhaseName
    ladder: str
    num_buckets: int
    workload: str
    regret: float
    padding_ms: float


class ProductChoice(Record, frozen=True, kw_only=True):
    """A matrix product that another algorithm of the library multiplies faster than the one it would take by itself.

    Attributes:
        m, n, k: m rows of k columns times n results.
        adds: the results are added to what is there.
        algorithm: the library's description of it, as hexadecimal; it means something to `fingerprint.blas_version`
            alone.
        chosen, default: times of the product with it, and with the library's own choice.
    """

    m: int
    n: int
    k: int
    adds: bool
    algorithm: str
    chosen: Timing
    default: Timing


class Receipt(Record, frozen=True, kw_only=True):
    """Replay of one key against eager at the same padded shape, padding poisoned."""

    key: str
    cases: int
    max_abs_diff: float
    bitwise: bool


class Plan(Record, frozen=True, kw_only=True):
    """Decisions and evidence of one deployment. Field by field in GPLAN.md."""

    model: ModelIdentity
    fingerprint: Fingerprint
    kernels: Literal["reference", "flashinfer"]
    dtype: str
    limits: Limits
    num_kv_pages: int
    kv_bytes_per_page: int
    decode: PhasePlan
    prefill: PhasePlan
    ledger: tuple[LedgerRow, ...]
    choices: tuple[Choice, ...]
    workload: Workload
    regrets: tuple[Regret, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    products: tuple[ProductChoice, ...] = ()

    def phase(self, name: str) -> PhasePlan:
        return self.decode if name == "decode" else self.prefill

    def planned_bytes(self, row: str) -> int:
        return next(entry.planned_bytes for entry in self.ledger if entry.name == row)


def is_base(variant: str) -> bool:
    """Whether keys of a variant take every batch of their size."""
    return variant in BASE_VARIANTS


def bucket_key(phase: str, bucket: Bucket) -> str:
    """The text of the key a bucket is captured under, as receipts and metrics name it: `decode:64`."""
    text = f"{phase}:{bucket.size}"
    if bucket.width != 1:
        text += f"x{bucket.width}"
    return f"{text}:{bucket.variant}" if bucket.variant else text
