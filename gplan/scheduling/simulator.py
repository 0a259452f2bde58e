"""Traffic through the scheduler that serves, on a clock that runs by a plan's measured times.

Every decision is the scheduler's own. This module owns the clock, arrivals and the accounts: what ran at which size,
how long requests waited, how full the KV pool was. The same input gives the same report, to the bit.

Prompts share what a trace's `prefix_ids` say they share, where the plan has a prefix cache. Of answers nothing is known
that a prompt could begin with.

What bounds its speed: a step is some microseconds of Python, however long it lasts; a page given out adds one or two, a
request that comes and goes a hundred and more for its row, its pages and its place in the queue.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from formats.plan import Limits
from formats.trace import Trace
from gplan.core import Phase, Request, SamplingParams
from gplan.errors import GplanError
from gplan.scheduling.advance import Advance
from gplan.scheduling.report import PhaseReport, SimulationReport, distribution, milliseconds
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.times import PS_PER_US, PhaseTimes, StepTimes

PS_PER_S = 1_000_000 * PS_PER_US


def simulate(
    trace: Trace,
    scheduler: Scheduler,
    times: StepTimes,
    *,
    lag: int = 0,
) -> SimulationReport:
    """Serves a trace.

    Args:
        scheduler: a new one; it is used up.
        times: of every size that its limits allow.
        lag: steps whose results the host leaves unread while it schedules the next, 0 or 1. With 1, a step is
            scheduled while the one before runs, so a request waits for one more step to end, and what the host does
            per step is hidden unless it takes longer than the step before.

    Raises:
        GplanError: a request does not fit the limits; names it.
    """
    assert lag in (0, 1)
    _check(trace, scheduler.limits)
    run = _Run(trace, scheduler, times, lag)
    run.to_the_end()
    return run.report()


class _Accounts:
    """What is counted at every step."""

    def __init__(self) -> None:
        self.replayed = {phase: Counter[int]() for phase in Phase}
        self.eager = {phase: Counter[int]() for phase in Phase}
        self.busy_ps = dict.fromkeys(Phase, 0)
        self.gaps: Counter[int] = Counter()
        self.first_ps: list[int] = []
        self.latency_ps: list[int] = []
        self.page_ps = 0
        self.peak_pages = 0


class _Run:
    def __init__(self, trace: Trace, scheduler: Scheduler, times: StepTimes, lag: int) -> None:
        self._trace, self._scheduler, self._times, self._lag = trace, scheduler, times, lag
        self._next = 0
        self._arrivals = [round(request.arrival_s * PS_PER_S) for request in trace.requests]
        self._free_clients = trace.concurrency
        self._now = 0
        """The host's clock: when it decides the next step."""
        self._end = 0
        """When the device is done with every step so far."""
        self._unread: deque[tuple[int, int]] = deque()
        """(end, requests complete in it) of steps whose results the host has not read."""
        self._arrived_at: dict[str, int] = {}
        self._last_token_at: dict[str, int] = {}
        """Of preempted requests that have tokens."""
        self._beginnings = Counter(request.prefix_ids[0] for request in trace.requests if request.prefix_ids)
        self._block_tokens: dict[int, int] = {}
        self._accounts = _Accounts()

    def to_the_end(self) -> None:
        while True:
            self._arrive()
            step = self._scheduler.advance()
            if step is not None:
                self._launch(step)
                if len(self._unread) > self._lag:
                    self._read()
                if step.phase is Phase.DECODE and not step.complete:
                    self._repeat(step)
            elif self._unread:
                self._read()
            elif self._next < len(self._arrivals):
                self._now = self._arrivals[self._next]
            else:
                return

    def _read(self) -> None:
        """The host waits for the oldest step that it has not read."""
        end, complete = self._unread.popleft()
        self._now = max(self._now, end)
        self._free_clients += complete

    def _repeat(self, step: Advance) -> None:
        """Takes steps like `step` until something but lengths changes: what `to_the_end` would do, in less time."""
        repeat, times, gaps = self._scheduler.repeat, self._times.decode, self._accounts.gaps
        size, cached_tokens, pages = step.size, step.cached_tokens, step.pages
        lag, overhead, horizon = self._lag, times.host_ps, self._horizon()
        now, end = self._now, self._end
        count = busy = page_ps = 0
        complete: list[Request] = []
        fixed, cached_ps = times.fixed_ps(size, size), times.cached_ps[size] if times.cached_ps else 0
        duration = times.step_ps(size, size, cached_tokens)
        while not complete and now < horizon:
            repeated = repeat()
            if repeated is None:
                break
            more_pages, complete = repeated
            if cached_ps:
                cached_tokens += size
                duration = fixed + cached_ps * cached_tokens
                if duration < 1:
                    duration = 1
            count += 1
            pages += more_pages
            before, launched = end, now + overhead
            end = (launched if launched > before else before) + duration
            now = max(launched, before) if lag else end
            gap = end - before
            gaps[gap] = gaps.get(gap, 0) + size
            busy += duration
            page_ps += pages * duration
        if count:
            self._now, self._end = now, end
            self._account_for_repeated(size, count, busy, page_ps, pages)
            self._complete(complete, end)
            if lag:
                self._unread = deque([(end, len(complete))])
            else:
                self._free_clients += len(complete)

    def _account_for_repeated(self, size: int, count: int, busy: int, page_ps: int, pages: int) -> None:
        accounts = self._accounts
        eager = self._times.decode.is_eager(size, size)
        (accounts.eager if eager else accounts.replayed)[Phase.DECODE][size] += count
        accounts.busy_ps[Phase.DECODE] += busy
        accounts.page_ps += page_ps
        accounts.peak_pages = max(accounts.peak_pages, pages)

    def _horizon(self) -> float:
        """Until when nobody new can come while nobody completes."""
        if self._next == len(self._arrivals):
            return math.inf
        if self._trace.concurrency:
            return -math.inf if self._free_clients else math.inf
        return self._arrivals[self._next]

    def _complete(self, requests: Sequence[Request], end: int) -> None:
        for request in requests:
            self._accounts.latency_ps.append(end - self._arrived_at.pop(request.id))

    def _arrive(self) -> None:
        """Hands over who has come by now; with a fixed number of clients, one request for each that is free."""
        clients = self._trace.concurrency > 0
        while self._next < len(self._arrivals):
            if clients and not self._free_clients:
                return
            if not clients and self._arrivals[self._next] > self._now:
                return
            arrival = self._now if clients else self._arrivals[self._next]
            self._free_clients -= clients
            self._add(self._next, arrival)
            self._next += 1

    def _add(self, index: int, arrival: int) -> None:
        asked = self._trace.requests[index]
        name = str(index)
        self._arrived_at[name] = arrival
        self._scheduler.add(
            Request(
                id=name,
                prompt_len=asked.input_tokens,
                tokens=self._prompt(index),
                is_unique=not asked.prefix_ids or self._beginnings[asked.prefix_ids[0]] == 1,
                params=SamplingParams(max_tokens=asked.output_tokens),
            )
        )

    def _prompt(self, index: int) -> list[int]:
        """Tokens that agree with those of other prompts as far as the trace says: a number for each block it names, and
        one of the prompt's own for the rest."""
        asked, block = self._trace.requests[index], self._trace.prefix_block_tokens
        tokens: list[int] = []
        for prefix_id in asked.prefix_ids:
            tokens += [self._block_tokens.setdefault(prefix_id, len(self._block_tokens) + 1)] * block
        del tokens[asked.input_tokens :]
        return tokens + [-1 - index] * (asked.input_tokens - len(tokens))

    def _launch(self, step: Advance) -> None:
        accounts, phase = self._accounts, step.phase
        times = self._times.decode if phase is Phase.DECODE else self._times.prefill
        self._now += times.host_ps
        start, before = max(self._now, self._end), self._end
        duration = times.step_ps(step.size, step.num_requests, step.cached_tokens, step.pairs)
        end = self._end = start + duration
        eager = times.is_eager(step.size, step.num_requests)
        (accounts.eager if eager else accounts.replayed)[phase][step.size] += 1
        accounts.busy_ps[phase] += duration
        if step.num_decodes:
            accounts.gaps[end - before] += step.num_decodes
        for request in step.preempted:
            if len(request.tokens) > request.prompt_len:
                self._last_token_at.setdefault(request.id, before)
        for request in step.prompts:
            self._first_token(request.id, end)
        self._complete(step.complete, end)
        accounts.page_ps += step.pages * duration
        accounts.peak_pages = max(accounts.peak_pages, step.pages)
        self._unread.append((end, len(step.complete)))

    def _first_token(self, name: str, end: int) -> None:
        """The first token after a prompt: of the request, or since it was preempted."""
        last = self._last_token_at.pop(name, None)
        if last is None:
            self._accounts.first_ps.append(end - self._arrived_at[name])
        else:
            self._accounts.gaps[end - last] += 1

    def report(self) -> SimulationReport:
        accounts, requests = self._accounts, self._trace.requests
        prefixes = self._scheduler.prefix_counts
        duration_s = (self._end - self._arrivals[0]) / PS_PER_S if requests else 0.0
        busy = sum(accounts.busy_ps.values())
        output_tokens = sum(request.output_tokens for request in requests)
        phases = {phase: _phase_report(phase, self._times.phase(phase), accounts) for phase in Phase}
        return SimulationReport(
            num_requests=len(requests),
            input_tokens=sum(request.input_tokens for request in requests),
            output_tokens=output_tokens,
            num_steps=sum(report.replayed + report.eager for report in phases.values()),
            duration_s=duration_s,
            busy_s=busy / PS_PER_S,
            requests_per_s=len(requests) / duration_s if duration_s else 0.0,
            output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
            ttft_ms=distribution((value, 1) for value in accounts.first_ps),
            inter_token_ms=distribution(accounts.gaps.items()),
            latency_ms=distribution((value, 1) for value in accounts.latency_ps),
            decode=phases[Phase.DECODE],
            prefill=phases[Phase.PREFILL],
            preemptions=self._scheduler.num_preemptions,
            kv_pages=self._scheduler.num_pages,
            kv_pages_mean=accounts.page_ps / busy if busy else 0.0,
            kv_pages_peak=accounts.peak_pages,
            prefix_hits=prefixes.hits,
            prefix_hit_tokens=prefixes.hit_tokens,
        )


def _phase_report(phase: Phase, times: PhaseTimes, accounts: _Accounts) -> PhaseReport:
    replayed, eager = accounts.replayed[phase], accounts.eager[phase]
    padding = sum(n * times.padding_ps(size) for size, n in replayed.items())
    return PhaseReport(
        phase=phase.value,
        steps=tuple(sorted((replayed + eager).items())),
        replayed=replayed.total(),
        eager=eager.total(),
        padding_rows=sum(n * (times.bucket[size] - size) for size, n in replayed.items()),
        padding_ms=milliseconds(padding),
        busy_ms=milliseconds(accounts.busy_ps[phase]),
    )


def _check(trace: Trace, limits: Limits) -> None:
    for index, request in enumerate(trace.requests):
        if request.input_tokens + request.output_tokens > limits.max_len:
            raise GplanError(
                f"request {index} of the trace has {request.input_tokens} + {request.output_tokens} tokens, "
                f"the maximum length is {limits.max_len}",
                "Truncate the trace to the maximum length.",
            )
