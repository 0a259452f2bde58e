"""A device that never was: drives a scheduler as the engine does, and looks at every step it hands out.

Tokens come from a function of the tokens before them, read through pages: each step writes the tokens it computes into
a model of the KV pool and draws from what its pages hold. A page shared, lost or reused too early gives a wrong answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from formats.plan import Limits
from gplan.core import DUMMY_PAGE, DUMMY_ROW, Batch, Chunk, Phase, Request, SamplingParams
from gplan.scheduling.packing import Packer
from gplan.scheduling.scheduler import Scheduler

STOP_TOKEN = 0
VOCABULARY = 97


def limits(
    *, max_batch: int = 4, max_len: int = 32, chunk: int = 8, page_size: int = 4, prefix_cache: bool = True
) -> Limits:
    return Limits(
        max_batch=max_batch,
        max_len=max_len,
        chunk=chunk,
        page_size=page_size,
        memory_bytes=0,
        prefix_cache=prefix_cache,
    )


def packer(chunk: int) -> Packer:
    """Buckets of which each takes as long as it is large, beside a start."""
    buckets = [*range(3, chunk, 3), chunk]
    return Packer([3.0 + min(-(-size // 3) * 3, chunk) for size in range(chunk + 1)], buckets)


def request(name: str, prompt: Sequence[int], max_tokens: int, *, stops: bool = True) -> Request:
    stop_token_ids = frozenset({STOP_TOKEN}) if stops else frozenset[int]()
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    return Request(id=name, prompt_len=len(prompt), tokens=list(prompt), params=params)


def draw(tokens: Iterable[int]) -> int:
    """The token that follows `tokens`; about one in 24 is the stop token."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return STOP_TOKEN if value % 24 == 0 else 1 + value % (VOCABULARY - 1)


def answer(prompt: Sequence[int], max_tokens: int, max_len: int, *, stops: bool = True) -> list[int]:
    """What a request must be answered with."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_len):
        token = draw(tokens)
        if stops and token == STOP_TOKEN:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class Device:
    """Runs steps in order. Results are unread until `collect`."""

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self.limits, self.num_pages = limits, num_pages
        self._kv: dict[tuple[int, int], int] = {}
        self._last_tokens: dict[int, int] = {}

    def launch(self, batch: Batch) -> list[int]:
        self._check(batch)
        values = [self._input(chunk) for chunk in batch.chunks]
        for chunk, tokens in zip(batch.chunks, values, strict=True):
            for position, token in zip(range(chunk.start, chunk.end), tokens, strict=True):
                self._kv[self._place(chunk, position)] = token
        drawn = []
        for chunk in batch.chunks:
            if chunk.samples:
                token = draw(self._kv[self._place(chunk, position)] for position in range(chunk.end))
                self._last_tokens[chunk.request.row] = token
                drawn.append(token)
        return drawn

    def _input(self, chunk: Chunk) -> list[int]:
        known = chunk.request.tokens[chunk.start : chunk.end]
        if len(known) < chunk.length:
            known = [*known, self._last_tokens[chunk.request.row]]
        assert len(known) == chunk.length
        return known

    def _place(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.pages[position // self.limits.page_size], position % self.limits.page_size

    def _check(self, batch: Batch) -> None:
        chunks = batch.chunks
        assert 1 <= batch.num_requests <= self.limits.max_batch
        assert batch.num_tokens <= self.limits.chunk
        rows = [chunk.request.row for chunk in chunks]
        assert len(set(rows)) == len(rows)
        assert all(DUMMY_ROW < row <= self.limits.max_batch for row in rows)
        pages = [page for chunk in chunks for page in chunk.pages]
        assert all(DUMMY_PAGE < page < self.num_pages for page in pages)
        self._check_sharing(chunks)
        for chunk in chunks:
            assert chunk.length >= 1
            assert len(chunk.pages) == -(-chunk.end // self.limits.page_size)
            assert chunk.end < self.limits.max_len
        decodes = [chunk.length == 1 and chunk.start >= chunk.request.prompt_len for chunk in chunks]
        if batch.phase is Phase.DECODE:
            assert all(decodes)
            assert all(chunk.samples for chunk in chunks)
        first_prompt = next(
            (i for i, chunk in enumerate(chunks) if chunk.start < chunk.request.prompt_len), len(chunks)
        )
        assert all(
            chunk.start < chunk.request.prompt_len or chunk.request.num_preemptions for chunk in chunks[first_prompt:]
        )

    def _check_sharing(self, chunks: Sequence[Chunk]) -> None:
        """A page that a step writes to is one request's; another may begin with it only if the step fills it."""
        size = self.limits.page_size
        written = [page for chunk in chunks for page in chunk.pages[chunk.start // size :]]
        assert len(set(written)) == len(written), "two requests write to a page"
        unfilled = {chunk.pages[-1] for chunk in chunks if chunk.end % size}
        for chunk in chunks:
            assert len(set(chunk.pages)) == len(chunk.pages), "a request holds a page twice"
            assert unfilled.isdisjoint(chunk.pages[: chunk.start // size]), "a page is shared that is not full"


class Server:
    """The engine's loop: schedules, launches, and reads a result once `lag` younger steps are under way."""

    def __init__(self, scheduler: Scheduler, device: Device, lag: int) -> None:
        self.scheduler, self._device, self._lag = scheduler, device, lag
        self._in_flight: deque[tuple[Batch, list[int]]] = deque()
        self.batches: list[Batch] = []
        self.finished: list[Request] = []

    def step(self) -> bool:
        """One turn of the loop; whether anything happened."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self._device.launch(batch)))
            self.batches.append(batch)
        if not self._in_flight or (batch is not None and len(self._in_flight) <= self._lag):
            return batch is not None
        self.finished += self.scheduler.update(*self._in_flight.popleft())
        return True

    def fail(self) -> None:
        """A turn whose step cannot be run."""
        batch = self.scheduler.schedule()
        while self._in_flight:
            self.finished += self.scheduler.update(*self._in_flight.popleft())
        if batch is not None:
            self.scheduler.take_back(batch)

    def run(self) -> None:
        """Until every request is finished. A turn in which nothing happens while there is work is a deadlock."""
        while self.scheduler.has_work:
            assert self.step(), "no step runs, and requests wait"
