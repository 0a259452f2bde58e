"""Small kernel shapes and page lists for tests of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gplan.kernels.base import AttentionBatch, KernelShape


def make_shape(**values: Any) -> KernelShape:
    defaults: dict[str, Any] = {
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 32,
        "vocab_size": 50,
        "page_size": 4,
        "max_batch": 8,
        "max_tokens": 64,
        "max_len": 64,
        "num_pages": 129,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return KernelShape(**{**defaults, **values})


@dataclass(frozen=True, eq=False)
class PagedRequests:
    """Requests of random keys and values on scattered pages of a cache that is otherwise NaN.

    Attributes:
        lengths, queries: tokens and queries of each request; the queries are its last tokens.
        q: [sum of queries, qo_heads, head_dim].
        slots: of each request's tokens.
    """

    shape: KernelShape
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: tuple[Tensor, ...]
    batch: AttentionBatch

    @staticmethod
    def make(
        lengths: tuple[int, ...],
        queries: tuple[int, ...],
        *,
        seed: int = 0,
        consecutive: bool = False,
        **shape: Any,
    ) -> PagedRequests:
        sized = make_shape(**shape)
        size, generator = sized.page_size, torch.Generator().manual_seed(seed)
        counts = [-(-length // size) for length in lengths]
        ids = np.arange(1, sized.num_pages)
        if not consecutive:
            ids = np.random.default_rng(seed).permutation(ids)
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        pages = [ids[a:b] for a, b in pairwise(indptr)]
        slots = tuple(
            torch.tensor([int(p[t // size]) * size + t % size for t in range(n)])
            for p, n in zip(pages, lengths, strict=True)
        )
        caches = []
        for _ in range(2):
            cache = torch.full((sized.num_pages, size, sized.num_kv_heads, sized.head_dim), float("nan"))
            for held in slots:
                cache.flatten(0, 1)[held] = torch.randn(
                    len(held), sized.num_kv_heads, sized.head_dim, generator=generator
                )
            caches.append(cache.to(sized.dtype))
        q = torch.randn(sum(queries), sized.num_qo_heads, sized.head_dim, generator=generator).to(sized.dtype)
        batch = AttentionBatch(
            qo_indptr=np.cumsum([0, *queries]).astype(np.int32),
            kv_indptr=indptr,
            kv_indices=np.concatenate(pages).astype(np.int32),
            kv_last_page_len=np.array([(n - 1) % size + 1 for n in lengths], np.int32),
        )
        return PagedRequests(sized, lengths, queries, q, *caches, slots, batch)

    def expected(self) -> Tensor:
        """Attention by its formula, in float64: [sum of queries, qo_heads, head_dim]."""
        shape = self.shape
        group = shape.num_qo_heads // shape.num_kv_heads
        rows = []
        for request, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            keys = self.k_cache.flatten(0, 1)[self.slots[request]].double()
            values = self.v_cache.flatten(0, 1)[self.slots[request]].double()
            for index in range(count):
                query = self.q[int(self.batch.qo_indptr[request]) + index].double()
                visible = length - count + index + 1
                heads = []
                for head in range(shape.num_qo_heads):
                    scores = keys[:visible, head // group] @ query[head] / shape.head_dim**0.5
                    heads.append(scores.softmax(0) @ values[:visible, head // group])
                rows.append(torch.stack(heads))
        return torch.stack(rows) if rows else self.q.double()
