"""Which kernel multiplies a few rows with a weight matrix: a fixed rule over the shape, made from measurements.

Never timed at run time: the same shape is always computed by the same kernel, in a graph and outside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from gplan.kernels.flashinfer.workspace import MAX_TILES, PARTIAL_FLOATS

MAX_ROWS = 64
"""Beyond so many rows cuBLAS is used."""


@dataclass(frozen=True, slots=True)
class OneRow:
    """One row of any length: results of a program, columns at a time, warps."""

    bn: int
    bk: int
    warps: int


@dataclass(frozen=True, slots=True)
class OneRowLoop:
    """One row that a program holds whole, and loops over results: how many at a time, warps, programs to aim at.

    Attributes:
        prefetch: pieces of 512 bytes of weights, beyond the first, that a program asks for before it waits for its
            input.
    """

    bn: int
    warps: int
    programs: int
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class FewRows:
    """Up to `bm` rows (or more, in tiles of it): tile of results, columns at a time, splits of the columns, warps,
    stages.

    Attributes:
        prefetch: bytes of each row of the tile that a program asks for before it waits for its input.
    """

    bm: int
    bn: int
    bk: int
    splits: int
    warps: int
    stages: int
    prefetch: int = 0


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
    if product.m > MAX_ROWS:
        return None
    config = _one_row(product) if product.m == 1 else _few_rows(product)
    return None if config is None else fitted(config, product)


def fitted(config: Config, product: Product) -> Config:
    """The same with as many splits as the workspace and the columns allow, and no prefetch beyond a row's end."""
    if isinstance(config, OneRow):
        return config
    if isinstance(config, OneRowLoop):
        return config if product.k % 256 == 0 else replace(config, prefetch=0)
    splits = min(config.splits, -(-product.k // config.bk))
    tiles = -(-product.n // config.bn) * -(-product.m // config.bm)
    floats = config.bm * config.bn * (2 if product.gated else 1)
    while splits > 1 and (tiles > MAX_TILES or tiles * splits * floats > PARTIAL_FLOATS):
        splits //= 2
    columns = split_columns(product.k, config.bk, splits)
    return replace(config, splits=splits, prefetch=_prefetch(config.prefetch, columns, product.k))


def split_columns(k: int, bk: int, splits: int) -> int:
    """Columns of one split: a multiple of `bk`."""
    return -(-k // (bk * splits)) * bk


def _prefetch(num_bytes: int, columns: int, k: int) -> int:
    """No more than a split holds; none where splits or rows do not begin on 16 bytes."""
    while num_bytes and (num_bytes > columns * 2 or k % columns or k % 8):
        num_bytes //= 2
    return num_bytes if num_bytes >= 1024 else 0


def _one_row(product: Product) -> Config:
    if product.k <= 4096:
        return OneRowLoop(2 if product.gated else 4, 8, 264)
    return OneRow(4, 512, 4)


def _few_rows(product: Product) -> FewRows | None:
    if product.m <= 16:
        if product.gated:
            return FewRows(16, 64, 128, 1, 4, 3)
        if product.k >= 8192:
            return FewRows(16, 64, 256, 2, 4, 4)
        return FewRows(16, 64, 128, 1 if product.n >= 6144 else 2, 4, 6)
    if product.m <= 32:
        if product.gated:
            return FewRows(32, 64, 128, 1, 4, 3)
        if product.k < 8192 and product.n >= 6144:
            return FewRows(32, 32, 128, 2, 4, 4)
        return FewRows(32, 64, 128, 2, 4, 6)
    if product.gated:
        return FewRows(64, 64, 64, 1, 4, 4)
    if product.k >= 8192:
        return FewRows(64, 64, 128, 2, 4, 6)
    return FewRows(64, 64, 128, 1, 4, 6) if product.n >= 6144 else None
