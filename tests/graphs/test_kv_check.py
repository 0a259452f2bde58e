"""The check of the KV pool: each fault made on purpose is caught by name, and without one nothing is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gplan.core import Batch, Phase, Request
from gplan.errors import KVError
from gplan.graphs.executor import Executor
from gplan.graphs.kv_check import CANARY_PAGES
from gplan.scheduling.scheduler import Scheduler
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import greedy, make_executor, serve

PROMPT = [random.Random(5).randrange(256) for _ in range(30)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class Loop:
    """Steps of three requests, which a decode graph pads to four."""

    def __init__(self, checkpoint: Path) -> None:
        self.executor: Executor = make_executor(checkpoint)
        self.check = self.executor.check_kv()
        self.scheduler = Scheduler(self.executor.parts.limits, self.executor.parts.kv_pool.num_pages - CANARY_PAGES)
        self.requests = [greedy(name, [index, *PROMPT], 30) for index, name in enumerate("abc")]
        for request in self.requests:
            self.scheduler.add(request)

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        result = self.executor.collect(self.executor.launch(batch))
        self.scheduler.update(batch, result.tokens)
        return batch

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def until_decoding(self) -> Batch:
        while (batch := self.step()).phase is not Phase.DECODE:
            pass
        return batch

    def after_loading(self, fault: Callable[[], object]) -> None:
        """Makes a fault once the next decode step's inputs are in their buffers."""
        runner = self.executor.decode
        load = runner._load

        def load_with_fault(*arguments: object, **named: object) -> None:
            load(*arguments, **named)  # type: ignore[arg-type]
            fault()

        runner._load = load_with_fault  # type: ignore[method-assign]


@pytest.fixture
def loop(checkpoint: Path) -> Loop:
    loop = Loop(checkpoint)
    loop.until_decoding()
    return loop


def test_without_a_fault_nothing_is_caught_and_answers_are_the_same(checkpoint: Path) -> None:
    def traffic() -> list[Request]:
        return [greedy(str(index), [*PROMPT[: 10 + index], index], 25) for index in range(12)]

    arrivals = [3 * index for index in range(12)]
    expected = serve(make_executor(checkpoint, num_pages=1 + 97), traffic(), arrivals=arrivals)
    executor = make_executor(checkpoint, num_pages=1 + 97)
    check = executor.check_kv()
    found = serve(executor, traffic(), arrivals=arrivals, lag=1)
    assert found.answers == expected.answers
    assert check.num_checks == found.steps.total() > 25
    assert found.prefixes is not None
    assert found.prefixes.hits > 5


def test_a_stale_page_row(loop: Loop) -> None:
    ours, theirs = (request.pages[0] for request in loop.requests[:2])
    loop.executor.parts.page_table._pages[loop.requests[0].row, 0] = theirs
    with pytest.raises(KVError, match=f"stale page row: request a would read pages {theirs}, .*, not {ours}, "):
        loop.step()


def test_a_stale_location(loop: Loop) -> None:
    slots = loop.executor.parts.buffers["kv_slots"]
    loop.after_loading(lambda: slots[1].copy_(slots[0]))
    with pytest.raises(KVError, match="stale page row: request b would write to page"):
        loop.step()


def test_a_negative_location(loop: Loop) -> None:
    slots = loop.executor.parts.buffers["kv_slots"]
    loop.after_loading(lambda: slots[2].fill_(-1))
    with pytest.raises(KVError, match="negative location: row 2 of the step would write to -1"):
        loop.step()


def test_a_location_of_a_canary(loop: Loop) -> None:
    slots, pool = loop.executor.parts.buffers["kv_slots"], loop.executor.parts.kv_pool
    loop.after_loading(lambda: slots[2].fill_((pool.num_pages - 1) * pool.layout.page_size))
    with pytest.raises(KVError, match="location beyond the pool"):
        loop.step()


def test_a_write_to_a_canary_that_no_input_told_of(loop: Loop) -> None:
    """As a location does that turns wrong on the device, or a kernel that writes past its row."""
    pool = loop.executor.parts.kv_pool
    backend = loop.executor.decode.backend
    replay = backend.replay

    def replay_with_fault(key: object) -> object:
        pool.layers[2][1].view(-1, *pool.layers[2][1].shape[2:])[-1].fill_(0)
        return replay(key)  # type: ignore[arg-type]

    backend.replay = replay_with_fault  # type: ignore[assignment, method-assign]
    with pytest.raises(KVError, match=r"canary page: a decode step of 3 requests wrote to it \(values of layer 2\)"):
        loop.step()


def test_a_page_that_a_padded_row_writes_to(loop: Loop) -> None:
    slots, page = loop.executor.parts.buffers["kv_slots"], loop.requests[0].pages[0]
    loop.after_loading(lambda: slots[3].fill_(page * loop.executor.parts.page_table.page_size))
    with pytest.raises(KVError, match=f"page shared with a padded row: row 3 would write to page {page}"):
        loop.step()


def test_a_page_that_a_padded_row_reads(loop: Loop) -> None:
    page = loop.requests[0].pages[0]
    lists = dict(loop.executor.decode.tensors(loop.executor.keys[2]))

    def fault() -> None:
        indptr, indices = lists["attention.kv_indptr"], lists["attention.kv_indices"]
        indices[indptr[3]] = page

    loop.after_loading(fault)
    with pytest.raises(KVError, match=f"page shared with a padded row: padding would read page {page}"):
        loop.step()


def test_a_freed_page_that_is_replayed(loop: Loop) -> None:
    """A step of a request that was aborted, launched again when another request has one of its pages."""
    gone = loop.requests[0]
    loop.step()
    stale = loop.step()
    pages = list(gone.pages)
    loop.scheduler.abort("a")
    loop.scheduler.add(greedy("d", [9, 9, *PROMPT], 10))
    batch = loop.step()
    (new,) = (chunk for chunk in batch.chunks if chunk.request.id == "d")
    assert pages[-1] in new.pages, "the page that was not full is given out again"
    gone.row = loop.executor.parts.limits.max_batch
    with pytest.raises(KVError, match=f"freed page: request a goes on writing page {pages[-1]}: request d wrote it"):
        loop.executor.launch(Batch(stale.phase, tuple(c for c in stale.chunks if c.request is gone)))


def test_a_page_that_was_freed_under_its_reader(loop: Loop) -> None:
    """The pool gives a page of a running request to another."""
    victim = loop.requests[1]
    loop.scheduler._holdings._pages._held.discard(victim.pages[-1])
    loop.scheduler._holdings._pages._free.append(victim.pages[-1])
    loop.scheduler.add(greedy("d", [9, 9, *PROMPT], 10))
    with pytest.raises(KVError, match=f"freed page: request b .* page {victim.pages[-1]}"):
        loop.steps(20)


def test_a_page_whose_tokens_are_others(loop: Loop) -> None:
    """The prefix cache finds pages of other tokens."""
    cache = loop.scheduler._holdings._cache
    (run, *_) = cache.root.children.values()
    other = (250, *run.tokens[1:])
    cache.root.children[other[:8]] = run
    run.tokens = other
    loop.scheduler.add(greedy("d", [250, *PROMPT], 10))
    with pytest.raises(KVError, match=r"freed page: request d reads page \d+, whose tokens are others: request"):
        loop.step()
