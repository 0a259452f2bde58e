"""Draws by the CUDA set's kernels in Triton's interpreter; fails where a token is not the reference's.

    TRITON_INTERPRET=1 python -m tests.kernels.drawn_without_gpu

A process of its own: the interpreter is chosen once, when kernels are imported.
"""

from __future__ import annotations

import torch

from gplan.kernels.base import SamplingInputs
from gplan.kernels.flashinfer.drawing import sample
from gplan.kernels.sampling import sample_tokens

N, VOCAB = 8, 1500


def main() -> None:
    differing = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = (torch.randn(N, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
        logits[1, 500:] = float("-inf")
        logits[2] = (logits[2] * 2).round() / 2  # many equal logits
        logits[3] = 1.0 + logits[3] * 1e-3  # of one upper half
        inputs = SamplingInputs(
            temperature=torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.7, 1.0]),
            top_k=torch.tensor([VOCAB, VOCAB, 900, 700, VOCAB, 50, VOCAB, 1], dtype=torch.int32),
            top_p=torch.tensor([1.0, 0.9, 0.8, 0.9, 1.0, 1.0, 0.95, 1.0]),
            min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.0]),
            seed=torch.arange(N),
            position=torch.arange(N) * 31,
        )
        differing += int((sample(logits, inputs) != sample_tokens(logits, inputs)).sum())
        logits[0], logits[1], logits[5, ::2] = float("nan"), float("-inf"), float("nan")
        tokens = sample(logits, inputs)
        assert tokens[:2].tolist() == [0, 0], "a row without a number has its first token"
        assert int(tokens[5]) % 2, "what is no number was drawn"
    assert not differing, f"{differing} tokens are not the reference's"


if __name__ == "__main__":
    main()
