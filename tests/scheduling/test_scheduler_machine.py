"""Random traffic against the scheduler: any arrivals, lengths, stops and aborts, any lag, pools of a few pages.

What must hold: every request gets exactly its tokens in order, nothing is lost or shared, chunks of a request follow
one another, and with one client the oldest request never yields and finishes within the steps that it would need alone.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gplan.core import Batch, FinishReason, Request
from gplan.scheduling.scheduler import Scheduler
from tests.scheduling.serve import STOP_TOKEN, Device, Server, answer, limits, packer, request

MAX_LEN = 24


class Traffic(RuleBasedStateMachine):
    @initialize(
        lag=st.integers(0, 2),
        max_batch=st.integers(1, 5),
        more_chunk=st.integers(0, 12),
        page_size=st.sampled_from([1, 2, 4, 7, 16]),
        more_pages=st.integers(0, 12),
        packs=st.booleans(),
        caches=st.booleans(),
        num_clients=st.integers(1, 3),
    )
    def start(
        self,
        lag: int,
        max_batch: int,
        more_chunk: int,
        page_size: int,
        more_pages: int,
        packs: bool,
        caches: bool,
        num_clients: int,
    ) -> None:
        self.limits = limits(
            max_batch=max_batch,
            max_len=MAX_LEN,
            chunk=max_batch + more_chunk,
            page_size=page_size,
            prefix_cache=caches,
        )
        num_pages = 1 + -(-MAX_LEN // page_size) + more_pages
        self.lag, self.num_clients = lag, num_clients
        self.scheduler = Scheduler(self.limits, num_pages, packer(self.limits.chunk) if packs else None)
        self.server = Server(self.scheduler, Device(self.limits, num_pages), lag)
        self.prompts: dict[str, tuple[list[int], bool]] = {}
        self.live: dict[str, Request] = {}
        self.turns_as_oldest = 0
        self.ended: list[list[int]] = []
        self.next_start: dict[str, tuple[int, int]] = {}

    @rule(
        length=st.integers(1, MAX_LEN - 1),
        max_tokens=st.integers(1, MAX_LEN),
        seed=st.integers(1, 3) | st.integers(1, 96),
        stops=st.booleans(),
    )
    def arrive(self, length: int, max_tokens: int, seed: int, stops: bool) -> None:
        self._add([(seed + i) % 96 + 1 for i in range(length)], max_tokens, seed, stops)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), kept=st.integers(1, MAX_LEN), more=st.integers(0, 6), stops=st.booleans())
    def go_on(self, data: st.DataObject, kept: int, more: int, stops: bool) -> None:
        """A prompt that begins with the tokens of a request that ended."""
        prompt = data.draw(st.sampled_from(self.ended))[:kept] + [90] * more
        self._add(prompt[: MAX_LEN - 1], 4, 1, stops)

    def _add(self, prompt: list[int], max_tokens: int, seed: int, stops: bool) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = (prompt, stops)
        self.live[name] = request(name, prompt, max_tokens, stops=stops)
        self.live[name].client = f"c{seed % self.num_clients}"
        self.scheduler.add(self.live[name])

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self._turn()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.abort(name)
        aborted = self._retire(name)
        assert aborted.finish_reason is FinishReason.ABORT
        prompt, stops = self.prompts[name]
        output = aborted.tokens[len(prompt) :]
        assert output == answer(prompt, aborted.params.max_tokens, MAX_LEN, stops=stops)[: len(output)]

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.live:
            self._turn()
        while self.server.step():
            pass
        self.scheduler.check()
        assert not self.scheduler.has_work
        capacity = self.scheduler.num_free_pages
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert capacity >= -(-MAX_LEN // self.limits.page_size)

    @rule()
    def a_step_cannot_be_run(self) -> None:
        num_finished = len(self.server.finished)
        self.server.fail()
        self._check_finished(num_finished)
        self.turns_as_oldest = 0

    def _turn(self) -> None:
        num_steps, num_finished = len(self.server.batches), len(self.server.finished)
        preemptions = {name: each.num_preemptions for name, each in self.live.items()}
        happened = self.server.step()
        assert happened or not self.live, "no step runs, and requests wait"
        for batch in self.server.batches[num_steps:]:
            self._follow(batch)
        self.turns_as_oldest = self.turns_as_oldest + 1 if self.live else 0
        if self.live and self.num_clients == 1:
            oldest = next(iter(self.live.values()))
            prefills = 2 * -(-MAX_LEN // self.limits.chunk)
            assert oldest.num_preemptions == preemptions[oldest.id], f"{oldest.id} yields to younger ones"
            assert self.turns_as_oldest <= prefills + MAX_LEN + 2 * self.lag + 1, f"{oldest.id} waits for ever"
        self._check_finished(num_finished)

    def _check_finished(self, since: int) -> None:
        for finished in self.server.finished[since:]:
            prompt, stops = self.prompts[finished.id]
            assert finished.tokens[: len(prompt)] == prompt
            assert finished.tokens[len(prompt) :] == answer(prompt, finished.params.max_tokens, MAX_LEN, stops=stops)
            assert self._retire(finished.id) is finished

    def _follow(self, batch: Batch) -> None:
        """Chunks of a request follow one another, and start over, with what is cached, only after a preemption."""
        for chunk in batch.chunks:
            name, preemptions = chunk.request.id, chunk.request.num_preemptions
            expected, before = self.next_start.get(name, (0, -1))
            if preemptions == before:
                assert chunk.start == expected
            else:
                assert chunk.start % self.limits.page_size == 0
                assert chunk.start == 0 or self.limits.prefix_cache
            self.next_start[name] = (chunk.end, preemptions)

    def _retire(self, name: str) -> Request:
        if name == next(iter(self.live)):
            self.turns_as_oldest = 0
        request = self.live.pop(name)
        self.ended.append([token for token in request.tokens if token != STOP_TOKEN] or [1])
        return request


Traffic.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
