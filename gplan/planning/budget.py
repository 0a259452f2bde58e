"""Where every byte goes: fills the ledger and sizes the KV pool from what remains."""

from __future__ import annotations

from dataclasses import dataclass

from formats.plan import LEDGER_ROWS, LedgerRow, Limits
from gplan.errors import FitError
from gplan.memory.kv_pool import KVLayout
from gplan.units import MIB, format_size

HEADROOM_FRACTION = 0.01
MIN_HEADROOM = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that do not depend on the size of the KV pool, and a sentence on how each figure came about.

    Attributes:
        comparison: what comparing graphs with eager forwards takes beyond the rows, before anything is served: headroom
            has room for it.
    """

    rows: dict[str, tuple[int, str]]
    comparison: int = 0

    def total(self) -> int:
        return sum(nbytes for nbytes, _ in self.rows.values())


@dataclass(frozen=True, slots=True)
class Budget:
    """A ledger that adds up to the memory, and the pages of the KV pool, the dummy page included."""

    ledger: tuple[LedgerRow, ...]
    num_kv_pages: int


def pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def most_useful_pages(limits: Limits) -> int:
    """Pages with which every request row can grow to the maximum length; more would never be used."""
    return 1 + limits.max_batch * pages_of(limits.max_len, limits.page_size)


def fill_ledger(memory_bytes: int, needs: Needs, layout: KVLayout, limits: Limits) -> Budget:
    """Spends `memory_bytes`: what the model and its graphs need, then a headroom, then KV pages.

    The number of pages is rounded down to a coarse step, at most 1/128 of it, so that measurements that differ by a
    few bytes give the same plan.

    Raises:
        FitError: names the first row that no longer fits, or the KV pool when it cannot hold one request.
    """
    headroom = max(MIN_HEADROOM, int(memory_bytes * HEADROOM_FRACTION), needs.comparison)
    left = memory_bytes - headroom
    for name, (nbytes, _) in needs.rows.items():
        if nbytes > left:
            raise FitError(
                f"ledger row {name}: needs {format_size(nbytes)}, {format_size(max(left, 0))} of "
                f"{format_size(memory_bytes)} is left for it",
                "Give more with --memory, or ask for less with --max-batch or --chunk.",
            )
        left -= nbytes
    affordable = left // layout.bytes_per_page
    required = 1 + pages_of(limits.max_len, limits.page_size)
    if affordable < required:
        raise FitError(
            f"ledger row kv_pool: one request of {limits.max_len} tokens needs "
            f"{format_size(required * layout.bytes_per_page)}, {format_size(max(left, 0))} is left for it",
            "Give more with --memory, or ask for less with --max-len.",
        )
    num_pages = max(required, min(_round_down(affordable), most_useful_pages(limits)))
    kv_bytes = layout.bytes_per_page * num_pages
    known = dict(needs.rows)
    known["kv_pool"] = (kv_bytes, f"{num_pages} pages of {limits.page_size} tokens, from what the other rows leave")
    rest = memory_bytes - needs.total() - kv_bytes
    known["headroom"] = (rest, "what no other row needs; at least 1% of the memory")
    rows = tuple(LedgerRow(name=name, planned_bytes=known[name][0], basis=known[name][1]) for name in LEDGER_ROWS)
    return Budget(rows, num_pages)


def _round_down(pages: int) -> int:
    step = 1 << max(0, pages.bit_length() - 8)
    return pages // step * step
