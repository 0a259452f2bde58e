"""Times matrix products: the library's own choice, as torch asks for it, against algorithms by name.

What the host does is left out by recording each into a small graph; weights follow each other from layer to layer, as
in a forward, so that they are not found in a cache where a forward would not find them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice

import msgspec
import torch
from torch import Tensor

from formats.measurements import Timing
from formats.plan import ProductChoice
from gplan.errors import GplanError
from gplan.graphs.capture.base import GraphDevice
from gplan.kernels.products import LibraryProduct, ProductLibrary
from gplan.planning.options import Progress
from gplan.planning.products import Asked, Products, is_better, worth_timing
from gplan.planning.profiler import Patience, in_turns

MOST_ALGORITHMS = 6
"""Of a shape, those that the library thinks fastest: all shapes together are to take seconds."""

SCREENING_RUNS, RUNS_A_TURN = 3, 3

GRAPH_US, LEAST_CALLS, MOST_CALLS = 400.0, 3, 12
"""A graph of one product repeated: how long it should take, and how often it is repeated at least and at most."""

PARTS = 4
"""Of the patience, what the last comparison of one shape may take."""

TOLERANCE = 0.03
"""Of an element, and of the mean element beside it: sums in another order, rounded to 8 bits, stay well within."""

Multiply = Callable[[Tensor], None]
"""A product with the weight of one layer, into the same results."""


@torch.no_grad()
def choose_products(
    asked: Sequence[Asked], library: ProductLibrary, graphs: GraphDevice, patience: Patience, progress: Progress
) -> Products:
    """Times every product with the library's most promising algorithms, and takes those that are right and faster.

    Args:
        asked: ascending by shape, with weights on one device.
        graphs: used for nothing else; left open.
    """
    if not asked:
        return Products()
    table, choices = _Table(asked, library, graphs, patience), []
    with graphs.session():
        table.keep_pool()
        for index, each in enumerate(asked):
            progress("products", index, len(asked))
            choice = table.choose(each)
            if choice is not None:
                choices.append(choice)
    progress("products", len(asked), len(asked))
    return Products(tuple(choices), len(asked))


class _Table:
    """Operands for the largest of the products, and what times them."""

    def __init__(
        self, asked: Sequence[Asked], library: ProductLibrary, graphs: GraphDevice, patience: Patience
    ) -> None:
        self._library, self._graphs, self._patience = library, graphs, patience.divided(PARTS)
        device = asked[0].projection.weights[0].device
        columns, results = (max(each.shape.m * getattr(each.shape, axis) for each in asked) for axis in ("k", "n"))
        self._x = torch.empty(columns, dtype=library.dtype, device=device).normal_()
        self._out = torch.zeros(results, dtype=library.dtype, device=device)
        self._workspace = torch.empty(library.workspace_bytes, dtype=torch.uint8, device=device)

    def keep_pool(self) -> None:
        """Records a first graph, and keeps it: a graph pool that no graph uses any more cannot be used again."""
        self._graphs.begin_segment()
        self._out.zero_()
        self._graphs.end_segment()

    def choose(self, asked: Asked) -> ProductChoice | None:
        m, n, k, adds = asked.shape
        x, out = self._x[: m * k].view(m, k), self._out[: m * n].view(m, n)
        default: Multiply = partial(_add_by_torch if adds else _by_torch, x, out)
        weights = self._weights(asked, default)
        found = self._products(asked)
        with self._recorded(default, weights) as usual:
            default_us = self._screen(usual)
            screened = {name: self._screened(product, x, out, weights) for name, product in found.items()}
            for name in worth_timing(screened, default_us):
                multiply = self._by(found[name], x, out)
                if not _are_equal(multiply, default, weights[0], out, adds=adds):
                    continue
                with self._recorded(multiply, weights) as other:
                    one, two = in_turns(partial(self._turn, other), partial(self._turn, usual), self._patience)
                chosen, standard = _each(one, len(weights)), _each(two, len(weights))
                if not is_better(chosen, standard):
                    return None
                return ProductChoice(m=m, n=n, k=k, adds=adds, algorithm=name, chosen=chosen, default=standard)
        return None

    def _weights(self, asked: Asked, default: Multiply) -> list[Tensor]:
        """As many as make a graph that is long enough, layer after layer, from the first again after the last."""
        weights = asked.projection.weights
        once_us = statistics.median(self._graphs.time_us(lambda: default(weights[0]), SCREENING_RUNS))
        calls = min(MOST_CALLS, max(LEAST_CALLS, round(GRAPH_US / max(once_us, 1.0))))
        return list(islice(cycle(weights), calls))

    def _products(self, asked: Asked) -> dict[str, LibraryProduct]:
        """By algorithm, in the library's order; none where it cannot read the weights."""
        if any(weight.data_ptr() % self._library.alignment for weight in asked.projection.weights):
            return {}
        names = self._library.algorithms(asked.shape, MOST_ALGORITHMS)
        return {name: self._library.product(asked.shape, name) for name in names}

    def _by(self, product: LibraryProduct, x: Tensor, out: Tensor) -> Multiply:
        return lambda weight: product.run(x, weight, out, self._workspace)

    def _screened(self, product: LibraryProduct, x: Tensor, out: Tensor, weights: Sequence[Tensor]) -> float:
        try:
            with self._recorded(self._by(product, x, out), weights) as replay:
                return self._screen(replay)
        except GplanError:
            return float("inf")

    def _screen(self, replay: Callable[[], None]) -> float:
        return min(self._graphs.time_us(replay, SCREENING_RUNS))

    def _turn(self, replay: Callable[[], None]) -> float:
        return statistics.median(self._graphs.time_us(replay, RUNS_A_TURN))

    @contextmanager
    def _recorded(self, multiply: Multiply, weights: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
        """A graph of one product after the other. The first call, which loads the kernel, is not recorded."""
        multiply(weights[0])
        self._graphs.begin_segment()
        try:
            for weight in weights:
                multiply(weight)
        except BaseException:
            self._graphs.abort_segment()
            raise
        segment = self._graphs.end_segment()
        try:
            yield segment.replay
        finally:
            segment.reset()


def _by_torch(x: Tensor, out: Tensor, weight: Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def _add_by_torch(x: Tensor, out: Tensor, weight: Tensor) -> None:
    out.addmm_(x, weight.t())


def _are_equal(multiply: Multiply, default: Multiply, weight: Tensor, out: Tensor, *, adds: bool) -> bool:
    """Whether both leave the same, up to rounding, where before was something of the same size: the results themselves
    where they are added, else their opposite."""
    out.zero_()
    default(weight)
    before = out.clone() if adds else -out
    out.copy_(before)
    default(weight)
    expected = out.clone()
    out.copy_(before)
    multiply(weight)
    atol = TOLERANCE * float(expected.abs().mean())
    return torch.allclose(out, expected, rtol=TOLERANCE, atol=atol)


def _each(timing: Timing, calls: int) -> Timing:
    """The time of one of so many calls."""
    return msgspec.structs.replace(timing, median_us=timing.median_us / calls, spread_us=timing.spread_us / calls)
