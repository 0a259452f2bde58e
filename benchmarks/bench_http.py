"""A plan served over HTTP against transformers' own `generate`, greedy, same dtype, same machine. JSON lines.

    python -m benchmarks.bench_http PLAN --checkpoint DIR [--tokens 40]

Cases: seconds until ready, milliseconds per token of one request and of `generate` with their ratio, and the throughput
of eight requests at once over that of one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cli.local_server import LocalServer, local_server
from formats.container import read_plan

QUESTION = "Tell me a story about a king."


def ask(server: LocalServer, model: str, text: str, num_tokens: int) -> None:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    server.ask(body | {"max_tokens": num_tokens, "ignore_eos": True})


def per_token_ms(run: Callable[[int], None], num_tokens: int) -> float:
    """Milliseconds per token beyond the first few, the middle of three."""
    run(4)
    samples = []
    for _ in range(3):
        started = time.perf_counter()
        run(4)
        between = time.perf_counter()
        run(4 + num_tokens)
        samples.append((time.perf_counter() - between - (between - started)) / num_tokens * 1e3)
    return statistics.median(samples)


def transformers_ms(checkpoint: str, dtype: str, num_tokens: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def generate(count: int) -> None:
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    return per_token_ms(generate, num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    plan, model = read_plan(arguments.plan), Path(arguments.checkpoint).resolve().name
    started = time.perf_counter()
    log = Path(tempfile.mkdtemp()) / "serve.log"
    with local_server((arguments.plan, "--checkpoint", arguments.checkpoint, "--model-name", model), log) as server:
        print(json.dumps({"case": "ready", "seconds": time.perf_counter() - started}), flush=True)
        served = per_token_ms(lambda count: ask(server, model, QUESTION, count), arguments.tokens)
        began = time.perf_counter()
        ask(server, model, QUESTION, arguments.tokens)
        one = arguments.tokens / (time.perf_counter() - began)
        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: ask(server, model, f"{QUESTION} He is {i}.", arguments.tokens), range(8)))
        eight = 8 * arguments.tokens / (time.perf_counter() - began)
    reference = transformers_ms(arguments.checkpoint, plan.dtype, arguments.tokens)
    token = {"case": "token", "served_ms": served, "transformers_ms": reference, "ratio": served / reference}
    print(json.dumps(token), flush=True)
    print(json.dumps({"case": "eight", "one_per_s": one, "eight_per_s": eight, "ratio": eight / one}), flush=True)


if __name__ == "__main__":
    main()
