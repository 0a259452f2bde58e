"""Graphs run eagerly for debugging: the same runners, buffers and metadata, and nothing recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.core import Phase
from gplan.errors import CaptureError, VerificationError
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.synthetic import BatchMaker
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

LIMITS = limits_of(max_batch=8, max_len=128, chunk=64)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2] * 20, [6], [5, 3, 5, 8, 9, 7, 9]]
BACKENDS = [("full", "breakable"), ("breakable", "full")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("debug"))


def executor_of(checkpoint: Path, pair: tuple[str, str], *, debug: bool, **variants: tuple[str, ...]) -> Executor:
    return make_executor(
        checkpoint,
        decode=pair[0],
        prefill=pair[1],
        limits=LIMITS,
        num_pages=120,
        decode_ladder=(1, 2, 8),
        prefill_ladder=(16, 64),
        debug_graphs=debug,
        **variants,
    )


@pytest.mark.parametrize("pair", BACKENDS, ids="-".join)
def test_answers_and_keys_are_those_of_replays_and_nothing_is_recorded(checkpoint: Path, pair: tuple[str, str]) -> None:
    replayed, debugged = (executor_of(checkpoint, pair, debug=debug) for debug in (False, True))
    served = [
        serve(executor, [greedy(str(i), p, 9) for i, p in enumerate(PROMPTS)]) for executor in (replayed, debugged)
    ]
    assert served[0].answers == served[1].answers
    assert served[0].steps == served[1].steps
    for phase in Phase:
        ours, theirs = debugged.runner(phase).backend, replayed.runner(phase).backend
        assert ours.cuts_at_breaks == theirs.cuts_at_breaks
        assert set(ours.keys()) == set(theirs.keys())
        assert {ours.num_segments(key) for key in ours.keys()} == {0}  # noqa: SIM118
        assert min(theirs.num_segments(key) for key in theirs.keys()) > 0  # noqa: SIM118
    assert debugged.device.pool_nbytes() == 0


def test_variants_are_debugged_too(checkpoint: Path) -> None:
    variants = {"decode_variants": ("greedy", "sampled"), "prefill_variants": ("full",)}
    replayed, debugged = (executor_of(checkpoint, BACKENDS[0], debug=debug, **variants) for debug in (False, True))
    for temperature in (0.0, 0.8):
        served = [
            serve(
                executor, [greedy(f"{temperature} {i}", p, 9, temperature=temperature) for i, p in enumerate(PROMPTS)]
            )
            for executor in (replayed, debugged)
        ]
        assert served[0].answers == served[1].answers
        assert served[0].steps == served[1].steps
        assert any(":" in step.removeprefix("decode:") for step in served[0].steps), "a variant ran"


def test_a_fault_of_the_recording_is_gone_and_a_fault_before_it_stays(checkpoint: Path) -> None:
    """What the switch is for: telling the two apart."""

    def swap(executor: Executor) -> None:
        recordings = executor.decode.backend._recordings
        three, two = executor.decode.setup.keys[2], executor.decode.setup.keys[1]
        recordings[three] = recordings[two]

    def store_nowhere(executor: Executor) -> None:
        buffers, fill = executor.parts.buffers, executor.parts.buffers.fill

        def wrong(values: object, real: int, padded: int, **kwargs: object) -> None:
            fill(values, real, padded, **kwargs)
            buffers["kv_slots"][:real] = 0

        buffers.fill = wrong  # type: ignore[method-assign]

    expected = serve(executor_of(checkpoint, BACKENDS[0], debug=False), [greedy("a", PROMPTS[0], 9)]).answers
    recorded = executor_of(checkpoint, BACKENDS[0], debug=False)
    key = recorded.decode.setup.keys[2]
    swap(recorded)
    batches = BatchMaker(LIMITS, 120, 256)
    with pytest.raises(VerificationError):
        check_key(recorded, key, compositions(recorded, key, batches))
    debugged = executor_of(checkpoint, BACKENDS[0], debug=True)
    store_nowhere(debugged)
    assert serve(debugged, [greedy("a", PROMPTS[0], 9)]).answers != expected


def test_keys_are_frozen_all_the_same(checkpoint: Path) -> None:
    debugged = executor_of(checkpoint, BACKENDS[0], debug=True)
    with pytest.raises(CaptureError, match="after the keys were frozen"):
        debugged.decode.capture(debugged.decode.setup.keys[0])
