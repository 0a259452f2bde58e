"""The simulator against an engine's loop over real batches, and against figures worked out by hand."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from formats.measurements import Costs
from formats.trace import Trace, TraceRequest
from gplan.core import Batch, Phase, Request, SamplingParams
from gplan.errors import GplanError
from gplan.scheduling.report import SimulationReport, distribution
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate
from gplan.scheduling.times import StepTimes, phase_times, prompt_pairs, reads_us, rows_us
from tests.scheduling.serve import limits, packer

MAX_LEN = 20


def trace(*requests: tuple[float, int, int], concurrency: int = 0) -> Trace:
    made = tuple(TraceRequest(arrival_s=at, input_tokens=tokens, output_tokens=out) for at, tokens, out in requests)
    return Trace(requests=made, concurrency=concurrency)


def times(
    max_batch: int, chunk: int, *, cached_us: float = 0.0, slots: int = 0, host_us: float = 0.0, beyond_us: float = 0.0
) -> StepTimes:
    """Decode of n takes 100 + n us from buckets of 2, 4, ..., eagerly 300; prefill of n 200 + 2 n us."""
    decoding = Costs(
        context=0, cached_us=((1, cached_us), (4, cached_us / 2)), host_us=host_us, beyond_us=((1, beyond_us),)
    )
    prompting = replace(decoding, pair_us=cached_us / 2)
    decode_us = {n: 100.0 + n for n in range(1, max_batch + 1)}
    prefill_us = {n: 200.0 + 2 * n for n in range(1, chunk + 1)}
    decode = phase_times(
        max_batch,
        [*range(2, max_batch, 2), max_batch],
        decode_us,
        dict.fromkeys(decode_us, 300.0),
        eager_sizes=((3, 3),),
        costs=decoding,
        max_batch=max_batch,
    )
    prefill = phase_times(
        chunk,
        [*range(4, chunk, 4), chunk],
        prefill_us,
        {1: 500.0},
        costs=prompting,
        rows_us=rows_us(Phase.PREFILL, prompting, chunk, MAX_LEN),
        reads_us=reads_us(Phase.PREFILL, prompting, chunk, MAX_LEN),
        request_slots=slots,
        max_batch=max_batch,
    )
    return StepTimes(decode, prefill)


def prompt(asked: TraceRequest, block: int, index: int) -> list[int]:
    """Blocks of one number each where the trace names them; a number of its own for the rest."""
    named = [100 + prefix_id for prefix_id in asked.prefix_ids for _ in range(block)]
    return (named + [-1 - index] * asked.input_tokens)[: asked.input_tokens]


class Engine:
    """The engine's loop on a virtual clock, step by step over real batches: what the simulator must equal."""

    def __init__(self, trace: Trace, scheduler: Scheduler, times: StepTimes, lag: int) -> None:
        self.trace, self.scheduler, self.times, self.lag = trace, scheduler, times, lag
        self.steps: Counter[tuple[Phase, int, bool]] = Counter()
        self.busy = self.page_ps = self.peak = self.end = self.now = 0
        self.first: list[int] = []
        self.gaps: Counter[int] = Counter()
        self.latency: list[int] = []
        self.arrived: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.decoding: dict[str, int] = {}
        """Who is past its prompt, and how often it had been preempted then."""

    def run(self) -> None:
        arrivals = deque(
            (round(request.arrival_s * 1e12), str(index), request) for index, request in enumerate(self.trace.requests)
        )
        clients, unread = self.trace.concurrency, deque[tuple[int, Batch]]()
        while arrivals or unread or self.scheduler.has_work:
            while arrivals and (clients > 0 if self.trace.concurrency else arrivals[0][0] <= self.now):
                at, name, asked = arrivals.popleft()
                clients -= 1
                self.arrived[name] = self.now if self.trace.concurrency else at
                params = SamplingParams(max_tokens=asked.output_tokens)
                tokens = prompt(asked, self.trace.prefix_block_tokens, int(name))
                self.scheduler.add(Request(id=name, prompt_len=len(tokens), tokens=tokens, params=params))
            batch = self.scheduler.schedule()
            if batch is not None:
                unread.append((self.launch(batch), batch))
            if unread and (batch is None or len(unread) > self.lag):
                end, done = unread.popleft()
                self.now = max(self.now, end)
                sampled = [chunk for chunk in done.chunks if chunk.samples]
                for request in self.scheduler.update(done, [0] * len(sampled)):
                    self.latency.append(self.last[request.id] - self.arrived[request.id])
                    clients += 1
            elif batch is None and arrivals:
                self.now = arrivals[0][0]

    def launch(self, batch: Batch) -> int:
        times = self.times.phase(batch.phase)
        self.now += times.host_ps
        decodes = [self.decoding.get(chunk.request.id) == chunk.request.num_preemptions for chunk in batch.chunks]
        cached = sum(chunk.start for chunk, does in zip(batch.chunks, decodes, strict=True) if does)
        prompts = [chunk for chunk, does in zip(batch.chunks, decodes, strict=True) if not does]
        pairs = sum(prompt_pairs(chunk.start, chunk.length) for chunk in prompts)
        self.decoding |= {c.request.id: c.request.num_preemptions for c in prompts if c.samples}
        duration = times.step_ps(batch.size, batch.num_requests, cached, pairs)
        self.end = max(self.end, self.now) + duration
        self.steps[batch.phase, batch.size, times.is_eager(batch.size, batch.num_requests)] += 1
        self.busy += duration
        pages = self.scheduler.num_held_pages
        self.page_ps += pages * duration
        self.peak = max(self.peak, pages)
        for chunk in batch.chunks:
            if chunk.samples:
                last = self.last.get(chunk.request.id)
                if last is None:
                    self.first.append(self.end - self.arrived[chunk.request.id])
                else:
                    self.gaps[self.end - last] += 1
                self.last[chunk.request.id] = self.end
        return self.end


def assert_equal(report: SimulationReport, engine: Engine) -> None:
    assert report.ttft_ms == distribution((value, 1) for value in engine.first)
    assert report.latency_ms == distribution((value, 1) for value in engine.latency)
    assert report.inter_token_ms == distribution(engine.gaps.items())
    assert report.busy_s == engine.busy / 1e12
    assert report.kv_pages_mean == engine.page_ps / engine.busy
    assert report.kv_pages_peak == engine.peak
    assert report.preemptions == engine.scheduler.num_preemptions
    counts = engine.scheduler.prefix_counts
    assert (report.prefix_hits, report.prefix_hit_tokens) == (counts.hits, counts.hit_tokens)
    for phase, found in ((Phase.DECODE, report.decode), (Phase.PREFILL, report.prefill)):
        steps: Counter[int] = Counter()
        for (where, size, _), count in engine.steps.items():
            steps[size] += count if where is phase else 0
        assert found.steps == tuple(sorted((+steps).items()))
        eager = sum(count for (where, _, eager), count in engine.steps.items() if where is phase and eager)
        assert (found.eager, found.replayed) == (eager, steps.total() - eager)


def with_prefixes(served: Trace, ids: list[list[int]], block: int) -> Trace:
    """As many of the ids as each prompt has blocks."""
    named = tuple(
        msgspec.structs.replace(request, prefix_ids=tuple(each[: -(-request.input_tokens // block)]))
        for request, each in zip(served.requests, ids, strict=False)
    )
    return msgspec.structs.replace(served, requests=named, prefix_block_tokens=block)


requests = st.lists(
    st.tuples(st.floats(0, 0.02), st.integers(1, MAX_LEN - 1), st.integers(1, MAX_LEN)).map(
        lambda r: (round(r[0], 6), r[1], min(r[2], MAX_LEN - r[1]))
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=300)
@given(
    asked=requests,
    clients=st.integers(0, 3),
    lag=st.integers(0, 1),
    host_us=st.sampled_from([0.0, 7.0, 150.0]),
    beyond_us=st.sampled_from([0.0, 11.0]),
    max_batch=st.integers(1, 5),
    more_chunk=st.integers(0, 12),
    page_size=st.sampled_from([1, 2, 4, 16]),
    more_pages=st.integers(0, 10),
    cached_us=st.sampled_from([0.0, 0.5]),
    slots=st.integers(0, 2),
    packs=st.booleans(),
    block=st.integers(1, 6),
    ids=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=14, max_size=14),
    caches=st.booleans(),
)
def test_a_simulation_is_the_engines_loop(
    asked: list[tuple[float, int, int]],
    clients: int,
    lag: int,
    host_us: float,
    beyond_us: float,
    max_batch: int,
    more_chunk: int,
    page_size: int,
    more_pages: int,
    cached_us: float,
    slots: int,
    packs: bool,
    block: int,
    ids: list[list[int]],
    caches: bool,
) -> None:
    plain = trace(*((0.0, *lengths[1:]) if clients else lengths for lengths in sorted(asked)), concurrency=clients)
    served = with_prefixes(plain, ids, block)
    bounds = limits(
        max_batch=max_batch,
        max_len=MAX_LEN,
        chunk=max_batch + more_chunk,
        page_size=page_size,
        prefix_cache=caches,
    )
    num_pages = 1 + -(-MAX_LEN // page_size) + more_pages
    measured = times(max_batch, bounds.chunk, cached_us=cached_us, slots=slots, host_us=host_us, beyond_us=beyond_us)
    cutter = packer(bounds.chunk) if packs else None
    scheduler = Scheduler(bounds, num_pages, cutter)
    report = simulate(served, scheduler, measured, lag=lag)
    scheduler.check()
    assert scheduler.num_free_pages == num_pages - 1
    engine = Engine(served, Scheduler(bounds, num_pages, cutter), measured, lag)
    engine.run()
    assert_equal(report, engine)


def test_a_request_that_is_preempted_again_before_its_next_token_waits_since_its_last() -> None:
    served = trace((0.000362, 1, 14), (0.000596, 2, 8), (0.000676, 8, 4))
    bounds = limits(max_batch=4, max_len=MAX_LEN, chunk=6, page_size=1, prefix_cache=False)
    report = simulate(served, Scheduler(bounds, 24), times(4, 6))
    engine = Engine(served, Scheduler(bounds, 24), times(4, 6), 0)
    engine.run()
    assert report.preemptions > 1
    assert_equal(report, engine)


def run(served: Trace, *, lag: int = 0, host_us: float = 0.0, beyond_us: float = 0.0) -> SimulationReport:
    bounds = limits(max_batch=4, max_len=MAX_LEN, chunk=8)
    measured = times(4, 8, host_us=host_us, beyond_us=beyond_us)
    return simulate(served, Scheduler(bounds, 40), measured, lag=lag)


def test_one_request_by_hand() -> None:
    report = run(trace((1.0, 10, 3)))
    assert report.prefill.steps == ((2, 1), (8, 1))
    assert report.decode.steps == ((1, 2),)
    assert report.ttft_ms.p50 == pytest.approx((216 + 208) / 1e3)
    assert (report.inter_token_ms.count, report.inter_token_ms.max) == (2, 0.102)
    assert report.latency_ms.mean == pytest.approx((216 + 208 + 2 * 102) / 1e3)
    assert report.duration_s == report.busy_s == pytest.approx(628e-6)
    assert (report.decode.padding_rows, report.prefill.padding_rows) == (2, 2)
    assert (report.decode.padding_ms, report.prefill.padding_ms) == (0.002, 0.004)
    assert (report.kv_pages, report.kv_pages_peak) == (39, 3)
    assert report.output_tokens_per_s == pytest.approx(3 / 628e-6)


def test_host_time_delays_each_step_without_lag_and_hides_behind_it_with_lag() -> None:
    alone, behind = run(trace((0, 4, 9)), host_us=50), run(trace((0, 4, 9)), lag=1, host_us=50)
    assert alone.inter_token_ms.max == 0.152
    assert behind.inter_token_ms.max == 0.102


def test_with_lag_a_request_waits_for_one_more_step() -> None:
    served = trace((0, 1, 10), (0.00035, 1, 1))
    assert [run(served, lag=lag).ttft_ms.max for lag in (0, 1)] == [
        pytest.approx((208 + 2 * 102 + 208 - 350) / 1e3),
        pytest.approx((208 + 3 * 102 + 208 - 350) / 1e3),
    ]


def test_clients_send_their_next_request_when_they_have_an_answer() -> None:
    report = run(trace(*[(0.0, 2, 3)] * 6, concurrency=2))
    assert max(size for size, _ in report.decode.steps) == 2
    assert report.decode.steps == ((2, 6),)
    assert report.prefill.steps == ((4, 3),)


def test_a_phase_that_no_bucket_takes_is_counted_as_eager() -> None:
    report = run(trace(*[(0.0, 1, 4)] * 3))
    assert (report.decode.eager, report.decode.replayed) == (3, 0)
    assert report.decode.busy_ms == 0.9


def test_a_request_beyond_the_maximum_length_is_refused() -> None:
    with pytest.raises(GplanError, match=r"request 1 of the trace has 15 \+ 6 tokens, the maximum length is 20"):
        run(trace((0, 1, 1), (0, 15, 6)))


def test_an_empty_trace_takes_no_time() -> None:
    report = run(trace())
    assert (report.num_steps, report.duration_s, report.ttft_ms.count) == (0, 0, 0)
