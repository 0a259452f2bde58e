"""Receipts: a replayed graph against the same forward run eagerly, at the same padded shape, with poisoned padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from formats.plan import Receipt
from gplan.core import Batch, Phase, ShapeKey
from gplan.errors import GplanError, VerificationError
from gplan.graphs.admission import Verdict
from gplan.graphs.executor import Executor
from gplan.graphs.synthetic import BatchMaker


@torch.no_grad()
def check_key(executor: Executor, key: ShapeKey, batches: Sequence[Batch]) -> Receipt:
    """Replays `key` for each batch and compares with its forward run eagerly.

    Before each of the two runs every buffer is filled with NaN and absurd ids, so that a row that padding should have
    made harmless, and is not, shows.

    Args:
        batches: of at most the key's size.

    Raises:
        VerificationError: a difference; names key, batch and first differing row.
        GplanError: the model itself gives what is not a number.
    """
    runner, buffers = executor.runner(key.phase), executor.parts.buffers
    for batch in batches:
        executor.sampler.ensure_last_tokens(batch.chunks)
        buffers.poison()
        expected = runner.execute_padded(batch, key).clone()
        if not expected.isfinite().all():
            raise GplanError(
                f"key {key}: the model's own logits are not finite",
                "Weights of the checkpoint are broken, or overflow in this dtype: try another --dtype.",
            )
        buffers.poison()
        found = runner.execute(batch, Verdict(key))
        if not torch.equal(found, expected):
            raise _difference(key, batch, found, expected)
    return Receipt(key=str(key), cases=len(batches), max_abs_diff=0.0, bitwise=True)


def compositions(executor: Executor, key: ShapeKey, batches: BatchMaker) -> list[Batch]:
    """Batches that a key must get right: one row, about half of them, all; from nothing to the maximum length; prompts
    from nothing and after cached tokens."""
    limits, pages = executor.parts.limits, executor.parts.kv_pool.num_pages - 1
    deepest = limits.max_len - 1
    if key.phase is Phase.DECODE:
        half = (key.size + 1) // 2
        # Requests that shared a page would overwrite each other's tokens, in an order that nobody knows.
        fitting = min(deepest, pages // key.size * limits.page_size - 1)
        cases = {(1, 0), (1, deepest), (half, min(limits.page_size - 1, fitting)), (key.size, max(0, fitting))}
        return [batches.decode(size, context) for size, context in sorted(cases)]
    slots = min(executor.prefill.setup.request_slots or limits.max_batch, key.size)
    cached = max(0, min(limits.page_size + 3, deepest - 1 - -(-key.size // slots)))
    return [batches.prefill(1), batches.prefill(key.size), batches.ragged(max(1, key.size - 1), slots, cached)]


def _difference(key: ShapeKey, batch: Batch, found: Tensor, expected: Tensor) -> VerificationError:
    rows = min(len(found), len(expected))
    differs = (found[:rows] != expected[:rows]).any(dim=-1).nonzero()
    row = int(differs[0]) if len(differs) else rows
    gap = float((found[row].float() - expected[row].float()).abs().max()) if row < rows else float("inf")
    return VerificationError(
        f"key {key}: replay differs from eager in row {row} of a batch of {batch.size}, by {gap:.3g}",
        "The graph of this key is not safe to replay here: plan again, and report it if it stays.",
    )
