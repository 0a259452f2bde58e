"""From flags to decided values: device, kernels, dtype, limits and memory, each with why it is so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from formats.plan import BackendName, Choice, Limits, ModelIdentity
from gplan.errors import GplanError
from gplan.graphs.machine import device_memory
from gplan.models import Headers, ModelSpec, read_headers, read_spec
from gplan.planning.choices import Choices
from gplan.planning.options import PlanOptions
from gplan.planning.rules import Facts, KernelsName, broken_kernels_rule
from gplan.units import format_size, parse_size

PAGE_SIZE = 16
DEFAULT_MAX_BATCH = {"cpu": 16, "cuda": 256}
DEFAULT_CHUNK = {"cpu": 256, "cuda": 2048}
DEFAULT_MEMORY = {"cpu": "50%", "cuda": "90%"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS: tuple[BackendName, ...] = ("full", "breakable", "piecewise", "eager")
LEAST_SLOTS, MOST_SLOTS, TOKENS_PER_SLOT = 8, 32, 128
"""Request slots of a prefill graph: one for so many tokens of the chunk, within what is of use and what FlashInfer has
room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A request for a plan with nothing left open but what is measured."""

    checkpoint: str
    headers: Headers
    spec: ModelSpec
    identity: ModelIdentity
    device: torch.device
    dtype: torch.dtype
    kernels: KernelsName
    limits: Limits
    decode_backend: BackendName | None
    prefill_backend: BackendName | None
    prefill_slots: int
    choices: tuple[Choice, ...]


def resolve(options: PlanOptions) -> Resolved:
    """Decides everything that needs no measurement.

    Raises:
        GplanError: a flag that cannot be met, a checkpoint that cannot be read or is refused by name.
    """
    _refuse_idle_flags(options)
    choices = Choices()
    device = _device(options, choices)
    headers = read_headers(options.checkpoint, hash_contents=options.hash_contents)
    spec = read_spec(options.checkpoint, headers, options.max_len)
    dtype = _dtype(options, spec, choices)
    kernels = _kernels(options, spec, device, dtype, choices)
    limits = _limits(options, spec, device, choices)
    return Resolved(
        checkpoint=options.checkpoint,
        headers=headers,
        spec=spec,
        identity=headers.identity(spec),
        device=device,
        dtype=dtype,
        kernels=kernels,
        limits=limits,
        decode_backend=_backend("decode", options.decode_backend, options.decode_buckets),
        prefill_backend=_backend("prefill", options.prefill_backend, options.prefill_buckets),
        prefill_slots=_slots(options, limits),
        choices=choices.entries,
    )


def _refuse_idle_flags(options: PlanOptions) -> None:
    """
    Raises:
        GplanError: a flag that would change nothing beside the others.
    """
    if options.speedup is not None and options.workload is None:
        raise GplanError("--speedup: there is no workload to speed up", "Give the traffic with --workload.")
    if options.try_compile and options.prefill_backend is not None and options.decode_backend not in (None, "full"):
        raise GplanError(
            "--try-compile: both backends are fixed, and neither leaves anything to compile",
            "Leave out --try-compile, or one of the backends.",
        )
    captures_nothing = options.decode_backend == options.prefill_backend == "eager"
    if options.startup_budget_s is not None and captures_nothing:
        raise GplanError("--startup-budget: both phases run eagerly, so nothing is captured", "Leave it out.")


def _device(options: PlanOptions, choices: Choices) -> torch.device:
    if options.device is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        choices.default("fingerprint.device", name, "a GPU was found" if name == "cuda" else "no GPU was found")
        return torch.device(name)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise GplanError(f"--device {options.device}: not a device that gplan runs on", "Use cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise GplanError(
            f"--device {options.device}: torch finds no GPU here", "Use --device cpu, or install a driver."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GplanError(
            f"--device {options.device}: this machine has {torch.cuda.device_count()} GPUs", "Count them from 0."
        )
    choices.lock("fingerprint.device", device.type, "--device")
    return device


def _dtype(options: PlanOptions, spec: ModelSpec, choices: Choices) -> torch.dtype:
    if options.dtype is None:
        choices.default("dtype", spec.dtype, "the checkpoint's own")
        return DTYPES[spec.dtype]
    if options.dtype not in DTYPES:
        raise GplanError(f"--dtype {options.dtype}: unknown", f"Use one of {', '.join(DTYPES)}.")
    choices.lock("dtype", options.dtype, "--dtype")
    return DTYPES[options.dtype]


def _kernels(
    options: PlanOptions, spec: ModelSpec, device: torch.device, dtype: torch.dtype, choices: Choices
) -> KernelsName:
    facts = Facts(device=device.type, kernels="flashinfer", dtype=str(dtype), head_dim=spec.head_dim)
    obstacle = broken_kernels_rule("flashinfer", facts)
    if options.kernels is None:
        if obstacle is None:
            choices.default("kernels", "flashinfer", "the kernels for a GPU")
            return "flashinfer"
        choices.rule("kernels", "reference", str(obstacle))
        return "reference"
    if options.kernels == "reference":
        choices.lock("kernels", "reference", "--kernels")
        return "reference"
    if options.kernels == "flashinfer":
        if obstacle is not None:
            raise GplanError(f"--kernels flashinfer: {obstacle}", "Leave out --kernels to let gplan choose.")
        choices.lock("kernels", "flashinfer", "--kernels")
        return "flashinfer"
    raise GplanError(f"--kernels {options.kernels}: unknown", "Use reference or flashinfer.")


def _limits(options: PlanOptions, spec: ModelSpec, device: torch.device, choices: Choices) -> Limits:
    kind = device.type
    max_len = _positive("max_len", options.max_len, spec.max_position, "the model's own maximum", choices, least=2)
    if max_len > spec.max_position:
        raise GplanError(
            f"--max-len {max_len}: the model was made for {spec.max_position} tokens",
            "Ask for no more than that.",
        )
    max_batch = _positive(
        "max_batch", options.max_batch, DEFAULT_MAX_BATCH[kind], f"the default for {kind}", choices, least=1
    )
    # A step of prompts cannot hold more than all rows at the longest prompt.
    most = max_batch * (max_len - 1)
    chunk = _positive(
        "chunk",
        options.chunk,
        max(max_batch, min(DEFAULT_CHUNK[kind], most)),
        f"the default for {kind}, cut to what a step can hold",
        choices,
        least=1,
    )
    if chunk < max_batch:
        raise GplanError(
            f"--chunk {chunk}: a step must hold a token of each of {max_batch} requests",
            f"Use --chunk {max_batch} or more, or a smaller --max-batch.",
        )
    if chunk > most:
        raise GplanError(
            f"--chunk {chunk}: {max_batch} requests of at most {max_len - 1} prompt tokens hold only {most}",
            f"Use --chunk {most} or less.",
        )
    page_size = _positive("page_size", options.page_size, PAGE_SIZE, "the default", choices, least=1)
    return Limits(
        max_batch=max_batch,
        max_len=max_len,
        chunk=chunk,
        page_size=page_size,
        memory_bytes=_memory(options, device, choices),
        prefix_cache=_prefix_cache(options, choices),
    )


def _prefix_cache(options: PlanOptions, choices: Choices) -> bool:
    if options.prefix_cache is None:
        choices.default("limits.prefix_cache", True, "answers are the same, and prompts that begin alike cost less")
        return True
    flag = "--prefix-cache" if options.prefix_cache else "--no-prefix-cache"
    choices.lock("limits.prefix_cache", options.prefix_cache, flag)
    return options.prefix_cache


def _positive(field: str, given: int | None, default: int, reason: str, choices: Choices, *, least: int) -> int:
    flag = f"--{field.replace('_', '-')}"
    if given is None:
        choices.default(f"limits.{field}", default, reason)
        return default
    if given < least:
        raise GplanError(f"{flag} {given}: must be at least {least}", f"Use {flag} {least} or more.")
    choices.lock(f"limits.{field}", given, flag)
    return given


def _memory(options: PlanOptions, device: torch.device, choices: Choices) -> int:
    total, _ = device_memory(device)
    text = options.memory or DEFAULT_MEMORY[device.type]
    nbytes = parse_size(text, total)
    if nbytes > total:
        raise GplanError(
            f"--memory {text}: the device has {format_size(total)} in all", "Ask for less, or write a percentage."
        )
    if options.memory is None:
        choices.default("limits.memory_bytes", nbytes, f"{text} of the device")
    else:
        choices.lock("limits.memory_bytes", nbytes, "--memory")
    return nbytes


def _slots(options: PlanOptions, limits: Limits) -> int:
    """Request slots of a prefill graph that holds its attention: the larger the step, the more prompts share it."""
    if options.prefill_slots is None:
        return min(limits.max_batch, MOST_SLOTS, max(LEAST_SLOTS, limits.chunk // TOKENS_PER_SLOT))
    if not 1 <= options.prefill_slots <= limits.max_batch:
        raise GplanError(
            f"--prefill-slots {options.prefill_slots}: a step has 1 to {limits.max_batch} requests",
            f"Use --prefill-slots {limits.max_batch} or less.",
        )
    if options.prefill_backend == "eager":
        raise GplanError(
            f"--prefill-slots {options.prefill_slots}: --prefill-backend eager captures nothing",
            "Leave out one of the two.",
        )
    return options.prefill_slots


def _backend(phase: str, given: str | None, buckets: tuple[int, ...] | None) -> BackendName | None:
    if given is None:
        return None
    for name in BACKENDS:
        if name == given:
            if name == "eager" and buckets:
                raise GplanError(
                    f"--{phase}-backend eager captures nothing, yet --{phase}-buckets asks for graphs",
                    "Leave out one of the two.",
                )
            return name
    raise GplanError(f"--{phase}-backend {given}: unknown", f"Use one of {', '.join(BACKENDS)}.")
