"""Variants of keys: what, beside its size, changes the kernels of a graph, and which variant a batch may be run from.

A variant is a name, or several joined by `+`. A key without one, or one that is merely `compiled`, takes every batch of
its size: it is the *base* of its bucket. The others take some batches and are never needed: what they do not take runs
from the base, with the same tokens.
"""

from __future__ import annotations

from functools import cache

from formats.plan import DRAW_VARIANTS, is_base
from gplan.core import Batch, SamplingParams, ShapeKey

COMPILED = "compiled"
"""The forward went through a compiler: a base, that takes every batch."""
FULL = "full"
"""Prefill with its attention in the graph and a fixed number of request slots, where the base is cut at attention."""
GREEDY, SAMPLED = DRAW_VARIANTS
"""Decode that takes each row's likeliest token, or draws by temperature, top-k, top-p and min-p with each row's seed.
Both make the inputs of the next step."""


@cache
def draw_of(key: ShapeKey) -> str:
    """`greedy` or `sampled` where the graph of a key chooses the tokens itself, else empty."""
    return next((part for part in key.variant.split("+") if part in DRAW_VARIANTS), "")


def draw_wanted(batch: Batch) -> str:
    """The draw that chooses the tokens of a decode batch as sampling outside a graph would; empty where a request asks
    for what no graph holds."""
    params = [chunk.request.params for chunk in batch.chunks]
    if any(_asks_for_more(each) for each in params):
        return ""
    return SAMPLED if any(each.temperature > 0 for each in params) else GREEDY


def with_part(variant: str, part: str) -> str:
    """A base variant and one more name."""
    return f"{variant}+{part}" if variant else part


def base_of(variant: str) -> str:
    """The base variant that `with_part` made a variant of."""
    return "+".join(part for part in variant.split("+") if part not in (FULL, *DRAW_VARIANTS))


def base_keys(keys: tuple[ShapeKey, ...]) -> tuple[ShapeKey, ...]:
    """Of some keys those that take every batch."""
    return tuple(key for key in keys if is_base(key.variant))


def _asks_for_more(params: SamplingParams) -> bool:
    return bool(
        params.has_penalties or params.logit_bias or params.logprobs is not None or params.min_tokens or params.grammar
    )
