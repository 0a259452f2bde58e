"""Runs a decoder with reference kernels on pages handed out here, with no scheduler, buffers or graphs between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gplan.kernels import make_kernels
from gplan.kernels.base import AttentionBatch, KernelShape
from gplan.models import Decoder, ForwardInputs, ModelSpec
from gplan.models.base import Ends

PAGE_SIZE = 8


@dataclass(eq=False)
class Stream:
    """Tokens of one request, and how many of them are in the cache."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0


class Harness:
    """One model, one cache. Pages are handed out in a shuffled order, so that no request's follow each other."""

    def __init__(
        self, spec: ModelSpec, model: Decoder, *, max_batch: int = 8, max_tokens: int = 64, num_pages: int = 300
    ):
        dtype = next(model.tensors())[1].dtype
        self.spec, self.model = spec, model
        self.shape = KernelShape(
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            page_size=PAGE_SIZE,
            max_batch=max_batch,
            max_tokens=max_tokens,
            max_len=1024,
            num_pages=num_pages,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.kernels = make_kernels("reference", self.shape)
        # Whatever is read without having been written shows.
        self.cache = torch.full(
            (spec.num_layers, 2, num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim), float("nan"), dtype=dtype
        )
        self._free = np.random.default_rng(0).permutation(np.arange(1, num_pages)).tolist()
        self._decode = self.kernels.decode_attention(max_batch, in_graph=False)
        self._prefill = self.kernels.prefill_attention(max_tokens, max_batch, in_graph=False)

    def step(self, work: Sequence[tuple[Stream, int]], *, leave_out: bool = False) -> Tensor:
        """Computes the next tokens of each sequence, so many each: [n, vocab] logits after the last of each.

        Args:
            leave_out: all other rows after the last attention. What they are then is `left_out`; `hidden` is what
                finishing makes of them, or the forward itself.
        """
        spans = [(sequence, sequence.cached, sequence.cached + count) for sequence, count in work]
        for sequence, _, end in spans:
            while len(sequence.pages) * PAGE_SIZE < end:
                sequence.pages.append(self._free.pop())
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        slots = [
            s.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for s, start, end in spans for p in range(start, end)
        ]
        ids = [token for s, start, end in spans for token in s.tokens[start:end]]
        attention = self._decode if all(count == 1 for _, count in work) else self._prefill
        batch = _batch(spans)
        attention.prepare(batch)
        n, spec = len(ids), self.spec
        inputs = ForwardInputs(
            input_ids=torch.tensor(ids),
            positions=torch.from_numpy(positions),
            kv_slots=torch.tensor(slots),
            residual=torch.full((n, spec.hidden_size), float("nan"), dtype=self.shape.dtype),
            attn_q=torch.full((n, spec.num_qo_heads, spec.head_dim), float("nan"), dtype=self.shape.dtype),
            attn_out=torch.full((n, spec.num_qo_heads, spec.head_dim), float("nan"), dtype=self.shape.dtype),
            kv_caches=tuple((layer[0], layer[1]) for layer in self.cache),
            attend=attention.run,
        )
        logits = torch.full((len(work), spec.vocab_size), float("nan"), dtype=self.shape.dtype)
        with torch.inference_mode():
            last = torch.from_numpy(batch.qo_indptr[1:] - 1).long()
            ends = Ends(last, torch.full((len(last), spec.hidden_size), float("nan"), dtype=self.shape.dtype))
            if leave_out:
                self.model.forward(self.kernels, replace(inputs, ends=ends))
                self.left_out = inputs.residual.clone()
                self.model.finish(self.kernels, inputs.attn_out, inputs.residual)
            else:
                self.model.forward(self.kernels, inputs)
                torch.index_select(inputs.residual, 0, last, out=ends.out)
            self.hidden = inputs.residual
            self.model.head(self.kernels, ends.out, logits)
        for sequence, _, end in spans:
            sequence.cached = end
        return logits

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int) -> list[list[int]]:
        """Greedy tokens after each prompt: prompts in chunks, in steps that they share with those already decoding."""
        sequences = [Stream(list(prompt)) for prompt in prompts]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        while pending := [(s, end) for s, end in zip(sequences, ends, strict=True) if len(s.tokens) < end]:
            work = [(s, min(chunk, len(s.tokens) - s.cached)) for s, _ in pending]
            for (sequence, _), logits in zip(work, self.step(work), strict=True):
                if sequence.cached == len(sequence.tokens):
                    sequence.tokens.append(int(logits.argmax()))
        return [s.tokens[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]


def _batch(spans: Sequence[tuple[Stream, int, int]]) -> AttentionBatch:
    counts = [-(-end // PAGE_SIZE) for _, _, end in spans]
    return AttentionBatch(
        qo_indptr=np.cumsum([0, *(end - start for _, start, end in spans)]).astype(np.int32),
        kv_indptr=np.cumsum([0, *counts]).astype(np.int32),
        kv_indices=np.concatenate([s.pages[:n] for (s, _, _), n in zip(spans, counts, strict=True)]).astype(np.int32),
        kv_last_page_len=np.array([(end - 1) % PAGE_SIZE + 1 for _, _, end in spans], np.int32),
    )
