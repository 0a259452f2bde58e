"""The engine process: schedules, launches, collects and reports. It alone touches the device.

Steps are kept in flight as the executor asks (`result_lag`): where launching is not running, step N + 1 is scheduled
and prepared while step N runs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from formats.plan import Limits
from gplan.core import Batch, FinishReason, Request, ShapeKey
from gplan.graphs.executor import PromptLogprobs, Step, StepResult
from gplan.graphs.masking import TokenMask
from gplan.memory.failures import is_shortage
from gplan.scheduling.packing import Packer
from gplan.scheduling.scheduler import Scheduler
from gplan.serving.grammar.constraints import Constraints
from gplan.serving.protocol import Abort, Add, Drain, Failed, FromEngine, Idle, Output, Outputs, StepStats, ToEngine

CALM_STEPS = 32
"""How many steps must go well, the first time that memory ran out, before twice as many requests run at once."""

IDLE_WAIT_MS = 200
"""How long an idle engine waits for a message before it looks whether its parent still lives."""

COMPILE_WAIT_MS = 2
"""The same while it waits for nothing but a grammar."""


class Executes(Protocol):
    """The part of an executor that the loop needs."""

    @property
    def result_lag(self) -> int: ...

    def launch(self, batch: Batch, mask: Callable[[], TokenMask | None] | None = None) -> Step: ...

    def collect(self, step: Step) -> StepResult: ...


class Channel(Protocol):
    """Messages from and to the HTTP process."""

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """Messages that have arrived; waits for one up to `wait_ms`."""

    def send(self, message: FromEngine) -> None: ...


class Engine:
    """Serves requests until it is told to drain.

    Args:
        is_orphan: whether nobody is left to serve.
        constraints: of requests that have a grammar.
        look: called every round; what it returns now and then is sent.
        packer: cuts prompts to the plan's buckets.
    """

    def __init__(
        self,
        executor: Executes,
        limits: Limits,
        num_pages: int,
        channel: Channel,
        is_orphan: Callable[[], bool],
        constraints: Constraints | None = None,
        look: Callable[[], FromEngine | None] = lambda: None,
        packer: Packer | None = None,
    ) -> None:
        self._executor, self._channel, self._is_orphan, self._look = executor, channel, is_orphan, look
        self._constraints = constraints or Constraints(None)
        self._scheduler = Scheduler(limits, num_pages, packer)
        self._requests: dict[str, Request] = {}
        self._flying: deque[Step] = deque()
        self._read: dict[Step, StepResult] = {}
        """Results of flying steps that a mask needed early."""
        self._is_draining = False
        self._reported_idle = True
        self._max_batch = limits.max_batch
        self._calm_steps, self._calm_needed = 0, CALM_STEPS // 2

    def run(self) -> None:
        """Until drained, or orphaned."""
        while not (self._is_draining and self._is_idle):
            if self._is_orphan():
                return
            self._receive(self._wait_ms)
            self._schedule_compiled()
            self._step()
            if (seen := self._look()) is not None:
                self._channel.send(seen)

    @property
    def _is_idle(self) -> bool:
        return not self._flying and not self._scheduler.has_work and not self._constraints.is_compiling

    @property
    def _wait_ms(self) -> int:
        if self._flying or self._scheduler.has_work:
            return 0
        return COMPILE_WAIT_MS if self._constraints.is_compiling else IDLE_WAIT_MS

    def _receive(self, wait_ms: int) -> None:
        for message in self._channel.receive(wait_ms):
            match message:
                case Add():
                    self._add(message)
                case Abort():
                    for name in message.ids:
                        self._abort(name)
                case Drain():
                    self._is_draining = True

    def _add(self, message: Add) -> None:
        request = Request(
            message.id,
            len(message.prompt),
            message.prompt,
            message.params,
            arrival=time.monotonic(),
            client=message.client,
        )
        self._requests[request.id] = request
        if request.params.grammar:
            self._constraints.begin(request)
        else:
            self._scheduler.add(request)
        self._reported_idle = False

    def _abort(self, name: str) -> None:
        if self._requests.pop(name, None) is not None:
            self._scheduler.abort(name)
            self._constraints.forget(name)

    def _schedule_compiled(self) -> None:
        """Schedules requests whose grammars are compiled, and ends those whose grammars cannot be."""
        for request in self._constraints.take_compiled():
            self._scheduler.add(request)
        self._end_failed()

    def _end_failed(self) -> None:
        """Ends requests whose grammars failed."""
        for request, why in self._constraints.take_failed():
            if self._serves(request):
                self._fail(request, why)

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        assert batch is not None or self._flying or not self._scheduler.has_work, "requests wait, and nothing can run"
        if batch is not None:
            self._launch(batch)
            self._end_failed()  # before the tokens are read that were drawn without their grammars
        keep = self._executor.result_lag if batch is not None else 0
        while len(self._flying) > keep:
            self._collect(self._flying.popleft())
        if self._is_idle and not self._reported_idle:
            self._reported_idle = True
            self._channel.send(Idle(self._scheduler.num_held_pages, self._scheduler.prefix_counts.cached_pages))

    def _launch(self, batch: Batch) -> None:
        mask = partial(self._mask, batch) if self._constraints.applies_to(batch) else None
        try:
            with self._naming(batch):
                self._flying.append(self._executor.launch(batch, mask))
        except Exception as error:
            if not is_shortage(error):
                raise
            self._run_fewer(batch)
        else:
            self._calm_steps += 1
            if self._calm_steps >= self._calm_needed and self._scheduler.max_running < self._max_batch:
                self._scheduler.max_running *= 2
                self._calm_steps = 0

    def _run_fewer(self, batch: Batch) -> None:
        """Memory ran out for a step. Its requests are computed again, half as many at once; one that had the step to
        itself fails. More run again after a number of steps that grows with every time, so that requests get on."""
        while self._flying:
            self._collect(self._flying.popleft())
        again = self._scheduler.take_back(batch)
        if batch.num_requests > 1:
            self._scheduler.max_running = batch.num_requests // 2
        elif again:
            self._fail(again[0], f"there is no memory for a {batch.phase} step of {batch.num_tokens} tokens")
        self._calm_steps, self._calm_needed = 0, 2 * self._calm_needed
        limit = self._scheduler.max_running
        print(f"out of memory in a {batch.phase} step; {limit} requests run at once for now", file=sys.stderr)

    def _fail(self, request: Request, why: str) -> None:
        self._abort(request.id)
        self._channel.send(Failed(request.id, why))

    def _mask(self, batch: Batch) -> TokenMask | None:
        """What may follow in a batch whose forward pass is on its way: waits for the tokens of the steps before it."""
        for step in self._flying:
            self._read[step] = self._result_of(step)
        return self._constraints.mask(batch, [(step.batch, self._read[step].tokens) for step in self._flying])

    def _result_of(self, step: Step) -> StepResult:
        if step in self._read:
            return self._read[step]
        with self._naming(step.batch, step.key):
            return self._executor.collect(step)

    def _collect(self, step: Step) -> None:
        result = self._result_of(step)
        self._read.pop(step, None)
        before = [len(chunk.request.tokens) for chunk in step.batch.chunks if chunk.samples]
        finished = {request.id for request in self._scheduler.update(step.batch, result.tokens)}
        sampling = [chunk.request for chunk in step.batch.chunks if chunk.samples]
        outputs = [self._prompt_output(scored) for scored in result.prompt_logprobs if self._serves(scored.request)]
        for index, (request, known) in enumerate(zip(sampling, before, strict=True)):
            if not self._serves(request):
                continue
            output = self._output(request, request.tokens[known:], result, index, request.id in finished)
            if output is not None:
                outputs.append(output)
            if request.id in finished:
                del self._requests[request.id]
                self._constraints.forget(request.id)
        self._channel.send(Outputs(outputs, self._stats(step, result, sum(len(o.tokens) for o in outputs))))

    def _serves(self, request: Request) -> bool:
        """Whether somebody waits for the request still."""
        return self._requests.get(request.id) is request

    def _prompt_output(self, scored: PromptLogprobs) -> Output:
        logprobs = [(entry.logprob, list(entry.top)) for entry in scored.tokens]
        return Output(scored.request.id, [], [], "", logprobs, scored.start)

    def _output(
        self, request: Request, tokens: list[int], result: StepResult, index: int, is_finished: bool
    ) -> Output | None:
        if not tokens and not is_finished:
            return None
        entry = result.logprobs[index]
        logprobs = [(entry.logprob, list(entry.top))] if entry is not None and tokens else []
        reason = (request.finish_reason or FinishReason.STOP).value if is_finished else ""
        return Output(request.id, tokens, logprobs, reason)

    def _stats(self, step: Step, result: StepResult, output_tokens: int) -> StepStats:
        outcome, scheduler = result.outcome, self._scheduler
        prefixes = scheduler.prefix_counts
        return StepStats(
            phase=outcome.phase.value,
            size=outcome.size,
            key="" if outcome.key is None else str(outcome.key),
            reason=outcome.reason,
            padding_rows=outcome.padding_rows,
            elapsed_s=outcome.elapsed_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            pages_used=scheduler.num_held_pages,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=sum(c.length for c in step.batch.chunks if c.start < c.request.prompt_len),
            output_tokens=output_tokens,
            replay_us=outcome.replay_us,
            cached_tokens=outcome.cached_tokens,
            prefix_lookups=prefixes.lookups,
            prefix_hits=prefixes.hits,
            prefix_hit_tokens=prefixes.hit_tokens,
            pages_evicted=prefixes.evicted_pages,
            pages_cached=prefixes.cached_pages,
        )

    @contextmanager
    def _naming(self, batch: Batch, key: ShapeKey | None = None) -> Iterator[None]:
        """Adds to an error which step it happened in, and which were under way: a device may tell late."""
        try:
            yield
        except Exception as error:
            if key is not None:
                error.add_note(f"replayed from {key}")
            size = f"{batch.num_requests} requests, {batch.num_tokens} tokens"
            error.add_note(f"in a {batch.phase} step of {size}")
            if self._flying:
                keys = ", ".join("an eager step" if step.key is None else str(step.key) for step in self._flying)
                error.add_note(f"under way: {keys}")
            raise
