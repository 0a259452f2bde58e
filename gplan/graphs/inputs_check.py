"""What a step was given to read, against what its batch says: static slots, page table and attention metadata.

A replay and the same forward run eagerly read the same inputs, so comparing the two says nothing of wrong ones. Here
the inputs are worked out again from the batch alone, and what the device holds is read back; it waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gplan.core import DUMMY_PAGE, DUMMY_ROW, Batch, Chunk, Phase, ShapeKey
from gplan.errors import VerificationError
from gplan.graphs.forward import ForwardParts
from gplan.kernels.base import Attention

LongArray = npt.NDArray[np.int64]


def check_inputs(parts: ForwardParts, attention: Attention, key: ShapeKey, batch: Batch) -> None:
    """Checks the inputs of a step of `key` that was loaded for `batch` and has not advanced them.

    Raises:
        VerificationError: names key, slot (or page table, or attention metadata) and the first row that is wrong.
    """
    expected = _expected(batch, parts.page_table.page_size)
    for name, (least, most) in _harmless(parts, key.phase).items():
        held = parts.buffers[name][: key.size].cpu().numpy()
        wanted = expected[name]
        for row in np.flatnonzero(held[: len(wanted)] != wanted)[:1]:
            raise _wrong(key, batch, f"slot {name}, row {row}: holds {held[row]} instead of {wanted[row]}")
        tail = held[len(wanted) :]
        for index in np.flatnonzero((tail < least) | (tail > most))[:1]:
            row = len(wanted) + index
            allowed = str(least) if least == most else f"{least} to {most}"
            raise _wrong(key, batch, f"slot {name}, padding row {row}: holds {tail[index]} instead of {allowed}")
    _check_page_table(parts, key, batch)
    _check_attention(attention, key, batch, parts.page_table.page_size)


def _harmless(parts: ForwardParts, phase: Phase) -> Mapping[str, tuple[int, int]]:
    """By slot, the least and the most that a padding row may hold and touch nobody: the dummy row, any position of the
    rotation's table, the dummy page, any token."""
    slots = {
        "rows": (DUMMY_ROW, DUMMY_ROW),
        "positions": (0, parts.limits.max_len - 1),
        "kv_slots": (DUMMY_PAGE, DUMMY_PAGE + parts.page_table.page_size - 1),
    }
    if phase is Phase.PREFILL:
        slots["host_ids"] = (0, parts.kernels.shape.vocab_size - 1)
    return slots


def _expected(batch: Batch, page_size: int) -> Mapping[str, LongArray]:
    """Of every token of the batch, in order: [num_tokens] each."""
    rows, positions, slots, tokens = [], [], [], []
    for chunk in batch.chunks:
        at = np.arange(chunk.start, chunk.end, dtype=np.int64)
        rows.append(np.full(chunk.length, chunk.request.row, np.int64))
        positions.append(at)
        slots.append(np.array(chunk.pages, np.int64)[at // page_size] * page_size + at % page_size)
        tokens.append(np.array(chunk.request.tokens[chunk.start : chunk.end], np.int64))
    parts = {"rows": rows, "positions": positions, "kv_slots": slots, "host_ids": tokens}
    return {name: np.concatenate(values) for name, values in parts.items()}


def _check_page_table(parts: ForwardParts, key: ShapeKey, batch: Batch) -> None:
    for chunk in batch.chunks:
        row, count = chunk.request.row, len(chunk.pages)
        held = parts.page_table.indices(np.array([row], np.int32), np.array([count], np.int32))
        for index in np.flatnonzero(held != np.array(chunk.pages))[:1]:
            what = f"holds page {held[index]} as number {index} instead of {chunk.pages[index]}"
            raise _wrong(key, batch, f"page table, row {row}: {what}")


def _check_attention(attention: Attention, key: ShapeKey, batch: Batch, page_size: int) -> None:
    planned = attention.planned()
    if planned is None:
        return
    for row in range(planned.num_requests):
        pages = planned.kv_indices[planned.kv_indptr[row] : planned.kv_indptr[row + 1]].tolist()
        queries = int(planned.qo_indptr[row + 1] - planned.qo_indptr[row])
        held = pages, queries, int(planned.kv_last_page_len[row])
        if row < batch.num_requests:
            wanted = _attended(batch.chunks[row], page_size)
            if held != wanted:
                raise _wrong(key, batch, f"attention metadata, row {row}: {_first(held, wanted)}")
        elif set(pages) != {DUMMY_PAGE}:
            raise _wrong(key, batch, f"attention metadata, padding row {row}: reads pages {_few(pages)}")


def _attended(chunk: Chunk, page_size: int) -> tuple[list[int], int, int]:
    return list(chunk.pages), chunk.length, (chunk.end - 1) % page_size + 1


def _first(held: tuple[list[int], int, int], wanted: tuple[list[int], int, int]) -> str:
    if held[0] != wanted[0]:
        return f"planned with pages {_few(held[0])} instead of {_few(wanted[0])}"
    if held[1] != wanted[1]:
        return f"planned with {held[1]} queries instead of {wanted[1]}"
    return f"planned with {held[2]} tokens of the last page instead of {wanted[2]}"


def _few(pages: list[int]) -> str:
    return str(pages) if len(pages) <= 4 else f"{str(pages[:4])[:-1]}, …]"


def _wrong(key: ShapeKey, batch: Batch, what: str) -> VerificationError:
    return VerificationError(
        f"key {key}: {what}, in a batch of {batch.size}",
        "Inputs of this key are not what its batch needs: this is a fault of gplan; report it with the plan.",
    )
