"""Which products take another algorithm: what is asked, what is better; and the timing itself, on the tape, with a
library whose algorithms are slow, wrong or refused on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from formats.measurements import Timing
from gplan.errors import CaptureError, GplanError
from gplan.graphs.capture.base import Segment
from gplan.graphs.capture.tape import TapeDevice
from gplan.kernels.products import LibraryProduct, ProductLibrary, ProductShape
from gplan.kernels.reference import ReferenceKernels
from gplan.models.base import Projection
from gplan.planning.options import PlanOptions
from gplan.planning.planner import make_plan
from gplan.planning.product_timing import MOST_ALGORITHMS, choose_products
from gplan.planning.products import LEAST_GAIN, MOST_ROWS, TIE, Products, is_better, products_asked, worth_timing
from gplan.planning.profiler import Patience
from tests.checkpoints import make_checkpoint


def timing(median_us: float, spread_us: float = 0.0) -> Timing:
    return Timing(median_us=median_us, spread_us=spread_us, runs=5)


@pytest.mark.parametrize(
    ("chosen", "default", "better"),
    [
        (timing(97.0), timing(100.0), True),
        (timing(98.5), timing(100.0), False),
        (timing(100.0), timing(100.0), False),
        (timing(110.0), timing(100.0), False),
        (timing(90.0, 4.0), timing(100.0, 4.0), True),
        (timing(90.0, 6.0), timing(100.0, 4.0), False),
    ],
)
def test_better_is_faster_by_enough_and_beyond_the_spread(chosen: Timing, default: Timing, better: bool) -> None:
    assert is_better(chosen, default) is better


def test_algorithms_are_tried_fastest_first_but_the_library_decides_near_draws() -> None:
    screened = {"a": 95.0, "b": 90.0, "c": 80.5, "d": 80.0, "e": 101.0}
    assert worth_timing(screened, 100.0) == ["c", "d", "b", "a"]


@given(st.dictionaries(st.text(max_size=3), st.floats(1.0, 1e6), max_size=8), st.floats(1.0, 1e6))
def test_only_what_may_gain_enough_is_timed_again(screened: dict[str, float], default_us: float) -> None:
    found = worth_timing(screened, default_us)
    assert set(found) == {name for name, us in screened.items() if us <= default_us * (1 - LEAST_GAIN / 2)}
    if found:
        assert screened[found[0]] <= min(screened.values()) * (1 + TIE)


def projections(k: int = 24, n: int = 16, layers: int = 2, scale: float = 1.0) -> tuple[Projection, ...]:
    def weights(*shape: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape) * scale for _ in range(layers))

    return (
        Projection(weights(n, k), has_bias=True),
        Projection(weights(n, k), adds=True),
        Projection(weights(2 * n, k), gated=True),
        Projection(weights(n, k), adds=True),
    )


class LeavingKernels(ReferenceKernels):
    """Leaves products of more than 8 rows to a library, of a gate those of more than 16."""

    @staticmethod
    def leaves_to_library(shape: ProductShape, *, gated: bool) -> bool:
        return shape.m > (16 if gated else 8)


def test_what_is_asked_is_what_the_kernels_leave_to_their_library_without_biases_once() -> None:
    asked = products_asked(projections(), LeavingKernels, [16, 32, 4, 32, 2 * MOST_ROWS])
    assert [each.shape for each in asked] == [(16, 16, 24, True), (32, 16, 24, True), (32, 32, 24, False)]
    assert products_asked(projections(), ReferenceKernels, [16, 32]) == []


class MadeProduct(LibraryProduct):
    """What its algorithm says: `fast`, `near`, `slow`, `wrong` (without the last row), or `refused` when it runs."""

    def __init__(self, shape: ProductShape, kind: str, library: MadeLibrary) -> None:
        self.shape, self._kind, self._library = shape, kind, library

    def run(self, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor) -> None:
        assert workspace.nbytes >= MadeLibrary.workspace_bytes
        if self._kind == "refused":
            raise GplanError("refused")
        rows = len(x) - (self._kind == "wrong")
        product = torch.mm(x[:rows], weight.t())
        out[:rows].copy_(out[:rows] + product if self.shape.adds else product)
        self._library.last = self._kind


class MadeLibrary(ProductLibrary):
    workspace_bytes = 64
    alignment = 1
    dtype = torch.float32

    def __init__(self, *kinds: str) -> None:
        self._kinds, self.last = kinds, ""

    def algorithms(self, shape: ProductShape, most: int) -> tuple[str, ...]:
        return self._kinds[:most]

    def product(self, shape: ProductShape, algorithm: str) -> MadeProduct:
        return MadeProduct(shape, algorithm, self)


class StatedDevice(TapeDevice):
    """A tape whose graphs take what is stated for the product in them."""

    US: ClassVar = {"": 100.0, "fast": 50.0, "near": 99.0, "slow": 120.0, "wrong": 10.0}

    def __init__(self, library: MadeLibrary) -> None:
        super().__init__()
        self._library, self._us = library, {}

    def begin_segment(self) -> None:
        self._library.last = ""
        super().begin_segment()

    def end_segment(self) -> Segment:
        segment = super().end_segment()
        self._us[segment] = self.US[self._library.last]
        return segment

    def time_us(self, fn: Callable[[], object], repeats: int) -> list[float]:
        for _ in range(repeats):
            fn()
        return [self._us.get(getattr(fn, "__self__", None), 100.0)] * repeats


def choose(*kinds: str, scale: float = 1.0) -> Products:
    library = MadeLibrary(*kinds)
    asked = products_asked(projections(scale=scale), LeavingKernels, (16, 32))
    told = []
    device = StatedDevice(library)
    found = choose_products(asked, library, device, Patience(2, 4, 0.01), lambda *stage: told.append(stage))
    device.close()
    assert told[-1] == ("products", len(asked), len(asked))
    assert found.num_timed == len(asked)
    return found


def test_the_fastest_that_is_right_is_taken_at_every_shape() -> None:
    found = choose("slow", "wrong", "near", "fast", "refused")
    assert [(each.m, each.n, each.adds) for each in found.choices] == [(16, 16, True), (32, 16, True), (32, 32, False)]
    assert {each.algorithm for each in found.choices} == {"fast"}
    calls = 4  # a graph of 100 us is repeated to 400
    assert {(each.chosen.median_us, each.default.median_us) for each in found.choices} == {(50 / calls, 100 / calls)}
    assert found.reason.startswith("3 of 3 shapes by another algorithm")
    assert "50.0% less time" in found.reason


@pytest.mark.parametrize("kinds", [(), ("slow",), ("near",), ("wrong",), ("refused",), ("refused", "wrong", "slow")])
def test_what_is_wrong_or_gains_too_little_is_left_to_the_library(kinds: tuple[str, ...]) -> None:
    found = choose(*kinds)
    assert found.choices == ()
    assert found.reason.startswith("of 3 shapes none")


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_what_is_wrong_is_found_whatever_the_size_of_the_weights(scale: float) -> None:
    assert choose("wrong", scale=scale).choices == ()
    assert len(choose("wrong", "fast", scale=scale).choices) == 3


def test_only_the_most_promising_algorithms_are_tried() -> None:
    assert choose(*["slow"] * MOST_ALGORITHMS, "fast").choices == ()


def test_nothing_is_timed_where_nothing_is_asked() -> None:
    library = MadeLibrary("fast")
    device = StatedDevice(library)
    assert choose_products([], library, device, Patience(), lambda *_: None) == Products()
    device.close()


def test_a_reset_segment_is_not_replayed() -> None:
    device, out = TapeDevice(), torch.ones(2)
    with torch.no_grad(), device.session():
        device.begin_segment()
        out.add_(1)
        segment = device.end_segment()
    segment.replay()
    segment.reset()
    with pytest.raises(CaptureError, match="after it was reset"):
        segment.replay()
    device.close()


def test_a_plan_of_reference_kernels_chooses_nothing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    options = PlanOptions(
        checkpoint=str(checkpoint), device="cpu", memory="1GiB", max_batch=2, max_len=64, chunk=16,
        decode_buckets=(2,), prefill_buckets=(16,), decode_backend="full", prefill_backend="breakable",
    )  # fmt: skip
    plan = make_plan(options, lambda *_: None, Patience(2, 2, 0.01))
    assert (plan.products, plan.fingerprint.blas_version) == ((), "")
    assert "products" not in {choice.field for choice in plan.choices}
