"""What every handler needs: plan, tokenizer, engine, metrics; and the checks before a request costs an engine step."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from formats.errors import FormatError
from formats.openai import SamplingRequest
from formats.plan import Plan
from gplan.core import SamplingParams
from gplan.serving.client import EngineClient
from gplan.serving.generation import Job
from gplan.serving.http.errors import ApiError
from gplan.serving.metrics import Metrics
from gplan.serving.protocol import Ready
from gplan.serving.tokenizer import ServedTokenizer

R = TypeVar("R")

MAX_BODY_BYTES = 4 << 20
QUEUE_PER_ROW = 16
"""Requests with the engine at most, per request row; beyond that a client is told to come back."""

_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_MASK = 2**63 - 1


@dataclass(slots=True, kw_only=True)
class Service:
    """One served plan.

    Attributes:
        model: the name that requests must give.
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
    is_draining: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_open(self) -> int:
        return self.plan.limits.max_batch * QUEUE_PER_ROW

    def now(self) -> int:
        """Seconds since 1970."""
        return int(time.time())

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise ApiError(
                404, f"the model {name!r} is not served here, {self.model!r} is", param="model", code="model_not_found"
            )

    def check_room(self, num_jobs: int) -> None:
        """
        Raises:
            ApiError: 503 while draining or without an engine, 429 where the queue is full.
        """
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        if not self.client.is_alive:
            raise ApiError(503, "the engine is not running", code="engine_down", retry_after_s=5)
        if self.client.num_open + num_jobs > self.max_open:
            raise ApiError(
                429,
                f"{self.client.num_open} requests are waiting or running; try again soon",
                code="queue_full",
                retry_after_s=1,
            )

    def jobs(
        self,
        request: SamplingRequest,
        prompt: Sequence[int],
        *,
        count: int,
        max_tokens: int | None,
        logprobs: int | None,
        param: str,
    ) -> list[Job]:
        """`count` answers to one prompt, checked against the model and the plan.

        Args:
            max_tokens: None for as many as fit.
            param: name of the prompt in the request, for errors.
        """
        limit = self._output_limit(prompt, max_tokens, param)
        if request.min_tokens is not None and request.min_tokens > limit:
            raise ApiError(
                400, f"min_tokens ({request.min_tokens}) is more than the {limit} tokens left", param="min_tokens"
            )
        seed = random.getrandbits(63) if request.seed is None else request.seed & _SEED_MASK
        params = [
            self._params(request, limit, logprobs, (seed + index * _SEED_STEP) & _SEED_MASK) for index in range(count)
        ]
        return [Job(tuple(prompt), each, request.stop_strings) for each in params]

    def _output_limit(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> int:
        max_len, vocab_size = self.plan.limits.max_len, self.plan.model.vocab_size
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        if max(prompt) >= vocab_size:
            raise ApiError(400, f"token id {max(prompt)} is outside the vocabulary of {vocab_size}", param=param)
        left = max_len - len(prompt)
        if left < (max_tokens or 1):
            wanted = f" and {max_tokens} tokens of output" if max_tokens else " leaves no room for output"
            raise ApiError(
                400,
                f"this model is served with at most {max_len} tokens; the prompt has {len(prompt)}{wanted}",
                param=param,
                code="context_length_exceeded",
            )
        return left if max_tokens is None else max_tokens

    def _params(self, request: SamplingRequest, limit: int, logprobs: int | None, seed: int) -> SamplingParams:
        stop_ids = set(request.stop_token_ids or ())
        if not request.ignore_eos:
            stop_ids |= self.eos_token_ids
        bias = request.logit_bias or {}
        vocab_size = self.plan.model.vocab_size
        for name, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids - self.eos_token_ids)):
            if ids and max(ids) >= vocab_size:
                raise ApiError(400, f"token id {max(ids)} is outside the vocabulary of {vocab_size}", param=name)
        return SamplingParams(
            max_tokens=limit,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            seed=seed,
            repetition_penalty=request.repetition_penalty or 1.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=tuple(bias.items()),
            logprobs=logprobs,
            stop_token_ids=frozenset(token for token in stop_ids if token < vocab_size),
            min_tokens=request.min_tokens or 0,
        )


async def read_body(request: Request) -> bytes:
    """The whole body, refused as soon as it is too long."""
    too_long = ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_long
    return bytes(body)


async def decode_body(request: Request, decode: Callable[[bytes], R]) -> R:
    """Reads and decodes a JSON body.

    Raises:
        ApiError: 400 with the parameter that is wrong, 413, or 415.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be application/json, not {kind}", code="unsupported_media_type")
    body = await read_body(request)
    try:
        return decode(body)
    except FormatError as error:
        raise ApiError(
            400, error.message, param=getattr(error, "path", None) or None, code=getattr(error, "code", None)
        ) from None


async def while_connected(request: Request, work: Awaitable[R]) -> R | None:
    """Runs `work`, and cancels it when the client goes; None then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def in_thread(fn: Callable[..., R], *args: Any, **kwargs: Any) -> Awaitable[R]:
    """Runs what would hold up the other streams in a thread."""
    return asyncio.to_thread(functools.partial(fn, *args, **kwargs))
