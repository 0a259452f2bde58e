"""The choice of each step's tokens. Tokens stay on the device, indexed by request row, and feed the next step.

Draws depend on a request's seed and on the token's position alone, so a batch mate never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gplan.core import Chunk, Request
from gplan.graphs.masking import MaskBuffer, TokenMask
from gplan.kernels.base import Kernels, SamplingInputs

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Tokens of one step on the device, and what was asked to be known about them.

    Attributes:
        tokens: [n] int64.
        logprobs: [n, 1 + 2 * MAX_LOGPROBS] float32 where a request asked, else None: the drawn token's log probability
            before penalties and temperature, then those of the likeliest tokens, then their ids.
    """

    tokens: Tensor
    logprobs: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Draws:
    """Parameters of rows that are drawn rather than taken greedily, [n] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """What a set of requests asks of the sampler; reused while the same requests are sampled step after step.

    Attributes:
        draws: None where every row is greedy.
        penalties: repetition, presence and frequency, [n] float32 each; None where no row has any.
    """

    members: tuple[tuple[Request, int, int], ...]
    rows: Tensor
    biased: bool
    wants_logprobs: bool
    draws: _Draws | None
    penalties: tuple[Tensor, Tensor, Tensor] | None


class Sampler:
    """Last tokens and token counts by request row.

    Args:
        max_batch: request rows besides the dummy row.
        vocab_size: width of the logits.
    """

    def __init__(self, kernels: Kernels, max_batch: int, vocab_size: int, device: torch.device) -> None:
        self._kernels, self._device, self._vocab_size = kernels, device, vocab_size
        self.last_tokens = torch.zeros(max_batch + 1, dtype=torch.int64, device=device)
        self._counts = torch.zeros((max_batch + 1, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((max_batch + 1, vocab_size), dtype=torch.bool, device=device)
        # Of each row: whose last token it holds, and that token's position.
        self._held: list[tuple[Request | None, int]] = [(None, 0)] * (max_batch + 1)
        # Of each row: whose counts it holds, and after how many preemptions.
        self._counted: list[tuple[Request | None, int]] = [(None, 0)] * (max_batch + 1)
        self._group: _Group | None = None
        self._mask = MaskBuffer(max_batch, vocab_size, device)

    @staticmethod
    def nbytes(max_batch: int, vocab_size: int) -> int:
        return (max_batch + 1) * (8 + 5 * vocab_size) + MaskBuffer.nbytes(max_batch, vocab_size)

    def ensure_last_tokens(self, chunks: Sequence[Chunk]) -> None:
        """Makes `last_tokens` hold each chunk's first token, from the host where no step of its row drew it."""
        stale = [c for c in chunks if self._held[c.request.row] != (c.request, c.start)]
        if not stale:
            return
        values = torch.tensor([[c.request.row for c in stale], [c.request.tokens[c.start] for c in stale]])
        rows, tokens = values.to(self._device)
        self.last_tokens.index_copy_(0, rows, tokens)
        for chunk in stale:
            self._held[chunk.request.row] = (chunk.request, chunk.start)

    def note_drawn(self, chunks: Sequence[Chunk]) -> None:
        """Takes note that a graph drew the token after each chunk and put it where its row's last is."""
        for chunk in chunks:
            self._held[chunk.request.row] = (chunk.request, chunk.end)

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Takes the rows' last tokens for unknown, so that they come from the host again."""
        for chunk in chunks:
            self._held[chunk.request.row] = (None, 0)

    def sample(self, logits: Tensor, chunks: Sequence[Chunk], mask: TokenMask | None = None) -> Draw:
        """Draws the token after each chunk and keeps it as its row's last.

        Args:
            logits: [n, vocab] of the model's dtype, one row per chunk; not changed.
            chunks: those of the step that sample, in batch order.
            mask: tokens that may follow; its rows are indices of chunks.
        """
        group = self._group_of(chunks)
        adjusted = logits
        if group.penalties or group.biased or mask is not None:
            adjusted = self._adjust(logits, group, chunks)
        if mask is not None:
            self._mask.apply(self._kernels, adjusted, mask)
        draws = group.draws
        if draws is None:
            tokens = self._kernels.argmax(adjusted)
        else:
            positions = self._on_device([chunk.end for chunk in chunks], torch.int64)
            inputs = SamplingInputs(draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.seed, positions)
            tokens = self._kernels.sample(adjusted, inputs)
        self.last_tokens.index_copy_(0, group.rows, tokens)
        self.note_drawn(chunks)
        if group.penalties:
            self._counts.index_put_((group.rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        return Draw(tokens, score_tokens(logits, tokens) if group.wants_logprobs else None)

    def _group_of(self, chunks: Sequence[Chunk]) -> _Group:
        members = tuple((c.request, c.request.row, c.request.num_preemptions) for c in chunks)
        if self._group is None or self._group.members != members:
            self._group = self._make_group(members)
            if self._group.penalties:
                for request, row, preemptions in members:
                    self._count(request, row, preemptions)
        return self._group

    def _make_group(self, members: tuple[tuple[Request, int, int], ...]) -> _Group:
        params, on_device = [request.params for request, _, _ in members], self._on_device
        draws = penalties = None
        if any(p.temperature > 0 for p in params):
            draws = _Draws(
                temperature=on_device([p.temperature for p in params], torch.float32),
                top_k=on_device([p.top_k or self._vocab_size for p in params], torch.int32),
                top_p=on_device([p.top_p for p in params], torch.float32),
                min_p=on_device([p.min_p for p in params], torch.float32),
                seed=on_device([p.seed for p in params], torch.int64),
            )
        if any(p.has_penalties for p in params):
            penalties = (
                on_device([p.repetition_penalty for p in params], torch.float32),
                on_device([p.presence_penalty for p in params], torch.float32),
                on_device([p.frequency_penalty for p in params], torch.float32),
            )
        return _Group(
            members=members,
            rows=on_device([row for _, row, _ in members], torch.int64),
            biased=any(p.logit_bias or p.min_tokens for p in params),
            wants_logprobs=any(p.logprobs is not None for p in params),
            draws=draws,
            penalties=penalties,
        )

    def _count(self, request: Request, row: int, preemptions: int) -> None:
        """Counts a request's tokens into its row, unless the row holds them already."""
        if self._counted[row] == (request, preemptions):
            return
        self._counted[row] = (request, preemptions)
        tokens = torch.tensor(request.tokens).to(self._device)
        prompt, output = tokens[: request.prompt_len], tokens[request.prompt_len :]
        self._in_prompt[row].zero_().index_fill_(0, prompt, True)
        self._counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _adjust(self, logits: Tensor, group: _Group, chunks: Sequence[Chunk]) -> Tensor:
        adjusted = logits.to(torch.float32, copy=True)
        if group.penalties:
            counts = self._counts.index_select(0, group.rows)
            in_prompt = self._in_prompt.index_select(0, group.rows)
            self._kernels.apply_penalties(adjusted, counts, in_prompt, *group.penalties)
        edits = [edit for index, chunk in enumerate(chunks) for edit in _bias_of(index, chunk)]
        if edits:
            index, token, value = zip(*edits, strict=True)
            places = self._on_device(index, torch.int64), self._on_device(token, torch.int64)
            adjusted.index_put_(places, self._on_device(value, torch.float32), accumulate=True)
        return adjusted

    def _on_device(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Does not wait for the forward pass that is on its way."""
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _bias_of(index: int, chunk: Chunk) -> list[tuple[int, int, float]]:
    params = chunk.request.params
    edits = [(index, token, value) for token, value in params.logit_bias]
    if chunk.end - chunk.request.prompt_len < params.min_tokens:
        edits += [(index, token, float("-inf")) for token in params.stop_token_ids]
    return edits


def score_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log probabilities of `tokens` [n] and of the likeliest, as `Draw.logprobs` has them."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    top = scores.topk(min(MAX_LOGPROBS, scores.shape[-1]), dim=-1)
    drawn = scores.gather(-1, tokens[:, None])
    return torch.cat([drawn, top.values, top.indices.float()], dim=-1)
