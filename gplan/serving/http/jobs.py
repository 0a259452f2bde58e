"""From a request and a prompt to what the engine is asked: all that depends on model and plan is checked here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from formats.openai import SamplingRequest
from gplan.core import SamplingParams
from gplan.serving.generation import Job
from gplan.serving.http.errors import ApiError

MAX_SCORES = 4 << 20
"""Log probabilities that one request may ask for in all: they are the only part of an answer that grows large."""

_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_MASK = 2**63 - 1
_NEGATIVE = 0x5851F42D4C957F2D


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMaker:
    """What the checks need to know of model and plan."""

    max_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def make(
        self,
        request: SamplingRequest,
        prompt: Sequence[int],
        *,
        count: int,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        param: str,
        continues_prompt: bool,
        prompt_logprobs: int | None = None,
        grammar: str = "",
    ) -> list[Job]:
        """`count` answers to one prompt. With a seed, the first is what it would be alone.

        Args:
            max_tokens: as the request says it, None where it does not; 0 for nothing but the prompt.
            default_max_tokens: what is generated then, if it fits; None for as many as fit.
            param: name of the prompt in the request, for errors.
            grammar: what the answers must follow.

        Raises:
            ApiError: 400; names the parameter and the figures.
        """
        left = self._room(prompt, max_tokens, param)
        limit = max_tokens if max_tokens is not None else min(left, default_max_tokens or left)
        if request.min_tokens is not None and request.min_tokens > limit:
            raise ApiError(
                400, f"min_tokens ({request.min_tokens}) is more than the {limit} tokens left", param="min_tokens"
            )
        seed = random.getrandbits(63) if request.seed is None else request.seed
        # A negative seed is as good as any; its sign must not be lost.
        seed = seed if seed >= 0 else (~seed * _SEED_STEP) & _SEED_MASK ^ _NEGATIVE
        seeds = [(seed + index * _SEED_STEP) & _SEED_MASK for index in range(count)]
        shared = replace(
            self._params(request, max(limit, 1)), logprobs=logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
        )
        stops, ids = request.stop_strings, tuple(prompt)
        params = [replace(shared, seed=each) for each in seeds]
        return [Job(ids, each, stops, continues_prompt, is_prompt_only=limit == 0) for each in params]

    def _room(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> int:
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        self._check_ids(prompt, param)
        left = self.max_len - len(prompt)
        if left < (max_tokens or 1):
            wanted = " and leaves no room for output" if max_tokens is None else f", max_tokens is {max_tokens}"
            why = f"the prompt has {len(prompt)} tokens{wanted}"
            raise self.too_long(why, param if left < 1 else "max_tokens")
        return left

    def too_long(self, why: str, param: str) -> ApiError:
        message = f"this model is served with at most {self.max_len} tokens in all; {why}"
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and max(ids) >= self.vocab_size:
            raise ApiError(
                400,
                f"token id {max(ids)} is outside the vocabulary of {self.vocab_size}",
                param=param,
                code="invalid_token_id",
            )

    def _params(self, request: SamplingRequest, limit: int) -> SamplingParams:
        bias = request.logit_bias or {}
        self._check_ids(tuple(bias), "logit_bias")
        self._check_ids(request.stop_token_ids or (), "stop_token_ids")
        stop_ids = frozenset(request.stop_token_ids or ())
        if not request.ignore_eos:
            stop_ids |= {token for token in self.eos_token_ids if token < self.vocab_size}
        return SamplingParams(
            max_tokens=limit,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=tuple(bias.items()),
            stop_token_ids=stop_ids,
            min_tokens=request.min_tokens or 0,
        )


def check_scores(jobs: Sequence[Job]) -> None:
    """
    Raises:
        ApiError: 400 for more log probabilities than this process should hold for one request.
    """
    wanted = sum(_num_scores(job) for job in jobs)
    if wanted > MAX_SCORES:
        raise ApiError(
            400,
            f"up to {wanted:,} log probabilities in one request; at most {MAX_SCORES:,} here: "
            "ask for fewer answers, tokens or alternatives",
            param="logprobs",
        )


def _num_scores(job: Job) -> int:
    params, count = job.params, 0
    if params.logprobs is not None:
        count += params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        count += len(job.prompt) * (params.prompt_logprobs + 1)
    return count
