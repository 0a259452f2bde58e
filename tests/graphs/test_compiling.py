"""Compiled forwards: the same tokens, few pieces, captured by our graphs, and kept for the next start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gplan.core import Phase
from gplan.errors import CaptureError
from gplan.graphs.compiler import cache_folder, has_compiler
from gplan.graphs.compiling import CompiledForward
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.synthetic import BatchMaker
from gplan.kernels.base import Kernels
from gplan.models.base import ForwardInputs, Model
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

pytestmark = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler here")

LIMITS = limits_of(max_batch=8, max_len=64, chunk=8)
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("compiled"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def executor(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Both phases at one size: the pieces between attention calls are then the same, and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        made = make_executor(
            checkpoint,
            prefill="piecewise",
            limits=LIMITS,
            num_pages=70,
            decode_ladder=(8,),
            prefill_ladder=(8,),
            decode_base="compiled",
            decode_variants=("compiled+greedy",),
        )
        yield made
        made.close()


def test_every_key_replays_to_the_bit_and_rounds_like_its_operators(executor: Executor) -> None:
    batches = BatchMaker(LIMITS, 70, VOCAB_SIZE)
    assert [str(key) for key in executor.keys] == ["decode:8:compiled", "decode:8:compiled+greedy", "prefill:8"]
    for key in executor.keys:
        receipt = check_key(executor, key, compositions(executor, key, batches))
        assert receipt.max_abs_diff < 1e-4
        assert receipt.bitwise == (receipt.max_abs_diff == 0)


def test_answers_are_those_of_the_operators(executor: Executor, checkpoint: Path) -> None:
    def requests() -> list[object]:
        return [greedy(str(n), list(range(n, n + length)), 12) for n, length in enumerate((1, 5, 9, 30))]

    plain = make_executor(checkpoint, decode="eager", prefill="eager", limits=LIMITS, num_pages=70)
    found = serve(executor, requests())
    assert found.answers == serve(plain, requests()).answers
    assert set(found.steps) == {"prefill:8", "decode:8:compiled+greedy"}


def test_pieces_are_few_and_graphs_ours(executor: Executor) -> None:
    assert executor.prefill.backend.num_segments(executor.prefill.setup.keys[0]) == NUM_LAYERS + 1
    assert {executor.decode.backend.num_segments(key) for key in executor.decode.setup.keys} == {1}
    for runner in (executor.decode, executor.prefill):
        (forward,) = runner._compiled.values()
        assert len(forward._pieces) == 3, "before, between and after attention, however many layers"


def test_keys_and_values_are_written_where_they_lie(executor: Executor) -> None:
    """Code that copied a cache to write to it, and copied it back, would give the same answers."""
    cache = executor.parts.kv_pool.layers[0][0]
    for key in executor.keys:
        forward = executor.runner(key.phase)._forwards[key]
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            forward()
        largest = max(event.cpu_memory_usage for event in trace.events())
        assert 0 < largest < cache.nbytes


def test_compiled_code_is_kept_where_the_folder_says(executor: Executor) -> None:
    assert list(cache_folder().rglob("*.so"))


def test_a_tensor_that_crosses_attention_is_refused(executor: Executor) -> None:
    class Hoarder(Model):
        """Keeps a tensor of its own over the attention call."""

        def forward(self, kernels: Kernels, inputs: ForwardInputs) -> None:
            kept = inputs.residual * 2
            (k_cache, v_cache), *_ = inputs.kv_caches
            inputs.attend(inputs.attn_q, k_cache, v_cache, inputs.attn_out)
            inputs.residual.add_(kept)

        def finish(self, kernels: Kernels, attended: Tensor, residual: Tensor) -> None: ...

        def head(self, kernels: Kernels, hidden: Tensor, out: Tensor) -> None: ...

        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            return iter(())

    runner = executor.runner(Phase.DECODE)
    attention = runner.load_padding(runner.setup.keys[0])
    inputs = replace(runner._inputs(8, attention), attend=None)
    with pytest.raises(CaptureError, match="crosses an attention call"), torch.no_grad():
        CompiledForward(Hoarder(), executor.parts.kernels, inputs, attention)()
