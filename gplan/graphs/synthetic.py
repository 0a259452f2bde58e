"""Batches made for measuring: real shapes, pages and lengths, with made-up tokens."""

from __future__ import annotations

from dataclasses import replace

from formats.plan import Limits
from gplan.core import Batch, Chunk, Phase, Request, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
PENALISED = SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.1)
DRAWN = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=17)
EVERYTHING = SamplingParams(
    max_tokens=1,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=5,
    prompt_logprobs=5,
)
"""Asks for every feature of sampling at once: what it takes is the most that sampling can take."""


class BatchMaker:
    """Lays requests over the pages of a pool, starting over where the pool ends.

    Args:
        num_pages: of the pool, the dummy page included.
    """

    def __init__(self, limits: Limits, num_pages: int, vocab_size: int) -> None:
        self._limits, self._num_pages, self._vocab_size = limits, num_pages, vocab_size
        self._next_page = 1

    def decode(self, size: int, context: int, params: SamplingParams = GREEDY) -> Batch:
        """`size` requests that each add the token at position `context`."""
        self._next_page = 1
        return Batch(Phase.DECODE, tuple(self._chunk(row, context, 1, params) for row in range(1, size + 1)))

    def uneven_run(self, size: int, context: int, steps: int) -> list[Batch]:
        """Decode steps that follow each other, of requests with unlike lengths: at first from `context` cached tokens
        down to half of it."""
        self._next_page = 1
        firsts = [max(1, context - row * context // (2 * size)) for row in range(size)]
        last = [self._chunk(row + 1, first + steps - 1, 1, GREEDY) for row, first in enumerate(firsts)]
        return [
            Batch(
                Phase.DECODE,
                tuple(self._earlier(chunk, first + step) for chunk, first in zip(last, firsts, strict=True)),
            )
            for step in range(steps)
        ]

    def decode_run(self, size: int, context: int, steps: int, params: SamplingParams = GREEDY) -> list[Batch]:
        """Decode steps that follow each other: `size` requests that add the tokens from position `context` on, each
        with a seed of its own."""
        self._next_page = 1
        last = [self._chunk(row, context + steps - 1, 1, _seeded(params, row)) for row in range(1, size + 1)]
        return [
            Batch(Phase.DECODE, tuple(self._earlier(chunk, context + step) for chunk in last)) for step in range(steps)
        ]

    def prefill(self, size: int, cached: int = 0, params: SamplingParams = GREEDY) -> Batch:
        """As few requests as `size` new tokens take at the maximum length, each after `cached` cached tokens."""
        self._next_page = 1
        longest = self._limits.max_len - 1 - cached
        assert 0 < size <= longest * self._limits.max_batch, f"{size} tokens in {self._limits}"
        chunks, row = [], 1
        while size > 0:
            length = min(size, longest)
            chunks.append(self._chunk(row, cached, length, params))
            size, row = size - length, row + 1
        return Batch(Phase.PREFILL, tuple(chunks))

    def mixed(self, size: int, decodes: int, context: int, params: SamplingParams = GREEDY) -> Batch:
        """`decodes` requests that each add the token at position `context`, and a prompt of the other tokens."""
        self._next_page = 1
        chunks = [self._chunk(row, context, 1, params) for row in range(1, decodes + 1)]
        return Batch(Phase.PREFILL, (*chunks, self._chunk(decodes + 1, 0, size - decodes, params)))

    def ragged(self, size: int, num_requests: int, cached: int = 0, params: SamplingParams = GREEDY) -> Batch:
        """`size` tokens over `num_requests` prompts of nearly equal length, the first after `cached` tokens."""
        self._next_page = 1
        lengths = [size // num_requests + (index < size % num_requests) for index in range(num_requests)]
        chunks = [self._chunk(row + 1, cached if row == 0 else 0, n, params) for row, n in enumerate(lengths) if n]
        return Batch(Phase.PREFILL, tuple(chunks))

    def _chunk(self, row: int, start: int, length: int, params: SamplingParams) -> Chunk:
        end = start + length
        tokens = [(7919 * row + 31 * position + 11) % self._vocab_size for position in range(end)]
        request = Request(f"measure-{row}", end, tokens, params, row=row)
        pages = tuple(self._take_page() for _ in range(-(-end // self._limits.page_size)))
        return Chunk(request, start, length, pages, samples=True)

    def _earlier(self, chunk: Chunk, start: int) -> Chunk:
        """The step of the same request that adds the token at `start`."""
        num_pages = start // self._limits.page_size + 1
        return Chunk(chunk.request, start, 1, chunk.pages[:num_pages], samples=True)

    def _take_page(self) -> int:
        page = self._next_page
        self._next_page = page % (self._num_pages - 1) + 1
        return page


def _seeded(params: SamplingParams, row: int) -> SamplingParams:
    return replace(params, seed=params.seed + row) if params.temperature else params
