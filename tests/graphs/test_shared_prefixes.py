"""Answers with the prefix cache are those without it, on real kernels and captured graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from formats.plan import BackendName
from gplan.core import Request, SamplingParams
from gplan.graphs.executor import Executor
from gplan.scheduling.scheduler import Scheduler
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

SYSTEM = [random.Random(1).randrange(256) for _ in range(70)]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Executor:
    """96 pages of 8 tokens: too few for all of `traffic` at once."""
    return make_executor(checkpoint, num_pages=1 + 96)


def traffic(seed: int) -> list[Request]:
    """Greedy and drawn requests of which most begin alike, several of one prompt, and some that stop early."""
    rng = random.Random(seed)
    requests = []
    for index in range(14):
        prompt = SYSTEM[: rng.choice((0, 8, 33, 64, 70))] + [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        drawn = {"temperature": 0.9, "top_p": 0.95, "seed": index, "repetition_penalty": 1.1} if index % 2 else {}
        stops = frozenset(range(0, 320, 24)) if index % 3 == 0 else frozenset[int]()
        for copy in range(3 if index % 5 == 0 else 1):
            params = {"temperature": 0.0, **drawn, "seed": index * 10 + copy, "stop_token_ids": stops}
            requests.append(
                Request(f"{index}.{copy}", len(prompt), list(prompt), SamplingParams(max_tokens=NUM_TOKENS, **params))
            )
    return requests


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_answers_are_those_without_it(executor: Executor, lag: int, seed: int) -> None:
    """With preemptions, aborts, and stops that are found late."""
    rng = random.Random(seed)
    arrivals = [rng.randrange(60) for _ in traffic(seed)]
    aborted = {12: "0.1", 25: "3.0", 31: "7.0"}

    def run(prefix_cache: bool) -> dict[str, list[int]]:
        served = serve(executor, traffic(seed), arrivals=arrivals, lag=lag, aborts=aborted, prefix_cache=prefix_cache)
        assert served.prefixes is not None
        assert (served.prefixes.hit_tokens > 200) == prefix_cache
        return {name: answer for name, answer in served.answers.items() if name not in aborted.values()}

    assert run(prefix_cache=True) == run(prefix_cache=False)


def test_so_they_are_where_requests_are_preempted_and_pages_evicted(checkpoint: Path) -> None:
    executor = make_executor(checkpoint, num_pages=1 + 25, limits=limits_of(max_len=200))
    requests = traffic(3)
    found = serve(executor, requests, lag=1)
    assert found.num_preemptions > 0
    assert found.prefixes is not None
    assert found.prefixes.evicted_pages > 0
    assert found.prefixes.hits > 0
    assert found.answers == serve(executor, traffic(3), lag=1, prefix_cache=False).answers


@pytest.mark.parametrize("prefill", ["breakable", "full"])
def test_prompts_that_begin_with_cached_pages_are_replayed(checkpoint: Path, prefill: BackendName) -> None:
    executor = make_executor(checkpoint, prefill=prefill)
    prompts = (SYSTEM, SYSTEM, [*SYSTEM, *range(60)], [*SYSTEM, *range(60), 1, 2, 3])
    turns = [greedy(str(index), prompt, 4) for index, prompt in enumerate(prompts)]
    served = serve(executor, turns, arrivals=[0, 10, 20, 30])
    assert served.prefixes is not None
    assert served.prefixes.hit_tokens == 64 + 64 + 128
    assert served.steps == {"prefill:128": 2, "prefill:8": 2, "decode:1": 12}


def test_a_page_that_were_shared_while_it_is_written_would_change_an_answer(checkpoint: Path) -> None:
    """What the comparison is worth: one wrong page shows."""
    executor = make_executor(checkpoint)
    expected = serve(executor, [greedy("a", SYSTEM, 4), greedy("b", SYSTEM, 4)], arrivals=[0, 10]).answers
    executor.parts.kv_pool.data.zero_()
    scheduler = Scheduler(executor.parts.limits, executor.parts.kv_pool.num_pages)
    answers = []
    for name in "ab":
        scheduler.add(greedy(name, SYSTEM, 4))
        tokens: Sequence[int] = ()
        while scheduler.has_work:
            batch = scheduler.schedule()
            assert batch is not None
            result = executor.collect(executor.launch(batch))
            request = batch.chunks[0].request
            scheduler.update(batch, result.tokens)
            tokens = request.tokens[request.prompt_len :]
        answers.append(list(tokens))
        executor.parts.kv_pool.data[:, :, 3] += 1.0
    assert answers[0] == expected["a"] == expected["b"]
    assert answers[1] != expected["b"]
