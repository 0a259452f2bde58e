"""Whatever happens around a request, its answer is the one that it gets alone: eager, and with nothing cached.

Traffic that asks for everything that sampling offers, through the engine's loop and captured graphs: in mixed steps,
with prefixes of others, preempted, with results read late, beside aborts, and with steps that find no memory.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from formats.plan import Limits
from gplan.core import Batch, SamplingParams
from gplan.graphs.executor import Executor, Step, StepResult
from gplan.graphs.masking import TokenMask
from gplan.serving.engine import Engine
from gplan.serving.protocol import Abort, Add, Drain, FromEngine, Outputs, ToEngine
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import limits_of, make_executor

NUM_REQUESTS, MAX_LEN = 20, 160
TOLERANCE = 1e-3
"""Of log probabilities: the rows of larger batches round otherwise."""


class Script:
    """A channel whose messages come at given turns. Keeps what was answered."""

    def __init__(self, at_turn: dict[int, list[ToEngine]]) -> None:
        self._at_turn, self._turn = at_turn, -1
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.ends: dict[str, str] = {}
        self.keys: Counter[str] = Counter()
        self.preemptions = self.hit_tokens = 0

    def receive(self, wait_ms: int) -> list[ToEngine]:
        self._turn += 1
        assert self._turn < 10_000, "the loop does not end"
        return self._at_turn.get(self._turn, [])

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Outputs):
            return
        self.keys[message.stats.key] += 1
        self.preemptions, self.hit_tokens = message.stats.preemptions, message.stats.prefix_hit_tokens
        for output in message.outputs:
            assert output.id not in self.ends, "an answer goes on after its end"
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            self.logprobs.setdefault(output.id, []).extend(own for own, _ in output.logprobs)
            if output.finish_reason:
                self.ends[output.id] = output.finish_reason


class Scarce:
    """An executor whose results are read late, and which now and then finds no memory: before a step or at its end."""

    def __init__(self, executor: Executor, lag: int, rng: random.Random) -> None:
        self._executor, self.result_lag, self._rng = executor, lag, rng
        self.num_refused = 0

    def launch(self, batch: Batch, mask: Callable[[], TokenMask | None] | None = None) -> Step:
        chance = self._rng.random() if batch.num_requests > 1 else 1.0
        if chance < 0.08:
            self._refuse()
        step = self._executor.launch(batch, mask)
        if chance < 0.12:
            self._refuse()
        return step

    def collect(self, step: Step) -> StepResult:
        return self._executor.collect(step)

    def _refuse(self) -> None:
        self.num_refused += 1
        raise torch.OutOfMemoryError("CUDA out of memory.")


def traffic(rng: random.Random) -> list[Add]:
    system = [rng.randrange(256) for _ in range(40)]
    prompts: list[list[int]] = []
    for _ in range(NUM_REQUESTS):
        begun = system[: rng.choice((0, 8, 16, 17, 40))]
        prompt = begun + [rng.randrange(256) for _ in range(rng.choice((1, 7, 8, 9, 30)))]
        prompts.append(list(rng.choice(prompts)) if prompts and rng.random() < 0.2 else prompt)
    return [Add(f"r{i}", prompt, _params(rng), f"client {i % 3}") for i, prompt in enumerate(prompts)]


def _params(rng: random.Random) -> SamplingParams:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"top_k": rng.choice((1, 5, 50)), "top_p": 0.9, "min_p": 0.02},
        {"logit_bias": ((rng.randrange(256), 3.0),)},
        {"stop_token_ids": frozenset(rng.sample(range(256), 12)), "min_tokens": rng.choice((0, 4))},
        {"logprobs": 2},
    ]
    values: dict[str, Any] = {"temperature": rng.choice((0.0, 0.0, 0.8, 1.3)), "seed": rng.randrange(2**63)}
    for option in options:
        values |= option if rng.random() < 0.25 else {}
    return SamplingParams(max_tokens=rng.choice((1, 2, 8, 9, 40, 90)), **values)


def run(executor: Executor | Scarce, limits: Limits, num_pages: int, at_turn: dict[int, list[ToEngine]]) -> Script:
    script = Script(at_turn)
    Engine(executor, limits, num_pages, script, lambda: False).run()
    return script


def fresh(add: Add) -> Add:
    """A copy: an engine adds to a request's tokens."""
    return msgspec.structs.replace(add, prompt=list(add.prompt))


SEEDS = range(2)
EXECUTORS: dict[str, dict[str, Any]] = {
    "draws in graphs, attention in graphs of few requests": {
        "decode_variants": ("greedy", "sampled"),
        "prefill_variants": ("full",),
    },
    "sizes that divide nothing": {
        "limits": limits_of(max_len=MAX_LEN, page_size=5, max_batch=7, chunk=37),
        "decode_ladder": (2, 7),
        "prefill_ladder": (8, 19, 37),
        "decode_variants": ("greedy",),
    },
    "pages of one token": {
        "limits": limits_of(max_len=MAX_LEN, page_size=1, max_batch=6, chunk=40),
        "decode_ladder": (1, 4),
        "prefill_ladder": (32,),
        "prefill": "full",
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("alone") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[tuple[Sequence[Add], dict[str, Script]]]:
    """By seed: requests, and what each gets from an executor of its own."""
    limits = limits_of(max_len=MAX_LEN, prefix_cache=False)
    executor = make_executor(checkpoint, decode="eager", prefill="eager", limits=limits, num_pages=60)
    found = []
    for seed in SEEDS:
        adds = traffic(random.Random(seed))
        found.append((adds, {add.id: run(executor, limits, 60, {0: [fresh(add)], 1: [Drain()]}) for add in adds}))
    return found


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_answer_is_the_one_that_its_request_gets_alone(
    checkpoint: Path, alone: list[tuple[Sequence[Add], dict[str, Script]]], name: str
) -> None:
    options = {"limits": limits_of(max_len=MAX_LEN), **EXECUTORS[name]}
    limits: Limits = options["limits"]
    num_pages = 1 + -(-MAX_LEN // limits.page_size) + 24 // limits.page_size
    executor = make_executor(checkpoint, num_pages=num_pages, **options)
    seen: Counter[str] = Counter()
    for seed, lag in ((0, 0), (0, 1), (1, 1), (1, 2)):
        adds, expected = alone[seed]
        rng = random.Random(f"{seed} {lag}")
        at_turn: dict[int, list[ToEngine]] = {120: [Drain()]}
        for add in adds:
            at_turn.setdefault(rng.randrange(30), []).append(fresh(add))
        aborted = {add.id for add in rng.sample(adds, 3)}
        for each in aborted:
            at_turn.setdefault(rng.randrange(60), []).append(Abort([each]))
        scarce = Scarce(executor, lag, rng)
        script = run(scarce, limits, num_pages, at_turn)
        for add in adds:
            if add.id not in aborted:
                _compare(add.id, script, expected[add.id])
        seen += script.keys
        seen += Counter(preemptions=script.preemptions, hits=script.hit_tokens, refused=scarce.num_refused)
    assert all(seen[what] > 0 for what in ("preemptions", "hits", "refused")), seen
    assert all(any(key.startswith(phase) for key in seen) for phase in ("decode:", "prefill:")), seen
    for variant in (*options.get("decode_variants", ()), *options.get("prefill_variants", ())):
        assert any(key.endswith(variant) for key in seen), seen
    if "decode_variants" in options:
        assert executor.decode.num_steps_without_input > 0
    executor.close()


def _compare(name: str, script: Script, expected: Script) -> None:
    assert script.tokens.get(name) == expected.tokens.get(name)
    assert script.ends[name] == expected.ends[name]
    assert script.logprobs.get(name) == pytest.approx(expected.logprobs.get(name), abs=TOLERANCE)
