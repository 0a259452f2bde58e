"""The engine's loop over the real scheduler, on a device that never was: answers, aborts, draining, orphans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from formats.plan import Limits
from gplan.core import Batch, SamplingParams
from gplan.graphs.executor import Outcome, Step, StepResult
from gplan.graphs.masking import TokenMask
from gplan.serving.engine import Engine
from gplan.serving.protocol import Abort, Add, Drain, FromEngine, Idle, Outputs, ToEngine
from tests.scheduling.serve import STOP_TOKEN, Device, answer, limits


class Arithmetic:
    """An executor whose model is a sum: results of a step may be read after later steps were launched."""

    def __init__(self, limits: Limits, num_pages: int, result_lag: int) -> None:
        self.result_lag = result_lag
        self._device = Device(limits, num_pages)
        self._unread: deque[tuple[Step, list[int]]] = deque()
        self.launched: list[Batch] = []

    def launch(self, batch: Batch, mask: Callable[[], TokenMask | None] | None = None) -> Step:
        assert mask is None
        step = Step(batch, None, "eager_backend", 0.0, lambda: pytest.fail("not a tensor"), None)  # type: ignore[arg-type]
        self._unread.append((step, self._device.launch(batch)))
        self.launched.append(batch)
        assert len(self._unread) <= self.result_lag + 1
        return step

    def collect(self, step: Step) -> StepResult:
        launched, tokens = self._unread.popleft()
        assert launched is step, "steps are collected in order"
        outcome = Outcome(step.batch.phase, step.batch.size, None, step.reason, 0, 0.001)
        return StepResult(tuple(tokens), (None,) * len(tokens), outcome)


@dataclass
class Script:
    """A channel whose messages come at given turns of the loop; keeps what was sent."""

    at_turn: dict[int, list[ToEngine]]
    turn: int = -1
    sent: list[tuple[int, FromEngine]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        self.turn += 1
        assert self.turn < 5000, "the loop does not end"
        self.waits.append(wait_ms)
        return self.at_turn.get(self.turn, [])

    def send(self, message: FromEngine) -> None:
        self.sent.append((self.turn, message))

    def steps(self) -> list[tuple[int, Outputs]]:
        return [(turn, message) for turn, message in self.sent if isinstance(message, Outputs)]

    def tokens(self, name: str) -> list[int]:
        return [token for _, step in self.steps() for out in step.outputs if out.id == name for token in out.tokens]

    def reasons(self, name: str) -> list[str]:
        return [out.finish_reason for _, step in self.steps() for out in step.outputs if out.id == name]


def add(name: str, prompt: list[int], max_tokens: int, *, stops: bool = True) -> Add:
    ids = frozenset({STOP_TOKEN}) if stops else frozenset[int]()
    return Add(name, prompt, SamplingParams(max_tokens=max_tokens, stop_token_ids=ids))


def run(
    script: Script,
    lag: int,
    *,
    num_pages: int = 33,
    bounds: Limits | None = None,
    orphan: Callable[[], bool] | None = None,
) -> Arithmetic:
    bounds = bounds or limits()
    executor = Arithmetic(bounds, num_pages, lag)
    Engine(executor, bounds, num_pages, script, orphan or (lambda: False)).run()
    return executor


PROMPTS = {f"r{index}": [1 + (7 * index + place) % 90 for place in range(1 + index % 11)] for index in range(20)}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_pages", [9, 33])
def test_every_request_gets_its_own_answer(lag: int, num_pages: int) -> None:
    messages: dict[int, list[ToEngine]] = {
        2 * index: [add(name, list(prompt), 15)] for index, (name, prompt) in enumerate(PROMPTS.items())
    }
    script = Script({**messages, 40: [Drain()]})
    run(script, lag, num_pages=num_pages)
    for name, prompt in PROMPTS.items():
        expected = answer(prompt, 15, 32)
        assert script.tokens(name) == expected
        *before, last = script.reasons(name)
        assert not any(before)
        assert last == ("length" if len(expected) == min(15, 32 - len(prompt)) else "stop")
    preemptions = max(step.stats.preemptions for _, step in script.steps())
    assert (preemptions > 0) == (num_pages == 9), "the small pool must have preempted, the large one not"


@pytest.mark.parametrize("lag", [0, 1])
def test_all_outputs_of_a_step_travel_together(lag: int) -> None:
    script = Script({0: [add(name, [5], 10, stops=False) for name in "abcd"], 1: [Drain()]})
    executor = run(script, lag)
    assert len(script.steps()) == len(executor.launched)
    assert max(len(step.outputs) for _, step in script.steps()) == 4


@pytest.mark.parametrize("lag", [0, 1])
def test_an_abort_frees_its_pages_within_two_steps_and_is_silent_afterwards(lag: int) -> None:
    arrivals: list[ToEngine] = [add("gone", [1, 2, 3, 4, 5], 25, stops=False), add("stays", [9], 20, stops=False)]
    script = Script({0: arrivals, 8: [Abort(["gone", "never was"])], 9: [Drain()]})
    run(script, lag)
    late = [(turn, step) for turn, step in script.steps() if turn >= 8]
    assert not any(out.id == "gone" for _, step in late for out in step.outputs)
    pages_of_one = -(-(1 + 20) // 4)
    assert all(step.stats.pages_used <= pages_of_one for _, step in late[:2])
    assert script.tokens("stays") == answer([9], 20, 32, stops=False)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_abort_of_the_only_request_reports_that_no_page_is_held(lag: int) -> None:
    script = Script({0: [add("gone", [1, 2, 3], 25, stops=False)], 5: [Abort(["gone"])], 9: [Drain()]})
    executor = run(script, lag)
    idle = [(turn, message) for turn, message in script.sent if isinstance(message, Idle)]
    assert idle == [(5, Idle(pages_used=0, pages_cached=1))]
    assert len(executor.launched) == 5


def test_an_idle_engine_waits_and_a_busy_one_does_not() -> None:
    script = Script({3: [add("a", [1], 4, stops=False)], 12: [Drain()]})
    run(script, 0)
    busy = [wait for turn, wait in enumerate(script.waits) if 3 < turn <= 6]
    idle = [wait for turn, wait in enumerate(script.waits) if turn <= 3 or turn > 7]
    assert busy == [0, 0, 0]
    assert all(wait > 0 for wait in idle)


def test_draining_finishes_what_runs() -> None:
    script = Script({0: [add("a", [1], 12, stops=False)], 1: [Drain()]})
    run(script, 1)
    assert script.tokens("a") == answer([1], 12, 32, stops=False)


def test_an_orphan_stops_even_while_busy() -> None:
    script = Script({0: [add("a", [1], 25, stops=False)]})
    run(script, 0, orphan=lambda: script.turn >= 4)
    assert len(script.tokens("a")) < 10


def test_an_idle_orphan_stops() -> None:
    script = Script({})
    run(script, 0, orphan=lambda: script.turn >= 4)
    assert script.turn <= 5
