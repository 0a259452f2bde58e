"""Receipts: a replayed graph against the same forward run eagerly, at the same padded shape, with poisoned padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from formats.plan import Receipt
from gplan.core import Batch, Phase, ShapeKey
from gplan.errors import GplanError, VerificationError
from gplan.graphs.admission import Verdict
from gplan.graphs.executor import Executor
from gplan.graphs.inputs_check import check_inputs
from gplan.graphs.synthetic import DRAWN, GREEDY, BatchMaker
from gplan.graphs.variants import SAMPLED, base_of, draw_of

COMPILED_GAP = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""What compiled code may differ by from the operators that it was made of, as a part of the largest logit."""

RUN_STEPS = 3
"""Steps that follow each other, of which a graph that draws takes all but the first from where it left off."""


@torch.no_grad()
def check_key(executor: Executor, key: ShapeKey, batches: Sequence[Batch]) -> Receipt:
    """Replays `key` for each batch and compares with its forward run eagerly.

    Before each of the two runs every buffer is filled with NaN and absurd ids, so that a row that padding should have
    made harmless, and is not, shows; and attention is given the metadata of another batch, so that a step that does not
    bring its own shows too. After each run the inputs are compared with the batch.

    Args:
        batches: of at most the key's size. For a key that draws, as `compositions` gives them: steps that follow each
            other come one after the other.

    Raises:
        VerificationError: a difference, or inputs that are not the batch's; names key, slot and first differing row.
        GplanError: the model itself gives what is not a number.
    """
    runner, gap = executor.runner(key.phase), 0.0
    if runner.is_compiled(key):
        gap = max(_compiled_gap(executor, key, batch) for batch in batches)
    if draw_of(key):
        for run in _runs(batches):
            _check_run(executor, key, run)
        return Receipt(key=str(key), cases=len(batches), max_abs_diff=gap, bitwise=gap == 0)
    for batch in batches:
        executor.sampler.ensure_last_tokens(batch.chunks)
        expected = _finite(key, _checked(executor, key, batch, lambda b: runner.execute_padded(b, key)).clone())
        found = _checked(executor, key, batch, lambda b: runner.execute(b, Verdict(key)))
        if not torch.equal(found, expected):
            raise _difference(key, batch, found, expected)
    return Receipt(key=str(key), cases=len(batches), max_abs_diff=gap, bitwise=gap == 0)


def _compiled_gap(executor: Executor, key: ShapeKey, batch: Batch) -> float:
    """How far logits of compiled code are from those of the operators that it was made of: it rounds in another order.

    Raises:
        VerificationError: further than rounding explains.
    """
    runner, base = executor.runner(key.phase), replace(key, variant=base_of(key.variant))
    executor.sampler.forget(batch.chunks)
    executor.sampler.ensure_last_tokens(batch.chunks)
    plain = _finite(key, _checked(executor, base, batch, lambda b: runner.execute_plain(b, base)).clone())
    compiled = _checked(executor, base, batch, lambda b: runner.execute_padded(b, base))
    gap = float((plain.float() - compiled.float()).abs().max()) if len(plain) else 0.0
    allowed = COMPILED_GAP[plain.dtype] * float(plain.float().abs().max()) if len(plain) else 0.0
    if not gap <= allowed:
        raise VerificationError(
            f"key {key}: compiled code differs from its operators by {gap:.3g} in a batch of {batch.size}, "
            f"{allowed:.3g} is allowed",
            "Plan again without --try-compile, and report it if it stays.",
        )
    return gap


def _check_run(executor: Executor, key: ShapeKey, run: Sequence[Batch]) -> None:
    """Compares logits and tokens of steps that follow each other: drawn by replays of `key`, and outside of eager
    forwards of the same padded shape. A draw that replay repeats, or an input that it does not advance, shows."""
    decode, sampler = executor.decode, executor.sampler
    base, expected = replace(key, variant=base_of(key.variant)), []
    sampler.forget(run[0].chunks)
    for batch in run:
        sampler.ensure_last_tokens(batch.chunks)
        logits = _finite(key, _checked(executor, base, batch, lambda b: decode.execute_padded(b, base)).clone())
        expected.append((logits, sampler.sample(logits, batch.chunks).tokens.clone()))
    sampler.forget(run[0].chunks)
    _poison(executor)
    for batch, (logits, tokens) in zip(run, expected, strict=True):
        sampler.ensure_last_tokens(batch.chunks)
        found, drawn = decode.draw(batch, key)
        if not torch.equal(found, logits):
            raise _difference(key, batch, found, logits)
        if not torch.equal(drawn, tokens):
            raise _difference(key, batch, drawn[:, None], tokens[:, None])
        sampler.note_drawn(batch.chunks)


def _runs(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Batches of the same requests together."""
    runs: list[list[Batch]] = []
    for batch in batches:
        goes_on = runs and [c.request for c in runs[-1][-1].chunks] == [c.request for c in batch.chunks]
        runs[-1].append(batch) if goes_on else runs.append([batch])
    return runs


def _checked(executor: Executor, key: ShapeKey, batch: Batch, run: Callable[[Batch], Tensor]) -> Tensor:
    """The result of a run from spoilt buffers, once its inputs were found to be those of the batch."""
    attention = executor.runner(key.phase).load_padding(key)
    _poison(executor)
    try:
        result = run(batch)
    except (IndexError, RuntimeError, AssertionError) as error:
        # The inputs may say why; a GPU that failed tells nothing any more.
        with suppress(RuntimeError):
            check_inputs(executor.parts, attention, key, batch)
        raise VerificationError(
            f"key {key}: a batch of {batch.size} cannot be run: {type(error).__name__}: {error}",
            "The graph of this key is not safe to replay here: plan again, and report it if it stays.",
        ) from error
    check_inputs(executor.parts, attention, key, batch)
    return result


def _poison(executor: Executor) -> None:
    executor.parts.buffers.poison()
    executor.parts.by_request.poison()


def _finite(key: ShapeKey, logits: Tensor) -> Tensor:
    if not logits.isfinite().all():
        raise GplanError(
            f"key {key}: the model's own logits are not finite",
            "Weights of the checkpoint are broken, or overflow in this dtype: try another --dtype.",
        )
    return logits


def compositions(executor: Executor, key: ShapeKey, batches: BatchMaker) -> list[Batch]:
    """Batches that a key must get right, and that the KV pool holds: one row, about half of them, all; from nothing to
    the maximum length; prompts from nothing and after cached tokens. For a graph that draws, several steps of each."""
    limits, pages = executor.parts.limits, executor.parts.kv_pool.num_pages - 1
    if key.phase is Phase.DECODE:
        full = min(key.size, pages)
        room = min(limits.max_len - 1, pages // full * limits.page_size)
        steps = max(1, min(RUN_STEPS, room)) if draw_of(key) else 1
        deepest = limits.max_len - steps
        fitting = min(deepest, pages // full * limits.page_size - steps)
        cases = {(1, 0), (1, deepest), ((full + 1) // 2, min(limits.page_size - 1, fitting)), (full, fitting)}
        params = DRAWN if draw_of(key) == SAMPLED else GREEDY
        return [batch for size, context in sorted(cases) for batch in batches.decode_run(size, context, steps, params)]
    deepest = limits.max_len - 1
    slots = min(executor.prefill.slots_of(key) or limits.max_batch, key.size)
    cached = max(0, min(limits.page_size + 3, deepest - 1 - -(-key.size // slots)))
    size, longest = min(key.size, slots * deepest), min(key.size, (deepest + 1) // 2)
    prompts = [
        batches.prefill(1),
        full_batch(executor, key, batches),
        batches.ragged(max(1, size - 1), slots, cached),
        batches.prefill(longest, deepest - longest),
    ]
    return [batch for batch in prompts if _shares_no_page(batch)]


def full_batch(executor: Executor, key: ShapeKey, batches: BatchMaker) -> Batch:
    """As many requests (decode) or tokens (prefill) as a key takes and the KV pool holds."""
    limits, pages = executor.parts.limits, executor.parts.kv_pool.num_pages - 1
    if key.phase is Phase.DECODE:
        return batches.decode(min(key.size, pages), 0)
    longest = limits.max_len - 1
    requests = min(executor.prefill.slots_of(key) or limits.max_batch, pages // -(-longest // limits.page_size))
    return batches.prefill(min(key.size, requests * longest))


def _shares_no_page(batch: Batch) -> bool:
    """Requests that share a page overwrite each other's tokens, in an order that nobody knows."""
    pages = [page for chunk in batch.chunks for page in chunk.pages]
    return len(set(pages)) == len(pages)


def _difference(key: ShapeKey, batch: Batch, found: Tensor, expected: Tensor) -> VerificationError:
    rows = min(len(found), len(expected))
    differs = (found[:rows] != expected[:rows]).any(dim=-1).nonzero()
    row = int(differs[0]) if len(differs) else rows
    gap = float((found[row].float() - expected[row].float()).abs().max()) if row < rows else float("inf")
    return VerificationError(
        f"key {key}: replay differs from eager in row {row} of a batch of {batch.size}, by {gap:.3g}",
        "The graph of this key is not safe to replay here: plan again, and report it if it stays.",
    )
