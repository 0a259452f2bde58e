"""The decode step of `bench_step` in transformers: eager with a static cache, and its forward in one CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache


@torch.no_grad()
def run(config: dict[str, Any], sizes: Sequence[int], context: int, report: Callable[..., None]) -> None:
    """Reports one case for each batch size."""
    values = {name: value for name, value in config.items() if name != "architectures"}
    loaded = AutoConfig.for_model(**values)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for size in sizes:
        cache = StaticCache(config=loaded, max_cache_len=context + 1)
        ids = torch.zeros((size, 1), dtype=torch.int64, device="cuda")
        position = torch.tensor([context], device="cuda")

        def step(ids: torch.Tensor = ids, position: torch.Tensor = position, cache: StaticCache = cache) -> object:
            return model(ids, position_ids=position[None], cache_position=position, past_key_values=cache).logits

        report(case=f"transformers decode {size} eager", ms=round(_median_ms(step), 3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        report(case=f"transformers decode {size} graph", ms=round(_median_ms(graph.replay), 3))
        del graph, cache


def _median_ms(fn: Callable[[], object], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])
