"""A real checkpoint against transformers, by hand: `python -m tests.models.by_hand CHECKPOINT`. No test of the suite.

Compares greedy tokens of prompts of 1 to 700 tokens that share steps, then the time per token at batch 1: an eager
forward on reference kernels against transformers' own `generate`, in turns within one run.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM

from gplan.models import load_model, read_headers, read_spec
from tests.models.harness import Harness, Stream

PROMPT_LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128, 200, 255, 256, 300, 511, 700)
NEW_TOKENS = 24
TIMED_TOKENS = 64
ROUNDS = 5


def main(checkpoint: str) -> None:
    spec = read_spec(checkpoint, read_headers(checkpoint))
    model = load_model(checkpoint, spec, torch.float32, "cpu", 1024)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, spec.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]

    harness = Harness(spec, model, max_batch=len(prompts), max_tokens=1024, num_pages=600)
    answers = harness.generate(prompts, NEW_TOKENS, chunk=48)
    equal = [a == _generate(reference, p, NEW_TOKENS) for a, p in zip(answers, prompts, strict=True)]
    print(f"{sum(equal)} of {len(prompts)} prompts give the same {NEW_TOKENS} tokens")

    prompt = prompts[PROMPT_LENGTHS.index(16)]
    for _ in range(ROUNDS):
        ours, theirs = _time_ours(Harness(spec, model, max_batch=1), prompt), _time_theirs(reference, prompt)
        print(f"{ours * 1e3:.1f} ms a token, transformers {theirs * 1e3:.1f} ms, ratio {ours / theirs:.2f}")


@torch.inference_mode()
def _generate(reference: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    inputs = torch.tensor([prompt])
    answer = reference.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, do_sample=False, eos_token_id=[]
    )
    return answer[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _time_ours(harness: Harness, prompt: list[int]) -> float:
    stream = Stream(list(prompt))
    stream.tokens.append(int(harness.step([(stream, len(prompt))]).argmax()))
    started = time.perf_counter()
    for _ in range(TIMED_TOKENS):
        stream.tokens.append(int(harness.step([(stream, 1)]).argmax()))
    return (time.perf_counter() - started) / TIMED_TOKENS


def _time_theirs(reference: torch.nn.Module, prompt: list[int]) -> float:
    started = time.perf_counter()
    _generate(reference, prompt, 1)
    first = time.perf_counter()
    _generate(reference, prompt, TIMED_TOKENS + 1)
    return (time.perf_counter() - first - (first - started)) / TIMED_TOKENS


if __name__ == "__main__":
    main(sys.argv[1])
