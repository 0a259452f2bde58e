"""The scheduler as the engine sees it: steps and their chunks, finishing, preemption, aborts, limits."""

from __future__ import annotations

import pytest

from formats.plan import Limits
from gplan.core import DUMMY_ROW, FinishReason, Phase
from gplan.errors import FitError, GplanError
from gplan.scheduling.scheduler import Scheduler
from tests.scheduling.serve import STOP_TOKEN, Device, Server, answer, draw, limits, request


def serve(*, num_pages: int = 33, lag: int = 0, bounds: Limits | None = None) -> Server:
    bounds = bounds or limits()
    return Server(Scheduler(bounds, num_pages), Device(bounds, num_pages), lag)


def shapes(server: Server) -> list[tuple[Phase, list[int]]]:
    return [(batch.phase, [chunk.length for chunk in batch.chunks]) for batch in server.batches]


def test_a_long_prompt_is_cut_and_then_decodes() -> None:
    server = serve()
    server.scheduler.add(request("a", range(1, 20), 3, stops=False))
    server.run()
    assert (
        shapes(server) == [(Phase.PREFILL, [8]), (Phase.PREFILL, [8]), (Phase.PREFILL, [3])] + [(Phase.DECODE, [1])] * 2
    )
    assert [batch.chunks[0].samples for batch in server.batches] == [False, False, True, True, True]
    (finished,) = server.finished
    assert finished.tokens[19:] == answer(range(1, 20), 3, 32, stops=False)
    assert finished.finish_reason is FinishReason.LENGTH
    assert server.scheduler.num_free_pages == 32


def test_decodes_come_first_and_prompts_get_the_rest() -> None:
    server = serve()
    server.scheduler.add(request("a", [1], 9, stops=False))
    server.step()
    server.scheduler.add(request("b", range(1, 21), 2, stops=False))
    for _ in range(4):
        server.step()
    assert shapes(server)[1:] == [
        (Phase.PREFILL, [1, 7]),
        (Phase.PREFILL, [1, 7]),
        (Phase.PREFILL, [1, 6]),
        (Phase.DECODE, [1, 1]),
    ]
    assert [batch.chunks[0].request.id for batch in server.batches] == ["a"] * 5


def test_prompts_share_a_step_in_order_of_arrival() -> None:
    server = serve()
    for name, first, length in (("a", 10, 3), ("b", 20, 4), ("c", 30, 5)):
        server.scheduler.add(request(name, range(first, first + length), 1, stops=False))
    server.run()
    assert [[(c.request.id, c.length) for c in batch.chunks] for batch in server.batches] == [
        [("a", 3), ("b", 4), ("c", 1)],
        [("c", 4)],
    ]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_step_runs_beyond_max_tokens(lag: int) -> None:
    server = serve(lag=lag)
    server.scheduler.add(request("a", [1, 2], 5, stops=False))
    server.run()
    assert len(server.batches) == 5
    assert len(server.finished[0].tokens) == 7


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_stop_token_found_late_drops_what_came_after_it(lag: int) -> None:
    prompt = next([n] for n in range(1, 2000) if draw([n]) != STOP_TOKEN and draw([n, draw([n])]) == STOP_TOKEN)
    server = serve(lag=lag)
    server.scheduler.add(request("a", prompt, 20))
    server.run()
    assert len(server.batches) == 2 + lag
    (finished,) = server.finished
    assert finished.tokens == [*prompt, draw(prompt)]
    assert finished.finish_reason is FinishReason.STOP
    assert (finished.num_pending, finished.row, finished.pages) == (0, DUMMY_ROW, [])
    while server.step():
        pass
    assert len(server.finished) == 1
    server.scheduler.check()


def test_max_len_ends_a_request() -> None:
    server = serve()
    server.scheduler.add(request("a", range(1, 31), 100, stops=False))
    server.run()
    assert len(server.finished[0].tokens) == 32
    assert server.finished[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_youngest_yields_and_answers_do_not_change(lag: int) -> None:
    server = serve(num_pages=9, lag=lag, bounds=limits(max_batch=3))
    prompts = {name: [seed, seed + 1, seed + 2] for name, seed in (("a", 5), ("b", 50), ("c", 500))}
    for name, prompt in prompts.items():
        server.scheduler.add(request(name, prompt, 28, stops=False))
    server.run()
    assert server.scheduler.num_preemptions >= 1
    by_id = {finished.id: finished for finished in server.finished}
    assert by_id["a"].num_preemptions == 0
    for name, prompt in prompts.items():
        assert by_id[name].tokens[3:] == answer(prompt, 28, 32, stops=False)
    server.scheduler.check()


def test_a_preempted_request_waits_for_its_tokens_and_computes_all_of_them_again() -> None:
    server = serve(num_pages=9, lag=1, bounds=limits(max_batch=2, chunk=32, prefix_cache=False))
    for name in "ab":
        server.scheduler.add(request(name, [3, 4, 5], 28, stops=False))
    server.run()
    again = next(
        chunk
        for batch in server.batches
        for chunk in batch.chunks
        if chunk.request.id == "b" and chunk.start == 0 and chunk.length > 3
    )
    assert again.samples
    assert again.request.num_preemptions == 1


def test_a_preempted_request_is_not_admitted_while_a_token_of_it_is_unread() -> None:
    bounds = limits(max_batch=2, chunk=32, prefix_cache=False)
    scheduler, device = Scheduler(bounds, 9), Device(bounds, 9)
    for name in "ab":
        scheduler.add(request(name, [3, 4, 5], 28, stops=False))
    launched = []
    while scheduler.num_preemptions == 0:
        batch = scheduler.schedule()
        assert batch is not None
        launched.append((batch, device.launch(batch)))
    scheduler.abort("a")
    assert scheduler.num_free_pages == 8
    for step in launched[:-1]:  # in the last one, only "a" ran
        assert scheduler.schedule() is None
        scheduler.update(*step)
    batch = scheduler.schedule()
    assert batch is not None
    assert [(chunk.request.id, chunk.start) for chunk in batch.chunks] == [("b", 0)]
    assert batch.chunks[0].end == len(batch.chunks[0].request.tokens) > 3


def test_nobody_is_admitted_into_pages_that_running_requests_will_need() -> None:
    server = serve(num_pages=9)
    server.scheduler.add(request("a", range(1, 17), 16, stops=False))  # holds 4 of 8 pages and grows
    server.step()
    server.step()
    server.scheduler.add(request("b", range(31, 39), 4, stops=False))  # needs 2, and one more later
    server.step()
    assert (server.scheduler.num_running, server.scheduler.num_waiting) == (1, 1)
    assert server.scheduler.num_free_pages == 3
    server.run()
    assert server.scheduler.num_preemptions == 0


def test_a_step_is_repeated_only_where_nothing_but_lengths_would_change() -> None:
    scheduler = Scheduler(limits(), 12)
    assert scheduler.repeat() is None
    scheduler.add(request("a", [1], 9, stops=False))
    scheduler.advance()
    assert scheduler.repeat() is None, "a prompt was computed"
    step = scheduler.advance()
    assert step is not None
    assert step.phase is Phase.DECODE
    assert scheduler.repeat() == (0, [])
    scheduler.add(request("b", [1], 2, stops=False))
    assert scheduler.repeat() is None, "a request came"
    scheduler.advance()
    scheduler.advance()
    assert scheduler.repeat() is None, "a request is complete"
    scheduler.advance()
    assert scheduler.repeat() == (0, [])
    scheduler.abort("a")
    assert scheduler.repeat() is None, "a request was aborted"
    scheduler.check()


def test_abort_frees_pages_at_once_wherever_the_request_is() -> None:
    server = serve(lag=2, bounds=limits(max_batch=2))
    for name in "abc":
        server.scheduler.add(request(name, range(1, 13), 5, stops=False))
    server.step()
    server.step()
    assert (server.scheduler.num_running, server.scheduler.num_waiting) == (2, 1)
    for name in "abc":
        server.scheduler.abort(name)
        server.scheduler.check()
    assert server.scheduler.num_free_pages == 32
    assert not server.scheduler.has_work
    while server.step():
        pass
    assert server.finished == []


def test_abort_of_an_unknown_or_finished_request_does_nothing() -> None:
    server = serve()
    server.scheduler.add(request("a", [1], 1, stops=False))
    server.run()
    server.scheduler.abort("a")
    server.scheduler.abort("never seen")
    assert server.finished[0].finish_reason is FinishReason.LENGTH
    server.scheduler.check()


def test_nothing_to_do_is_none() -> None:
    server = serve(lag=1)
    assert server.scheduler.schedule() is None
    server.scheduler.add(request("a", [1], 1, stops=False))
    assert server.scheduler.schedule() is not None
    assert server.scheduler.schedule() is None
    assert server.scheduler.has_work


def test_a_pool_below_one_request_is_refused() -> None:
    with pytest.raises(FitError, match="kv_pool: 7 pages"):
        Scheduler(limits(), 8)
    Scheduler(limits(), 9)


def test_a_chunk_below_the_batch_is_refused() -> None:
    with pytest.raises(GplanError, match="chunk of 3"):
        Scheduler(limits(max_batch=4, chunk=3), 33)


def test_the_same_request_twice_is_our_bug() -> None:
    scheduler = Scheduler(limits(), 33)
    scheduler.add(request("a", [1], 1))
    with pytest.raises(AssertionError, match="served already"):
        scheduler.add(request("a", [1], 1))


def test_results_out_of_order_are_our_bug() -> None:
    scheduler = Scheduler(limits(), 33)
    scheduler.add(request("a", [1], 3, stops=False))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="out of order"):
        scheduler.update(second, [5])
