"""Which matrix products take another algorithm than their library's own choice: what is asked, and what is better.

Times come from `product_timing`; nothing here runs on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from formats.measurements import Timing
from formats.plan import ProductChoice
from gplan.kernels.base import Kernels
from gplan.kernels.products import ProductShape
from gplan.models.base import Projection

LEAST_GAIN = 0.02
"""Of the product's time: what gains less is left to the library, so that plans repeat."""

TIE = 0.01
"""Of the fastest's time: among algorithms no slower than that, the one the library thinks best is taken."""

MOST_ROWS = 2048
"""Of more rows products are bound by arithmetic, at which the library's own choice is good, and take long to time."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A product of one size, and the weights that it is done with in a forward."""

    shape: ProductShape
    projection: Projection


@dataclass(frozen=True, slots=True)
class Products:
    """What was chosen, ascending by shape, of how many shapes that were timed."""

    choices: tuple[ProductChoice, ...] = ()
    num_timed: int = 0

    @property
    def reason(self) -> str:
        """One sentence, with figures."""
        if not self.choices:
            return (
                f"of {self.num_timed} shapes none by another algorithm is faster by {LEAST_GAIN:.0%} than the library's"
            )
        default = sum(choice.default.median_us for choice in self.choices)
        saved = 1 - sum(choice.chosen.median_us for choice in self.choices) / default
        return (
            f"{len(self.choices)} of {self.num_timed} shapes by another algorithm of cuBLASLt than its own choice, "
            f"{saved:.1%} less time over them"
        )


def products_asked(projections: Iterable[Projection], kernels: type[Kernels], sizes: Iterable[int]) -> list[Asked]:
    """Products that the kernels leave to their library at these sizes, ascending, each shape once. Those with a bias
    are left out."""
    asked: dict[ProductShape, Asked] = {}
    for size in sorted({size for size in sizes if size <= MOST_ROWS}):
        for projection in projections:
            n, k = projection.weights[0].shape
            shape = ProductShape(size, n, k, projection.adds)
            if not projection.has_bias and kernels.leaves_to_library(shape, gated=projection.gated):
                asked.setdefault(shape, Asked(shape, projection))
    return [asked[shape] for shape in sorted(asked)]


def worth_timing(screened_us: Mapping[str, float], default_us: float) -> list[str]:
    """Algorithms that may be worth it by a first, short look, the best first.

    Args:
        screened_us: in the order in which the library thinks them fastest.
        default_us: of the library's own choice.
    """
    if not screened_us:
        return []
    fastest = min(screened_us.values())
    order = sorted(screened_us, key=lambda each: 0.0 if screened_us[each] <= fastest * (1 + TIE) else screened_us[each])
    return [each for each in order if screened_us[each] <= default_us * (1 - LEAST_GAIN / 2)]


def is_better(chosen: Timing, default: Timing) -> bool:
    """Whether it takes less time by `LEAST_GAIN`, and by more than both were spread."""
    gain = default.median_us - chosen.median_us
    return gain >= LEAST_GAIN * default.median_us and gain > chosen.spread_us + default.spread_us
