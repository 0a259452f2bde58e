"""Memory that runs out: before ready the start ends with the ledger row, after it only the request that has no room."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from formats.container import write_plan
from formats.plan import LEDGER_ROWS, Plan
from gplan.core import Batch, SamplingParams
from gplan.errors import FitError
from gplan.graphs.executor import Step
from gplan.graphs.machine import read_fingerprint
from gplan.memory.failures import is_device_failure, is_shortage, taking
from gplan.models import read_headers, read_spec
from gplan.serving.engine import Engine
from gplan.serving.protocol import Add, Drain, Failed, Idle
from gplan.serving.startup import start_executor
from tests.checkpoints import make_checkpoint
from tests.formats.plans import make_ledger, make_plan
from tests.scheduling.serve import answer, limits
from tests.serving.test_engine import Arithmetic, Script, add

PACKAGE = str(Path(__file__).parents[2] / "gplan")

# Before ready -------------------------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Notes from which lines of gplan torch is asked for memory; refuses it at one of them.

    Args:
        refuse: index, among those operators, of the first that gets none.
    """

    def __init__(self, refuse: int | None = None) -> None:
        super().__init__()
        self._refuse = refuse
        self.sites: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(result is arg for arg in args):
            self.sites.append(_site())
            if len(self.sites) - 1 == self._refuse:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return result


def _site() -> str:
    """The line of gplan, outside capture, that is nearest."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and "/capture/" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], object]:
    checkpoint = str(make_checkpoint(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=1))
    headers = read_headers(checkpoint)
    plan: Plan = make_plan(
        max_batch=2,
        max_len=64,
        chunk=16,
        decode_sizes=(2,),
        prefill_sizes=(16,),
        fingerprint=read_fingerprint("cpu", "reference"),
        model=headers.identity(read_spec(checkpoint, headers)),
        dtype="float32",
    )
    # The process of the tests maps more files than a server's does.
    ledger = make_ledger(plan.limits.memory_bytes, plan.planned_bytes("kv_pool"), non_torch=512 << 20)
    plan = msgspec.structs.replace(plan, ledger=ledger)
    write_plan(plan, tmp_path_factory.mktemp("plan") / "model.gplan")
    return lambda: start_executor(plan, checkpoint, lambda stage, done, total: None)


def test_memory_that_runs_out_anywhere_before_ready_names_the_ledger_row(start: Callable[[], object]) -> None:
    """At every line that asks for memory, the first time that it does."""
    with Memory() as memory:
        start()
    first = sorted({site: memory.sites.index(site) for site in reversed(memory.sites)}.values())
    assert len(first) > 20, "it looks at too few places"
    rows = set()
    for index in first:
        with pytest.raises(FitError, match="out of memory while taking ledger row") as failure, Memory(index):
            start()
        rows.add(re.findall(r"ledger row (\w+)", failure.value.message)[0])
        assert failure.value.hint
        assert is_shortage(failure.value)
    assert rows >= {"weights", "activation_reserve", "static_buffers", "kv_pool", "graph_pool_decode"}
    assert rows <= set(LEDGER_ROWS)


def test_what_memory_running_out_looks_like() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_shortage(refused.value), "torch's own CPU allocator"
    assert is_shortage(MemoryError())
    assert is_shortage(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_shortage(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_device_failure(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_device_failure(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert is_device_failure(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_shortage(RuntimeError("shapes do not match"))
    assert not is_device_failure(RuntimeError("shapes do not match"))


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ValueError, match=r"^other$"), taking("kv_pool"):
        raise ValueError("other")


# After ready --------------------------------------------------------------------------------------------------------


class Scarce(Arithmetic):
    """No step of more than `most` requests has memory, nor any step with a prompt of more than `longest` tokens."""

    most, longest = 2, 100

    def launch(self, batch: Batch, mask: object = None) -> Step:
        if batch.num_requests > self.most or any(c.request.prompt_len > self.longest for c in batch.chunks):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().launch(batch)


def serve(script: Script, lag: int, executor: Callable[..., Scarce] = Scarce) -> Scarce:
    bounds, num_pages = limits(max_batch=8, max_len=64, chunk=16), 161
    device = executor(bounds, num_pages, lag)
    Engine(device, bounds, num_pages, script, lambda: False).run()
    return device


@pytest.mark.parametrize("lag", [0, 1])
def test_steps_without_memory_are_run_again_with_fewer_requests(lag: int) -> None:
    prompts = {f"r{index}": [1 + (7 * index + place) % 90 for place in range(1 + index % 9)] for index in range(16)}
    script = Script({index // 2: [] for index in range(16)})
    for index, (name, prompt) in enumerate(prompts.items()):
        script.at_turn[index // 2].append(add(name, list(prompt), 20))
    script.at_turn[12] = [Drain()]
    device = serve(script, lag)
    for name, prompt in prompts.items():
        assert script.tokens(name) == answer(prompt, 20, 64)
    assert not [message for _, message in script.sent if isinstance(message, Failed)]
    assert max(batch.num_requests for batch in device.launched) == 2
    assert [message for _, message in script.sent if isinstance(message, Idle)][-1].pages_used == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_only_the_request_that_has_no_room_alone_fails(lag: int) -> None:
    class Tight(Scarce):
        most, longest = 8, 10

    large = [Add(f"large{i}", [5] * 30, SamplingParams(max_tokens=5)) for i in range(2)]
    small = [add(f"small{index}", [1 + index] * 4, 12) for index in range(5)]
    script = Script({0: [*small[:3]], 3: [large[0]], 4: [*small[3:]], 6: [large[1]], 7: [Drain()]})
    device = serve(script, lag, Tight)
    failed = [message for _, message in script.sent if isinstance(message, Failed)]
    assert [message.id for message in failed] == ["large0", "large1"]
    assert "memory" in failed[0].message
    for request in small:
        assert script.tokens(request.id) == answer(request.prompt[:4], 12, 64)
    assert not script.tokens("large0")
    assert [message for _, message in script.sent if isinstance(message, Idle)][-1].pages_used == 0
    assert device.launched


def test_a_request_whose_companion_ended_meanwhile_is_run_again() -> None:
    """The step that has no memory is the third, of two requests; the second found the end of one of them."""

    class Once(Scarce):
        most, num_refused = 8, 0

        def launch(self, batch: Batch, mask: object = None) -> Step:
            if len(self.launched) == 2 and batch.num_requests == 2 and not self.num_refused:
                self.num_refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().launch(batch)

    ending = next([n] for n in range(1, 2000) if len(answer([n], 9, 64)) == 1)
    script = Script({0: [add("ends", list(ending), 9), add("goes on", [5], 9, stops=False)], 1: [Drain()]})
    device = serve(script, 1, Once)
    assert device.num_refused == 1
    assert not [message for _, message in script.sent if isinstance(message, Failed)]
    assert script.tokens("ends") == answer(ending, 9, 64)
    assert script.tokens("goes on") == answer([5], 9, 64, stops=False)


def test_more_requests_run_at_once_again_when_there_is_memory() -> None:
    class Passing(Scarce):
        most = 2

        def launch(self, batch: Batch, mask: object = None) -> Step:
            self.most = 2 if len(self.launched) < 20 else 8
            return super().launch(batch)

    script = Script({0: [add(f"r{index}", [1 + index], 60, stops=False) for index in range(40)], 1: [Drain()]})
    device = serve(script, 0, Passing)
    assert max(batch.num_requests for batch in device.launched[:20]) <= 2
    assert max(batch.num_requests for batch in device.launched[20:]) == 8
