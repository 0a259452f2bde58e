"""Which kernel multiplies a few rows with a weight matrix: a fixed rule over the shape.

Never timed at run time: the same shape is always computed by the same kernel, in a graph and outside. The figures were
chosen by measuring whole decode steps of a model of 8 billion parameters on an H200, one shape at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gplan.kernels.flashinfer.workspace import MAX_TILES, PARTIAL_FLOATS

PROCESSORS = 132
"""Programs that keep an H200 busy."""
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class OneRow:
    """One row of any length: results of a program, columns at a time, warps."""

    bn: int
    bk: int
    warps: int


@dataclass(frozen=True, slots=True)
class OneRowLoop:
    """One row that a program holds whole, and loops over results: how many at a time, warps, programs to aim at."""

    bn: int
    warps: int
    programs: int


@dataclass(frozen=True, slots=True)
class FewRows:
    """Up to `bm` rows (or more, in tiles of it): tile of results, columns at a time, splits of the columns, warps,
    stages."""

    bm: int
    bn: int
    bk: int
    splits: int
    warps: int
    stages: int


Config = OneRow | OneRowLoop | FewRows


@dataclass(frozen=True, slots=True)
class Product:
    """What is asked for: m rows of k columns times n results (pairs of results, where gated)."""

    m: int
    n: int
    k: int
    gated: bool


@cache
def choose(product: Product) -> Config | None:
    """The launch shape for a product, or None for cuBLAS."""
    if product.m == 1:
        return _one_row(product)
    if product.m <= 16:
        return _up_to_16_rows(product)
    if product.gated and product.m <= 32:
        return FewRows(bm=32, bn=64, bk=128, splits=1, warps=4, stages=3)
    if product.gated and product.m <= 64:
        return FewRows(bm=64, bn=64, bk=64, splits=1, warps=4, stages=5)
    return None


def split_columns(k: int, bk: int, splits: int) -> int:
    """Columns of one split: a multiple of `bk`."""
    return -(-k // (bk * splits)) * bk


def _one_row(product: Product) -> Config:
    if product.k > 8192:
        return OneRow(bn=4, bk=512, warps=4)
    if product.k > 4096:
        return OneRowLoop(bn=2, warps=16, programs=2 * PROCESSORS)
    warps = 8 if product.k > 1024 else 4
    if product.gated:
        return OneRowLoop(bn=2, warps=warps, programs=2 * PROCESSORS)
    if product.n > 4096:
        return OneRowLoop(bn=2, warps=warps, programs=4 * PROCESSORS)
    return OneRowLoop(bn=4, warps=warps, programs=2 * PROCESSORS)


def _up_to_16_rows(product: Product) -> FewRows:
    if product.gated or product.n >= 32 * PROCESSORS:
        return FewRows(bm=16, bn=32, bk=256, splits=1, warps=4, stages=3)
    return FewRows(bm=16, bn=64, bk=256, splits=_splits(product, bm=16, bn=64, bk=256), warps=4, stages=3)


def _splits(product: Product, bm: int, bn: int, bk: int) -> int:
    """Enough programs for the device, each with some columns to do, within the workspace."""
    tiles = -(-product.n // bn) * -(-product.m // bm)
    splits = 1
    while (
        splits < MAX_SPLITS
        and tiles * splits < 1.5 * PROCESSORS
        and product.k >= 4 * bk * splits
        and tiles <= MAX_TILES
        and tiles * 2 * splits * bm * bn <= PARTIAL_FLOATS
    ):
        splits *= 2
    return splits
