"""Log probabilities of the tokens of prompts, from the hidden states that a prefill step leaves.

The vocabulary head, and what the forward has left out before it, run on at most as many rows at a time as decode
samples from: so whatever a prompt's length, this takes little memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gplan.core import Batch, Chunk, Phase
from gplan.graphs.forward import ForwardParts
from gplan.graphs.sampling import score_tokens


def predicted_part(chunk: Chunk) -> range:
    """Positions of the prompt's tokens that a chunk predicts and that are to be scored."""
    request = chunk.request
    if request.params.prompt_logprobs is None:
        return range(0)
    return range(chunk.start + 1, min(chunk.end, request.prompt_len - 1) + 1)


class PromptScorer:
    """Scores prompts' tokens after the forward pass of a prefill step."""

    def __init__(self, parts: ForwardParts) -> None:
        self._parts = parts

    def score(self, batch: Batch, *, is_finished: bool) -> Tensor | None:
        """Scores every token of `predicted_part` of each chunk, in batch order. Writes over the logits.

        Args:
            is_finished: whether the forward went on with all rows after the last attention, not only with the last of
                each request.

        Returns:
            [n, 1 + 2 * MAX_LOGPROBS] float32 as `Draw.logprobs`, or None where nobody asked.
        """
        if batch.phase is Phase.DECODE:
            return None
        rows: list[int] = []
        tokens: list[int] = []
        first = 0
        for chunk in batch.chunks:
            part = predicted_part(chunk)
            rows += [first + position - 1 - chunk.start for position in part]
            tokens += chunk.request.tokens[part.start : part.stop] if part else []
            first += chunk.length
        if not rows:
            return None
        parts, width = self._parts, self._parts.limits.max_batch
        residual = parts.buffers.view("residual", batch.num_tokens)
        where = torch.tensor([rows, tokens]).to(residual.device, non_blocking=True)
        scores = []
        for some in where.split(width, dim=1):
            hidden = residual.index_select(0, some[0])
            if not is_finished:
                attended = parts.buffers["attn_out"].index_select(0, some[0])
                parts.model.finish(parts.kernels, attended, hidden)
            logits = parts.buffers.view("logits", some.shape[1])
            parts.model.head(parts.kernels, hidden, logits)
            scores.append(score_tokens(logits, some[1]))
        return torch.cat(scores)
