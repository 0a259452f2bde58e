"""Which tokens may follow, by row: from the host's bits to the logits of the tokens that may not.

Owns the device memory that the bits go through. Who may follow is decided elsewhere; a row without bits is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gplan.kernels.base import Kernels

WORD_BITS = 32


def words_of(vocab_size: int) -> int:
    """Words that hold a bit for each token."""
    return -(-vocab_size // WORD_BITS)


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """Tokens that may follow, of the rows where not every token may.

    Attributes:
        rows: ascending indices of the logits' rows.
        bits: [len(rows), words_of(vocab)] int32 on the host: token t may follow where bit t % 32 of word t // 32 is 1.
            At least one bit of each row is.
    """

    rows: tuple[int, ...]
    bits: Tensor


class MaskBuffer:
    """Where masks lie on the device.

    Args:
        max_batch: rows of logits at most.
        vocab_size: width of the logits.
    """

    def __init__(self, max_batch: int, vocab_size: int, device: torch.device) -> None:
        self._bits = torch.empty((max_batch, words_of(vocab_size)), dtype=torch.int32, device=device)
        self._rows = torch.empty(max_batch, dtype=torch.int64, device=device)

    @staticmethod
    def nbytes(max_batch: int, vocab_size: int) -> int:
        return max_batch * (4 * words_of(vocab_size) + 8)

    def apply(self, kernels: Kernels, logits: Tensor, mask: TokenMask) -> None:
        """Makes the tokens impossible that may not follow.

        Args:
            logits: [n, vocab] float32, changed in place.
        """
        count = len(mask.rows)
        rows, bits = self._rows[:count], self._bits[:count]
        assert mask.bits.shape == bits.shape, f"a mask of {tuple(mask.bits.shape)} for {tuple(bits.shape)}"
        rows.copy_(self._staged(torch.tensor(mask.rows)), non_blocking=True)
        bits.copy_(self._staged(mask.bits), non_blocking=True)
        kernels.apply_token_mask(logits, rows, bits)

    def _staged(self, tensor: Tensor) -> Tensor:
        """In pinned memory where there is a GPU: a copy from any other would wait for the forward pass."""
        return tensor.pin_memory() if self._bits.is_cuda else tensor
