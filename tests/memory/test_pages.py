"""The KV pool's reserved page, and the host's page table that attention metadata is cut from."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Batch, Chunk, Phase, Request, SamplingParams
from gplan.memory.kv_pool import KVLayout, KVPool
from gplan.memory.page_table import PageTable

LAYOUT = KVLayout(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
PARAMS = SamplingParams(max_tokens=1)


def test_bytes_are_known_before_they_are_taken() -> None:
    pool = KVPool(LAYOUT, 7, torch.device("cpu"))
    assert KVPool.nbytes(LAYOUT, 7) == pool.data.untyped_storage().nbytes() == 7 * LAYOUT.bytes_per_page
    assert len(pool.layers) == 3
    assert all(k.shape == v.shape == (7, 4, 2, 8) for k, v in pool.layers)
    assert not pool.data.any()


def chunk(row: int, pages: tuple[int, ...], preemptions: int = 0, request: Request | None = None) -> Chunk:
    request = request or Request(f"r{row}", 1, [0], PARAMS, row=row, num_preemptions=preemptions)
    return Chunk(request, len(pages) * 4 - 1, 1, pages, samples=True)


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=6), min_size=1, max_size=5))
def test_indices_are_the_pages_of_each_request_in_order(pages: list[list[int]]) -> None:
    table = PageTable(8, 6, 4)
    batch = Batch(Phase.DECODE, tuple(chunk(row + 1, tuple(held)) for row, held in enumerate(pages)))
    counts = table.update(batch)
    rows = np.arange(1, len(pages) + 1, dtype=np.int32)
    assert counts.tolist() == [len(held) for held in pages]
    assert table.indices(rows, counts).tolist() == [page for held in pages for page in held]
    last = np.array([len(held) * 4 - 1 for held in pages], dtype=np.int64)
    assert table.slots(rows, last).tolist() == [held[-1] * 4 + 3 for held in pages]


def test_a_row_that_changed_hands_is_written_anew() -> None:
    table = PageTable(2, 4, 4)
    table.update(Batch(Phase.DECODE, (chunk(1, (5, 6, 7)),)))
    counts = table.update(Batch(Phase.DECODE, (chunk(1, (8, 9)),)))
    assert table.indices(np.array([1], np.int32), counts).tolist() == [8, 9]


def test_a_request_that_was_preempted_is_written_anew() -> None:
    table = PageTable(2, 4, 4)
    request = Request("r", 1, [0], PARAMS, row=1)
    table.update(Batch(Phase.PREFILL, (chunk(1, (5, 6), request=request),)))
    request.num_preemptions = 1
    counts = table.update(Batch(Phase.PREFILL, (chunk(1, (7, 6, 3), request=request),)))
    assert table.indices(np.array([1], np.int32), counts).tolist() == [7, 6, 3]


def test_padding_reads_the_dummy_page() -> None:
    table = PageTable(2, 4, 4)
    assert table.indices(np.zeros(3, np.int32), np.ones(3, np.int32)).tolist() == [0, 0, 0]
