"""Scores of prompts however prefill is captured: those of transformers, over several steps and beside others."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from formats.plan import BackendName
from gplan.core import Request
from gplan.scheduling.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, make_model
from tests.graphs.drive import greedy, limits_of, make_executor

LENGTHS = (150, 5, 1, 64, 33)


@pytest.mark.parametrize("prefill", ["full", "breakable", "eager"])
def test_scores_are_those_of_transformers(tmp_path: Path, prefill: BackendName) -> None:
    limits = limits_of(chunk=64, max_batch=4)
    executor = make_executor(
        make_checkpoint(tmp_path), prefill=prefill, limits=limits, decode_ladder=(1, 4), prefill_ladder=(16, 64)
    )
    model, scheduler = make_model("LlamaForCausalLM"), Scheduler(limits, executor.parts.kv_pool.num_pages)
    prompts = [[(7 * i + 31 * place + 11) % VOCAB_SIZE for place in range(n)] for i, n in enumerate(LENGTHS)]
    requests = [greedy(str(i), prompt, 3, prompt_logprobs=2) for i, prompt in enumerate(prompts)]
    requests.append(greedy("not scored", prompts[0][:40], 3))
    for request in requests:
        scheduler.add(request)
    found: dict[Request, dict[int, float]] = defaultdict(dict)
    while (batch := scheduler.schedule()) is not None:
        result = executor.collect(executor.launch(batch))
        scheduler.update(batch, result.tokens)
        for part in result.prompt_logprobs:
            found[part.request] |= {part.start + index: entry.logprob for index, entry in enumerate(part.tokens)}
    for request, prompt in zip(requests, prompts, strict=False):
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [float(scores[place - 1, prompt[place]]) for place in range(1, len(prompt))]
        assert [found[request][place] for place in range(1, len(prompt))] == pytest.approx(expected, abs=1e-4)
        assert len(found[request]) == len(prompt) - 1
    assert requests[-1] not in found
