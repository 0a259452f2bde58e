"""Paged attention against its formula, on caches that are NaN wherever nothing was stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.kernels import make_kernels
from gplan.kernels.attention_groups import GROUP_TOKENS, schedule_of
from gplan.kernels.base import Attention, AttentionBatch
from gplan.kernels.reference import ReferenceKernels
from tests.kernels.shapes import PagedRequests, make_shape

WORK = st.tuples(st.integers(1, 40), st.integers(0, 40))
"""Tokens of a request, and queries wished for."""

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def _run(attention: Attention, requests: PagedRequests, padding: int = 0) -> torch.Tensor:
    """Rows of `out`, with so many rows of NaN queries behind the real ones; unwritten rows hold 7."""
    shape = requests.shape
    q = torch.cat([requests.q, torch.full((padding, *requests.q.shape[1:]), float("nan"), dtype=shape.dtype)])
    out = torch.full_like(q, 7.0)
    attention.prepare(requests.batch)
    attention.run(q, requests.k_cache, requests.v_cache, out)
    return out


def _decode(requests: PagedRequests) -> torch.Tensor:
    kernels = make_kernels("reference", requests.shape)
    return _run(kernels.decode_attention(len(requests.lengths), in_graph=True), requests)


def _prefill(requests: PagedRequests, padding: int = 0) -> torch.Tensor:
    kernels = make_kernels("reference", requests.shape)
    attention = kernels.prefill_attention(len(requests.q) + padding, len(requests.lengths), in_graph=True)
    return _run(attention, requests, padding)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8), st.booleans(), st.integers(0, 9))
def test_decode_equals_the_formula(lengths: list[int], consecutive: bool, seed: int) -> None:
    requests = PagedRequests.make(tuple(lengths), (1,) * len(lengths), consecutive=consecutive, seed=seed)
    torch.testing.assert_close(_decode(requests).double(), requests.expected(), **TOLERANCE)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 9),
)
def test_prefill_equals_the_formula(work: list[tuple[int, int]], consecutive: bool, seed: int) -> None:
    """Chunks after prefixes of any length, single tokens and empty slots, in any mixture."""
    lengths = tuple(length for length, _ in work)
    queries = tuple(min(length, count) for length, count in work)
    requests = PagedRequests.make(lengths, queries, consecutive=consecutive, seed=seed)
    torch.testing.assert_close(_prefill(requests).double(), requests.expected(), **TOLERANCE)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_groups_and_dtypes(heads: tuple[int, int], dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "dtype": dtype}
    tolerance = TOLERANCE if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
    decode = PagedRequests.make((3, 17, 30), (1, 1, 1), **shape)
    torch.testing.assert_close(_decode(decode).double(), decode.expected(), **tolerance)
    prefill = PagedRequests.make((3, 17, 30), (3, 5, 1), **shape)
    torch.testing.assert_close(_prefill(prefill).double(), prefill.expected(), **tolerance)


def test_long_chunks_are_computed_in_blocks_of_queries() -> None:
    shape: dict[str, Any] = {"max_len": 1024, "max_tokens": 1024, "num_pages": 300, "head_dim": 8}
    requests = PagedRequests.make((700,), (600,), **shape)
    expected = requests.expected()
    torch.testing.assert_close(_prefill(requests).double(), expected, **TOLERANCE)


def test_padding_never_reaches_a_result() -> None:
    """Rows past the last query stay as they are; slots without queries cost nothing and change nothing."""
    requests = PagedRequests.make((9, 20, 1), (4, 1, 0))
    alone = _prefill(requests)
    padded = _prefill(requests, padding=11)
    assert torch.equal(padded[:5], alone)
    assert (padded[5:] == 7.0).all()


@given(st.lists(st.integers(1, 64), min_size=2, max_size=8))
def test_a_row_is_the_same_to_the_bit_whatever_others_hold(lengths: list[int]) -> None:
    requests = PagedRequests.make(tuple(lengths), (1,) * len(lengths))
    clean = _decode(requests)
    requests.q[1:] = float("nan")
    for held in requests.slots[1:]:
        requests.k_cache.flatten(0, 1)[held] = float("inf")
        requests.v_cache.flatten(0, 1)[held] = float("nan")
    poisoned = _decode(requests)
    assert torch.equal(poisoned[0], clean[0])
    assert poisoned[1:].isnan().all()  # the negative control: the poison was there


def test_poison_within_a_request_does_reach_it() -> None:
    requests = PagedRequests.make((9,), (1,))
    requests.v_cache.flatten(0, 1)[requests.slots[0][4]] = float("nan")
    assert _decode(requests).isnan().any()


def test_writes_nothing_but_out() -> None:
    requests = PagedRequests.make((9, 20), (4, 1))
    before = [t.clone() for t in (requests.q, requests.k_cache, requests.v_cache)]
    _prefill(requests)
    for tensor, saved in zip((requests.q, requests.k_cache, requests.v_cache), before, strict=True):
        torch.testing.assert_close(tensor, saved, rtol=0, atol=0, equal_nan=True)


def test_eager_attention_takes_any_number_up_to_its_own() -> None:
    small, large = PagedRequests.make((5, 9), (1, 1)), PagedRequests.make((7, 3, 20, 11), (1, 1, 1, 1))
    attention = make_kernels("reference", small.shape).decode_attention(4, in_graph=False)
    for requests in (large, small, large):
        torch.testing.assert_close(_run(attention, requests).double(), requests.expected(), **TOLERANCE)


def test_a_graph_holds_an_exact_number() -> None:
    requests = PagedRequests.make((5, 9), (1, 1))
    kernels = make_kernels("reference", requests.shape)
    with pytest.raises(AssertionError):
        kernels.decode_attention(3, in_graph=True).prepare(requests.batch)
    with pytest.raises(AssertionError):
        kernels.decode_attention(1, in_graph=False).prepare(requests.batch)
    with pytest.raises(AssertionError):
        kernels.decode_attention(kernels.shape.max_batch + 1, in_graph=False)


def test_metadata_never_move() -> None:
    requests = PagedRequests.make((5, 9), (1, 1))
    attention = make_kernels("reference", requests.shape).decode_attention(2, in_graph=True)
    before = {name: tensor.data_ptr() for name, tensor in attention.tensors()}
    _run(attention, requests)
    assert {name: tensor.data_ptr() for name, tensor in attention.tensors()} == before
    assert len(before) == 4


def test_workspace_is_known_before_it_is_taken() -> None:
    shape = make_shape()
    kernels = make_kernels("reference", shape)
    held = dict(kernels.decode_attention(1, in_graph=True).tensors())
    held.update(kernels.prefill_attention(8, 2, in_graph=True).tensors())
    assert ReferenceKernels.workspace_nbytes(shape) == sum(tensor.nbytes for tensor in held.values())


def test_padding_alone_fits() -> None:
    """A batch of padding may hold all of a step's tokens in one request, more than a request may have."""
    shape = make_shape(max_batch=2, max_len=8, max_tokens=64)
    pages = 64 // shape.page_size
    batch = AttentionBatch(
        qo_indptr=np.array([0, 64, 64], np.int32),
        kv_indptr=np.array([0, pages, pages + 1], np.int32),
        kv_indices=np.zeros(pages + 1, np.int32),
        kv_last_page_len=np.array([shape.page_size, 1], np.int32),
    )
    make_kernels("reference", shape).prefill_attention(64, 2, in_graph=True).prepare(batch)


def _groups(lengths: list[int]) -> list[tuple[list[int], int]]:
    """(rows, tokens gathered) of each group of single queries; page ids do not matter here."""
    counts = [-(-length // 16) for length in lengths]
    lists = (
        np.cumsum([0, *counts]).astype(np.int32),
        np.zeros(sum(counts), np.int32),
        np.array([(length - 1) % 16 + 1 for length in lengths], np.int32),
    )
    cache = torch.empty(1, 16, 1, 2)
    groups = schedule_of(None, *(torch.from_numpy(values) for values in lists), cache).single_queries
    return [
        (
            list(range(len(lengths))) if group.rows is None else group.rows.tolist(),
            group.length if group.slots is None else len(group.slots),
        )
        for group in groups
    ]


def test_cost_follows_the_tokens_in_use() -> None:
    """Short requests with a long one among them: the short ones are not padded to it."""
    assert sum(tokens for _, tokens in _groups([20] * 64)) == 64 * 20
    assert sum(tokens for _, tokens in _groups([20] * 63 + [4000])) == 63 * 20 + 4000


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_groups_hold_each_request_once_and_waste_at_most_half(lengths: list[int]) -> None:
    groups = _groups(lengths)
    assert sorted(row for rows, _ in groups for row in rows) == list(range(len(lengths)))
    for rows, tokens in groups:
        members = [lengths[row] for row in rows]
        assert tokens == max(members) * len(rows) <= 2 * sum(members)
        assert len(rows) == 1 or tokens <= GROUP_TOKENS
