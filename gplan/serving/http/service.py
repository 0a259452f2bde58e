"""What every handler needs: plan, tokenizer, engine, metrics; and who is let in."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from formats.openai_rules import MAX_SEQUENCES
from formats.plan import Plan
from gplan.serving.client import EngineClient
from gplan.serving.generation import Generation, Job
from gplan.serving.http.errors import ApiError
from gplan.serving.http.jobs import JobMaker, check_scores
from gplan.serving.http.limits import client_of, time_limit_of
from gplan.serving.http.seats import Seat, Seats
from gplan.serving.metrics import Metrics
from gplan.serving.protocol import NO_DEBUG, Debug, Ready
from gplan.serving.tokenizer import ServedTokenizer

R = TypeVar("R")

QUEUE_PER_ROW = 16
"""Answers under way at most, per request row of the plan; but never fewer than one request may ask for."""


@dataclass(slots=True, kw_only=True)
class Service:
    """One served plan.

    Attributes:
        model: the name that requests must give.
        request_timeout_s: how long a request may take at most.
        is_draining: no new requests are taken.
    """

    plan: Plan
    plan_id: str
    model: str
    tokenizer: ServedTokenizer
    eos_token_ids: frozenset[int]
    client: EngineClient
    metrics: Metrics
    ready: Ready
    api_key: str | None = None
    debug: Debug = NO_DEBUG
    request_timeout_s: float = 600.0
    is_draining: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))
    seats: Seats = field(init=False)
    jobs: JobMaker = field(init=False)
    _threads: ThreadPoolExecutor = field(init=False)
    _side_thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        limits = self.plan.limits
        self.seats = Seats(max(MAX_SEQUENCES, limits.max_batch * QUEUE_PER_ROW))
        self.jobs = JobMaker(
            max_len=limits.max_len, vocab_size=self.plan.model.vocab_size, eos_token_ids=self.eos_token_ids
        )
        self._threads = ThreadPoolExecutor(2, "tokenize")
        self._side_thread = ThreadPoolExecutor(1, "aside")

    def now(self) -> int:
        """Seconds since 1970."""
        return int(time.time())

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here, {self.model!r} is",
                param="model",
                code="model_not_found",
            )

    def require_grammars(self, param: str) -> None:
        """
        Raises:
            ApiError: 400 where no answer can follow a grammar, and why.
        """
        why = self.ready.no_grammars
        if why:
            raise ApiError(400, f"{param} is not available here: {why}", param=param, code="unsupported_parameter")

    def refuse_early(self, scope: Scope) -> None:
        """Refuses, before its body is read, a request for answers that could not be let in whatever it asks for.

        Raises:
            ApiError: as `admit`; 400 for a time limit that is none.
        """
        self._check_open()
        deadline = time.monotonic() + time_limit_of(scope, self.request_timeout_s)
        self.seats.check(1, client_of(scope), deadline)

    def admit(self, request: Request, num_answers: int) -> Seat:
        """Lets a request in; its time runs from now. Its seat is given back by its generation, or by whoever does not
        come to begin one.

        Raises:
            ApiError: 503 while draining or without an engine, 429 where the queue is full.
        """
        self._check_open()
        deadline = time.monotonic() + time_limit_of(request.scope, self.request_timeout_s)
        return self.seats.take(num_answers, client_of(request.scope), deadline)

    def _check_open(self) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        if not self.client.is_alive:
            raise ApiError(503, "the engine is not running", code="engine_down", retry_after_s=5)

    def begin(self, jobs: Sequence[Job], seat: Seat) -> Generation:
        """Hands jobs to the engine.

        Raises:
            ApiError: 400 for more scores than this process should hold at once.
            EngineDiedError: there is no engine any more.
        """

        def leave() -> None:
            seat.give_back(is_complete=generation.is_complete)

        generation = Generation(
            self.client, self.tokenizer.vocabulary, jobs, leave, client=seat.client, deadline=seat.deadline
        )
        try:
            check_scores(jobs)
            generation.start()
        except BaseException:
            generation.close()
            raise
        return generation

    def in_thread(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> Awaitable[R]:
        """Runs what would hold up the streams, such as tokenising, in one of few threads."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, functools.partial(fn, *args, **kwargs))

    def aside(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> Awaitable[R]:
        """The same of what no answer waits for, in a thread of its own: a text of megabytes takes it for seconds."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._side_thread, functools.partial(fn, *args, **kwargs))

    async def in_thread_with(self, seat: Seat, fn: Callable[..., R], *args: Any) -> R:
        """The same for a request that was let in: its seat is given back if this fails."""
        try:
            return await self.in_thread(fn, *args)
        except BaseException:
            seat.give_back()
            raise
