"""Rotation, storing and attention on a GPU, against the formula and the reference, in graphs and outside."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gplan.errors import CaptureError, UnsupportedError
from gplan.kernels.base import Attention, AttentionBatch, Kernels, QKNorm
from tests.gpu.operators import CUDA, both, kernels_of, randn, relative_error
from tests.kernels.shapes import PagedRequests

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-3
HEADS = [(6, 2, 64), (32, 8, 128), (4, 4, 64), (5, 1, 128), (14, 2, 64), (8, 2, 256)]
MAX = 700


def requests_of(lengths: tuple[int, ...], queries: tuple[int, ...], **shape: Any) -> PagedRequests:
    defaults = {"dtype": torch.bfloat16, "head_dim": 64, "max_len": 1024, "num_pages": 700, "page_size": 16}
    return PagedRequests.make(lengths, queries, **{**defaults, "max_batch": 64, "max_tokens": 1024, **shape})


def on_gpu(requests: PagedRequests) -> tuple[Kernels, Tensor, Tensor, Tensor]:
    kernels = kernels_of(**{f: getattr(requests.shape, f) for f in _FIELDS})
    return kernels, requests.q.to(CUDA), requests.k_cache.to(CUDA), requests.v_cache.to(CUDA)


_FIELDS = (
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "max_batch",
    "max_tokens",
    "max_len",
    "num_pages",
    "dtype",
)


def attend(attention: Attention, batch: AttentionBatch, q: Tensor, k: Tensor, v: Tensor, padding: int = 0) -> Tensor:
    """Rows of `out`, with rows of NaN queries behind the real ones; unwritten rows hold 7."""
    q = torch.cat([q, torch.full((padding, *q.shape[1:]), float("nan"), dtype=q.dtype, device=q.device)])
    out = torch.full_like(q, 7.0)
    attention.prepare(batch)
    attention.run(q, k, v, out)
    return out


@pytest.mark.parametrize("heads", HEADS)
def test_decode_equals_the_formula(heads: tuple[int, int, int]) -> None:
    shape = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    for lengths in ((1,), (MAX,), (64, 65, 1, 17, 500), tuple(range(1, 50, 3)), (1000,) * 3):
        for page_size in (16, 1, 10):
            requests = requests_of(lengths, (1,) * len(lengths), page_size=page_size, num_pages=3300, **shape)
            kernels, q, k, v = on_gpu(requests)
            expected = requests.expected()
            for in_graph in (True, False):
                attention = kernels.decode_attention(len(lengths), in_graph=in_graph)
                found = attend(attention, requests.batch, q, k, v).cpu()
                assert relative_error(found, expected) < TOLERANCE, (lengths, page_size, in_graph)


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_equals_the_formula(heads: tuple[int, int, int]) -> None:
    shape = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    for lengths, queries in (
        ((40,), (40,)),
        ((200, 33), (20, 33)),
        ((1, 17, 90, 5), (1, 1, 45, 0)),
        ((300, 4, 1, 70), (1, 4, 1, 7)),
    ):
        requests = requests_of(lengths, queries, **shape)
        kernels, q, k, v = on_gpu(requests)
        expected = requests.expected()
        for in_graph, padding in ((False, 0), (False, 9), (True, 0), (True, 9)):
            attention = kernels.prefill_attention(len(q) + padding, len(lengths), in_graph=in_graph)
            found = attend(attention, requests.batch, q, k, v, padding)[: len(q)].cpu()
            assert relative_error(found, expected) < TOLERANCE, (lengths, in_graph, padding)


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_one_decode_graph_is_right_at_every_length(rows: int) -> None:
    """Captured once on padding alone, replayed at all lengths up to the maximum in random order; equal to eager at the
    same padded shape to the bit."""
    chance = random.Random(rows)
    long = requests_of((MAX,) * rows, (1,) * rows, num_pages=4000)
    kernels, q, k, v = on_gpu(long)
    attention, out = kernels.decode_attention(rows, in_graph=True), torch.zeros_like(q)
    attention.prepare(padding_batch(rows))
    graph = captured(lambda: attention.run(q, k, v, out))
    lengths = list(range(1, MAX + 1, 1 if rows == 1 else 7))
    chance.shuffle(lengths)
    for step, length in enumerate(lengths):
        held = [length] + [chance.randint(1, MAX) for _ in range(rows - 1)]
        batch = cut(long, held)
        attention.prepare(batch)
        out.fill_(float("nan"))
        graph.replay()
        eager = attend(attention, batch, q, k, v)
        assert torch.equal(out, eager), held
        if step % 50 == 0:
            expected = replace(
                long, lengths=tuple(held), slots=tuple(s[:n] for s, n in zip(long.slots, held, strict=True))
            )
            assert relative_error(out.cpu(), expected.expected()) < TOLERANCE


def test_one_prefill_graph_is_right_for_any_requests() -> None:
    rows, slots = 64, 5
    chance = random.Random(0)
    kernels, *_ = on_gpu(requests_of((1,), (1,)))
    attention = kernels.prefill_attention(rows, slots, in_graph=True)
    q = torch.zeros(rows, 6, 64, dtype=torch.bfloat16, device=CUDA)
    out, cache = torch.zeros_like(q), torch.zeros(2, 700, 16, 2, 64, dtype=torch.bfloat16, device=CUDA)
    attention.prepare(prefill_padding(rows, slots))
    graph = captured(lambda: attention.run(q, cache[0], cache[1], out))
    for seed in range(30):
        num_requests = chance.randint(1, slots)
        queries = [chance.randint(1, rows // slots) for _ in range(num_requests)]
        lengths = [count + chance.choice([0, 1, 40, 400]) for count in queries]
        requests = requests_of(tuple(lengths), tuple(queries), seed=seed)
        cache.copy_(torch.stack([requests.k_cache, requests.v_cache]).nan_to_num(0.0))
        q.fill_(float("nan"))[: len(requests.q)].copy_(requests.q)
        batch = with_slots(requests.batch, slots)
        attention.prepare(batch)
        graph.replay()
        found = out[: len(requests.q)].clone()
        assert torch.equal(found, attend(attention, batch, q, cache[0], cache[1])[: len(found)])
        assert relative_error(found.cpu(), requests.expected()) < TOLERANCE


def test_metadata_of_the_next_step_does_not_disturb_the_one_that_runs() -> None:
    """Steps are prepared and launched far ahead of the GPU; each must see its own lists."""
    requests = requests_of((MAX,) * 4, (1,) * 4)
    kernels, q, k, v = on_gpu(requests)
    chance = random.Random(1)
    for attention in (kernels.decode_attention(4, in_graph=True), kernels.prefill_attention(4, 4, in_graph=False)):
        held = [[chance.randint(1, MAX) for _ in range(4)] for _ in range(40)]
        alone = [attend(attention, cut(requests, lengths), q, k, v) for lengths in held]
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        together = [attend(attention, cut(requests, lengths), q, k, v) for lengths in held]
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_padding_rows_of_decode_read_nothing_and_give_zeros() -> None:
    requests = requests_of((300, 20), (1, 1))
    kernels, q, k, v = on_gpu(requests)
    alone = attend(kernels.decode_attention(2, in_graph=True), requests.batch, q, k, v)
    k[0], v[0] = float("nan"), float("nan")
    batch = requests.batch
    padded = AttentionBatch(
        qo_indptr=np.arange(6, dtype=np.int32),
        kv_indptr=np.concatenate([batch.kv_indptr, batch.kv_indptr[-1] + np.arange(1, 4, dtype=np.int32)]),
        kv_indices=np.concatenate([batch.kv_indices, np.zeros(3, np.int32)]),
        kv_last_page_len=np.concatenate([batch.kv_last_page_len, np.ones(3, np.int32)]),
    )
    found = attend(kernels.decode_attention(5, in_graph=True), padded, q, k, v, padding=3)
    assert torch.equal(found[:2], alone)
    assert not found[2:].any()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_rotation_and_storing_equal_the_reference(heads: tuple[int, int, int], norm: bool) -> None:
    num_q, num_kv, d = heads
    shape = {"num_qo_heads": num_q, "num_kv_heads": num_kv, "head_dim": d, "num_pages": 40, "page_size": 16}
    ours, reference = both(**shape)
    for n in (1, 3, 100):
        results = []
        for kernels in (ours, reference):
            qkv, caches = randn(n, (num_q + 2 * num_kv) * d), randn(2, 40, 16, num_kv, d, seed=1)
            positions = torch.arange(n, device=CUDA) * 3
            slots = torch.randperm(600, generator=torch.Generator(CUDA).manual_seed(n), device=CUDA)[:n] + 16
            weights = QKNorm(randn(d, seed=4).abs(), randn(d, seed=5).abs(), 1e-6) if norm else None
            cos_sin = randn(512, d, seed=3, dtype=torch.float32)
            q = torch.empty(n, num_q, d, dtype=qkv.dtype, device=CUDA)
            torch.cuda.synchronize()  # positions, slots and the table are there before the step begins
            kernels.rope_append(qkv, q, positions, cos_sin, caches[0], caches[1], slots, weights)
            heads_of = qkv.view(n, -1, d)
            kernels.rope(heads_of[:, :num_q], heads_of[:, num_q : num_q + num_kv], positions, cos_sin)
            separate = randn(2, 40, 16, num_kv, d, seed=1)
            kernels.append_kv(
                heads_of[:, num_q : num_q + num_kv], heads_of[:, num_q + num_kv :], separate[0], separate[1], slots
            )
            results.append((q, caches, qkv, separate))
        for found, expected in zip(*results, strict=True):
            assert relative_error(found, expected) < TOLERANCE


def test_eager_attention_inside_a_capture_is_an_error() -> None:
    requests = requests_of((40,), (1,))
    kernels, q, k, v = on_gpu(requests)
    for attention in (kernels.decode_attention(1, in_graph=False), kernels.prefill_attention(1, 1, in_graph=False)):
        attention.prepare(requests.batch)
        with pytest.raises(CaptureError, match="eager steps inside a capture"):
            captured(lambda attention=attention: attention.run(q, k, v, torch.empty_like(q)))


def test_what_the_kernels_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float32"):
        kernels_of(dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="heads of 96"):
        kernels_of(head_dim=96)
    with pytest.raises(UnsupportedError, match="slots"):
        kernels_of().prefill_attention(4, 5, in_graph=True)


def test_workspace_is_what_was_announced_and_does_not_grow() -> None:
    requests = requests_of((500, 3), (1, 1), num_qo_heads=32, num_kv_heads=8, head_dim=128)
    _, q, k, v = on_gpu(requests)
    before = requested_bytes()
    again = kernels_of(**{f: getattr(requests.shape, f) for f in _FIELDS})
    assert requested_bytes() - before == again.workspace_nbytes(again.shape)
    held = requested_bytes()
    for attention in (
        again.decode_attention(2, in_graph=True),
        again.prefill_attention(64, 2, in_graph=True),
        again.prefill_attention(64, 2, in_graph=False),
    ):
        out = attend(attention, requests.batch, q, k, v)
        names = [name for name, _ in attention.tensors()]
        assert len(set(names)) == len(names) > 0
        del out
    del attention
    assert requested_bytes() == held


def requested_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def captured(fn: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    fn()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fn()
    return graph


def padding_batch(rows: int) -> AttentionBatch:
    return AttentionBatch(
        qo_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indices=np.zeros(rows, np.int32),
        kv_last_page_len=np.ones(rows, np.int32),
    )


def prefill_padding(rows: int, slots: int) -> AttentionBatch:
    pages = -(-rows // 16)
    one = AttentionBatch(
        qo_indptr=np.array([0, rows], np.int32),
        kv_indptr=np.array([0, pages], np.int32),
        kv_indices=np.zeros(pages, np.int32),
        kv_last_page_len=np.array([(rows - 1) % 16 + 1], np.int32),
    )
    return with_slots(one, slots)


def with_slots(batch: AttentionBatch, slots: int) -> AttentionBatch:
    """Adds slots without queries, each on one token of the dummy page."""
    missing = slots - batch.num_requests
    extra = np.arange(1, missing + 1, dtype=np.int32)
    return AttentionBatch(
        qo_indptr=np.concatenate([batch.qo_indptr, np.full(missing, batch.qo_indptr[-1], np.int32)]),
        kv_indptr=np.concatenate([batch.kv_indptr, batch.kv_indptr[-1] + extra]),
        kv_indices=np.concatenate([batch.kv_indices, np.zeros(missing, np.int32)]),
        kv_last_page_len=np.concatenate([batch.kv_last_page_len, np.ones(missing, np.int32)]),
    )


def cut(requests: PagedRequests, lengths: list[int]) -> AttentionBatch:
    """The same requests as they were when they had so many tokens."""
    size, batch = requests.shape.page_size, requests.batch
    counts = [-(-length // size) for length in lengths]
    pages = [batch.kv_indices[start : start + count] for start, count in zip(batch.kv_indptr, counts, strict=False)]
    return AttentionBatch(
        qo_indptr=batch.qo_indptr,
        kv_indptr=np.cumsum([0, *counts]).astype(np.int32),
        kv_indices=np.concatenate(pages),
        kv_last_page_len=np.array([(length - 1) % size + 1 for length in lengths], np.int32),
    )
