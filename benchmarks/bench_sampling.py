"""Times drawing a row's token on a GPU, against taking the likeliest and against FlashInfer's own sampling.

    python -m benchmarks.bench_sampling [--rows 1,8,64,256] [--vocab 128256] [--profile]

One JSON line per case. `ratio` is the time of a draw over FlashInfer's for the same filters, null where it has none;
times are those of one call within replays of a graph of several, logits being in the cache where they fit. `differing`
counts tokens that are not those of the sorted reference, of `drawn` at as many positions. The last cases draw from
logits that are all equal, which is what counting takes longest for.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_step import kernel_times
from gplan.kernels.base import SamplingInputs
from gplan.kernels.flashinfer.drawing import sample
from gplan.kernels.flashinfer.sampling import argmax
from gplan.kernels.sampling import sample_tokens

CUDA = torch.device("cuda")
HEAT = 0.8
FILTERS: dict[str, dict[str, float]] = {
    "temperature": {},
    "top_k and top_p": {"top_k": 50, "top_p": 0.95},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
}
CALLS, REPLAYS, TRIALS = 10, 10, 7
POSITIONS = 8


def main() -> None:
    arguments = _parse()
    for dtype in (torch.bfloat16, torch.float32):
        for rows in arguments.rows:
            generator = torch.Generator(CUDA).manual_seed(rows)
            logits = (torch.randn(rows, arguments.vocab, generator=generator, device=CUDA) * arguments.scale).to(dtype)
            for name in FILTERS:
                _print(_case(name, logits, profile=arguments.profile))
            _print(_case("temperature", torch.ones_like(logits), profile=arguments.profile), logits="equal")


def _case(name: str, logits: Tensor, *, profile: bool) -> dict[str, Any]:
    inputs = _inputs(logits, FILTERS[name])
    ours, (theirs, error) = _microseconds(lambda: sample(logits, inputs)), _flashinfer(name, logits)
    figures = {
        "ratio": None if theirs is None else round(ours / theirs, 3),
        "case": name,
        "rows": logits.shape[0],
        "dtype": str(logits.dtype).removeprefix("torch."),
        "sample_us": round(ours, 1),
        "argmax_us": round(_microseconds(lambda: argmax(logits)), 1),
        "flashinfer_us": None if theirs is None else round(theirs, 1),
        "differing": _differing(logits, inputs),
        "drawn": POSITIONS * logits.shape[0],
        "scratch_mib": round(_scratch(logits, inputs) / 2**20, 1),
    }
    if error:
        figures["flashinfer_error"] = error
    return {**figures, **(kernel_times(lambda: sample(logits, inputs)) if profile else {})}


def _inputs(logits: Tensor, filters: dict[str, float]) -> SamplingInputs:
    rows, vocab = logits.shape

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=CUDA)

    return SamplingInputs(
        temperature=column(HEAT, torch.float32),
        top_k=column(filters.get("top_k", vocab), torch.int32),
        top_p=column(filters.get("top_p", 1.0), torch.float32),
        min_p=column(filters.get("min_p", 0.0), torch.float32),
        seed=torch.arange(rows, device=CUDA),
        position=torch.full((rows,), 100, device=CUDA),
    )


def _differing(logits: Tensor, inputs: SamplingInputs) -> int:
    differing = 0
    for position in range(POSITIONS):
        here = replace(inputs, position=inputs.position + position)
        for some in _slices(logits.shape[0]):
            part = SamplingInputs(*(getattr(here, name)[some] for name in here.__dataclass_fields__))
            differing += int((sample(logits[some], part) != sample_tokens(logits[some], part)).sum())
    return differing


def _slices(rows: int, most: int = 64) -> Iterator[slice]:
    """Sorting takes much memory."""
    for first in range(0, rows, most):
        yield slice(first, first + most)


def _scratch(logits: Tensor, inputs: SamplingInputs) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(logits, inputs)
    return torch.cuda.max_memory_allocated() - before


def _flashinfer(name: str, logits: Tensor) -> tuple[float | None, str]:
    """Microseconds of FlashInfer's sampling from the same logits and filters; else why there are none."""
    try:
        from flashinfer import sampling

        rows = logits.shape[0]
        heat = torch.full((rows,), HEAT, device=CUDA)
        given = {
            "seed": torch.ones(1, dtype=torch.int64, device=CUDA),
            "offset": torch.zeros(1, dtype=torch.int64, device=CUDA),
        }
        k = torch.full((rows,), 50, dtype=torch.int32, device=CUDA)
        p, least = torch.full((rows,), 0.95, device=CUDA), torch.full((rows,), 0.05, device=CUDA)

        def draw() -> Any:
            match name:
                case "temperature":
                    return sampling.sampling_from_logits(logits.float() / heat[:, None], **given)
                case "top_k and top_p":
                    scaled = logits.float() / heat[:, None]
                    return sampling.top_k_top_p_sampling_from_logits(scaled, k, p, **given)
                case "top_p":
                    return sampling.top_p_sampling_from_probs(sampling.softmax(logits.float(), heat), p, **given)
                case _:
                    return sampling.min_p_sampling_from_probs(sampling.softmax(logits.float(), heat), least, **given)

        return _microseconds(draw), ""
    except Exception as error:  # another version, no compiler, no capture: the other figures are still wanted
        return None, f"{type(error).__name__}: {error}"[:120]


def _microseconds(call: Callable[[], object]) -> float:
    """Of one call, in replays of a graph of CALLS; the median of TRIALS."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    graph.replay()
    trials: list[float] = []
    for _ in range(TRIALS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        trials.append(start.elapsed_time(end) * 1e3 / (CALLS * REPLAYS))
    return statistics.median(trials)


def _print(figures: dict[str, Any], **more: object) -> None:
    print(json.dumps({**figures, **more}), flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 64, 256))
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--scale", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--profile", action="store_true", help="microseconds of each kernel as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
