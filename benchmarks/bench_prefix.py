"""Time to the first token in a conversation: of its first turn, and of its second, which begins as the first. One JSON
line.

    python -m benchmarks.bench_prefix PLAN --checkpoint DIR [--prompt 2000] [--conversations 3]

Conversations come one after another over HTTP and share nothing but the chat template. The line tells the middle of
each turn's times, their ratio, the tokens that were not computed again, and how many prefill steps were replayed and
how many ran eagerly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cli.local_server import LocalServer, local_server

WORDS = (
    "river",
    "stone",
    "letter",
    "garden",
    "winter",
    "music",
    "bread",
    "window",
    "forest",
    "market",
    "silver",
    "road",
)
ANSWER_TOKENS = 32


def first_message(tokenizer: Any, seed: int, num_tokens: int) -> str:
    """Words at random, about as many as make so many tokens."""
    rng, text = random.Random(seed), f"Story {seed}:"
    while len(tokenizer(text).input_ids) < num_tokens:
        text += "".join(f" {rng.choice(WORDS)}" for _ in range(20))
    return f"{text}\nWhat is this about?"


def ask(server: LocalServer, messages: list[dict[str, str]]) -> tuple[float, str]:
    """Milliseconds until the first piece of text, and the answer."""
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    started = time.perf_counter()
    first, pieces = 0.0, []
    for piece in server.ask_streaming(body | {"model": server.model_name()}):
        if piece and not first:
            first = (time.perf_counter() - started) * 1e3
        pieces.append(piece)
    return first, "".join(pieces)


def counted(server: LocalServer, name: str, **labels: str) -> float:
    samples = [sample for family in server.metrics() for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a first message")
    parser.add_argument("--conversations", type=int, default=3)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    turns: tuple[list[float], list[float]] = ([], [])
    log = Path(tempfile.mkdtemp()) / "serve.log"
    with local_server((arguments.plan, "--checkpoint", arguments.checkpoint), log) as server:
        ask(server, [{"role": "user", "content": "Hello."}])
        for seed in range(arguments.conversations):
            messages = [{"role": "user", "content": first_message(tokenizer, seed, arguments.prompt)}]
            first_ms, answer = ask(server, messages)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
            second_ms, _ = ask(server, messages)
            turns[0].append(first_ms)
            turns[1].append(second_ms)
        first, second = (statistics.median(times) for times in turns)
        line = {
            "case": "second_turn",
            "prompt_tokens": arguments.prompt,
            "first_ms": round(first, 1),
            "second_ms": round(second, 1),
            "ratio": round(first / second, 2),
            "hit_tokens": counted(server, "gplan_prefix_hit_tokens_total"),
            "prefills_replayed": counted(server, "gplan_steps_total", phase="prefill", outcome="replayed"),
            "prefills_eager": counted(server, "gplan_steps_total", phase="prefill", outcome="eager"),
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
