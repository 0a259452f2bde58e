"""Masks over logits: bit by bit, at any width, on some rows only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.graphs.masking import MaskBuffer, TokenMask, words_of
from gplan.kernels import make_kernels
from tests.kernels.shapes import make_shape

KERNELS = make_kernels("reference", make_shape(vocab_size=50))


def bits_of(allowed: list[set[int]], vocab: int) -> torch.Tensor:
    words = [[0] * words_of(vocab) for _ in allowed]
    for row, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= 1 << (token % 32)
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32).reshape(len(allowed), words_of(vocab))


@given(vocab=st.integers(1, 200), data=st.data())
def test_only_what_may_follow_stays_and_other_rows_are_not_touched(vocab: int, data: st.DataObject) -> None:
    rows = tuple(sorted(data.draw(st.sets(st.integers(0, 4), min_size=1))))
    allowed = [data.draw(st.sets(st.integers(0, vocab - 1), min_size=1)) for _ in rows]
    logits = torch.randn(5, vocab)
    before = logits.clone()
    buffer = MaskBuffer(5, vocab, torch.device("cpu"))
    buffer.apply(KERNELS, logits, TokenMask(rows, bits_of(allowed, vocab)))
    for row in range(5):
        kept = set(range(vocab)) if row not in rows else allowed[rows.index(row)]
        for token in range(vocab):
            expected = before[row, token] if token in kept else float("-inf")
            assert logits[row, token] == expected


def test_a_mask_of_another_width_is_our_bug() -> None:
    buffer = MaskBuffer(2, 64, torch.device("cpu"))
    with pytest.raises(AssertionError, match="a mask of"):
        buffer.apply(KERNELS, torch.zeros(2, 64), TokenMask((0,), bits_of([{1}], 96)))
