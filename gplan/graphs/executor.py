"""Runs scheduled steps: picks the runner, replays or runs eagerly, samples, and hands the tokens over.

`launch` returns once the step is on its way; `collect` waits for its tokens. The caller may keep `result_lag` steps
uncollected, so that the host schedules a step while the device runs the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gplan.core import Batch, Phase, Request, ShapeKey
from gplan.graphs.admission import Verdict
from gplan.graphs.capture.base import GraphDevice, Stopwatch
from gplan.graphs.decode import DecodeRunner
from gplan.graphs.forward import ForwardParts
from gplan.graphs.guard import AddressGuard
from gplan.graphs.kv_check import KVCheck
from gplan.graphs.masking import TokenMask
from gplan.graphs.prefill import PrefillRunner
from gplan.graphs.prompt_scores import PromptScorer, predicted_part
from gplan.graphs.runner import PhaseRunner
from gplan.graphs.sampling import MAX_LOGPROBS, Sampler
from gplan.graphs.variants import draw_of


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token, and the likeliest (token, log probability) at its place, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Of the tokens of a prompt that a chunk predicts: the first is at position `start`."""

    request: Request
    start: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ran: replayed from `key`, or eagerly for `reason`.

    Attributes:
        size: requests (decode) or tokens (prefill) of the batch.
        padding_rows: rows of the bucket beyond them.
        elapsed_s: from launch until the host had the tokens.
        replay_us: device time of the replay where it was timed, else None.
        cached_tokens: of a timed replay, tokens before those of the step, over its requests.
    """

    phase: Phase
    size: int
    key: ShapeKey | None
    reason: str
    padding_rows: int
    elapsed_s: float
    replay_us: float | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of the chunks that sample, in batch order; `logprobs` is aligned with them.

    Attributes:
        prompt_logprobs: of tokens of prompts, by chunk, where asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    outcome: Outcome
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A launched step. Collect steps in the order in which they were launched."""

    batch: Batch
    key: ShapeKey | None
    reason: str
    launched_at: float
    tokens: Callable[[], Tensor]
    logprobs: Callable[[], Tensor] | None
    stopwatch: Stopwatch | None = None
    prompt_logprobs: Callable[[], Tensor] | None = None


TIMED_EVERY = 16
"""One replay in so many is timed: two events on the stream, read once the step's tokens are there."""


class Executor:
    """One model on one device, ready to run steps.

    Args:
        check_addresses: verify before every replay that no address of its graph has moved.
    """

    def __init__(
        self,
        device: GraphDevice,
        parts: ForwardParts,
        decode: DecodeRunner,
        prefill: PrefillRunner,
        sampler: Sampler,
        guard: AddressGuard,
        *,
        check_addresses: bool = False,
    ) -> None:
        self.device, self.parts, self.sampler, self.guard = device, parts, sampler, guard
        self.decode, self.prefill = decode, prefill
        self.check_addresses = check_addresses
        self._num_replays = 0
        self._prompt_scorer = PromptScorer(parts)

    @property
    def result_lag(self) -> int:
        return self.device.result_lag

    @property
    def keys(self) -> tuple[ShapeKey, ...]:
        return (*self.decode.setup.keys, *self.prefill.setup.keys)

    def check_kv(self) -> KVCheck:
        """From now on, looks at what every step reads and writes of the KV pool. The pool's last `CANARY_PAGES` pages
        must not be given out any more."""
        check = KVCheck(self.parts.kv_pool, self.parts.buffers["kv_slots"])
        self.decode.kv_check = self.prefill.kv_check = check
        return check

    def runner(self, phase: Phase) -> PhaseRunner:
        return self.decode if phase is Phase.DECODE else self.prefill

    @torch.no_grad()
    def launch(
        self, batch: Batch, mask: Callable[[], TokenMask | None] | None = None, *, verdict: Verdict | None = None
    ) -> Step:
        """Starts a step.

        Args:
            mask: tokens that may follow, its rows being indices of the chunks that sample. Called when the forward pass
                is on its way and before a token is drawn, so that it may collect earlier steps meanwhile.
            verdict: how it runs, among the ways in which it may; as its runner says, unless given.

        Raises:
            GuardError: an address of the step's graph has moved; only where addresses are checked.
            RuntimeError, MemoryError: memory ran out (`is_shortage`). The step is void, and its requests may be
                scheduled again after they gave their pages back. With a note, as all errors, of how it was run.
        """
        launched_at = time.perf_counter()
        verdict = verdict or self.runner(batch.phase).can_run(batch)
        try:
            return self._launch(batch, verdict, launched_at, mask)
        except Exception as error:
            error.add_note("run eagerly" if verdict.key is None else f"replayed from {verdict.key}")
            raise

    def _launch(
        self, batch: Batch, verdict: Verdict, launched_at: float, mask: Callable[[], TokenMask | None] | None
    ) -> Step:
        if verdict.key is not None and self.check_addresses:
            self.guard.check(verdict.key)
        if batch.phase is Phase.DECODE:
            self.sampler.ensure_last_tokens(batch.chunks)
        stopwatch = self._stopwatch(verdict)
        if verdict.key is not None and draw_of(verdict.key):
            _, drawn = self.decode.draw(batch, verdict.key)
            if stopwatch is not None:
                stopwatch.stop()
            tokens = self.device.read_later(drawn)
            self.sampler.note_drawn(batch.chunks)
            return Step(batch, verdict.key, verdict.reason, launched_at, tokens, None, stopwatch)
        logits = self.runner(batch.phase).execute(batch, verdict)
        if stopwatch is not None:
            stopwatch.stop()
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        tokens, logprobs = _no_tokens, None
        if sampling:
            draw = self.sampler.sample(logits, sampling, None if mask is None else mask())
            tokens = self.device.read_later(draw.tokens)
            logprobs = None if draw.logprobs is None else self.device.read_later(draw.logprobs)
        # After sampling, whose logits it writes over.
        key = verdict.key
        is_finished = key is None or not self.runner(batch.phase).by_request(key).ends
        scores = self._prompt_scorer.score(batch, is_finished=is_finished)
        prompts = None if scores is None else self.device.read_later(scores)
        return Step(batch, verdict.key, verdict.reason, launched_at, tokens, logprobs, stopwatch, prompts)

    def _stopwatch(self, verdict: Verdict) -> Stopwatch | None:
        """One that runs, where this replay is timed."""
        if verdict.key is None:
            return None
        self._num_replays += 1
        return self.device.stopwatch() if self._num_replays % TIMED_EVERY == 0 else None

    def collect(self, step: Step) -> StepResult:
        """Waits for a step's tokens."""
        tokens = tuple(step.tokens().tolist())
        logprobs: tuple[TokenLogprobs | None, ...] = (None,) * len(tokens)
        if step.logprobs is not None:
            wanted = [chunk.request.params.logprobs for chunk in step.batch.chunks if chunk.samples]
            logprobs = tuple(
                None if count is None else _token_logprobs(row, count)
                for row, count in zip(step.logprobs().tolist(), wanted, strict=True)
            )
        size = step.batch.size
        outcome = Outcome(
            phase=step.batch.phase,
            size=size,
            key=step.key,
            reason=step.reason,
            padding_rows=0 if step.key is None else step.key.size - size,
            elapsed_s=time.perf_counter() - step.launched_at,
            replay_us=None if step.stopwatch is None else step.stopwatch.read_us(),
            cached_tokens=0 if step.stopwatch is None else sum(chunk.start for chunk in step.batch.chunks),
        )
        prompts = () if step.prompt_logprobs is None else _prompt_logprobs(step.batch, step.prompt_logprobs())
        return StepResult(tokens, logprobs, outcome, prompts)

    def close(self) -> None:
        """Drops graphs and workspace; the executor is dead after it."""
        self.decode.close()
        self.prefill.close()
        self.device.close()


def _no_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _token_logprobs(row: list[float], count: int) -> TokenLogprobs:
    width = (len(row) - 1) // 2
    assert count <= MAX_LOGPROBS
    top = tuple((int(token), score) for token, score in zip(row[1 + width :], row[1 : 1 + width], strict=True))
    return TokenLogprobs(row[0], top[:count])


def _prompt_logprobs(batch: Batch, scores: Tensor) -> tuple[PromptLogprobs, ...]:
    rows, found = iter(scores.tolist()), []
    for chunk in batch.chunks:
        part, count = predicted_part(chunk), chunk.request.params.prompt_logprobs
        if part and count is not None:
            tokens = tuple(_token_logprobs(next(rows), count) for _ in part)
            found.append(PromptLogprobs(chunk.request, part.start, tokens))
    return tuple(found)
