"""What grammars take: building the vocabulary, compiling a schema, a mask for each token, and a token's step.

Masks are made on the host while the forward pass of their step runs, so they cost nothing while they take less.

    python -m benchmarks.bench_grammars CHECKPOINT [--vocab-size 128000]
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gplan.models import locate_checkpoint
from gplan.serving.grammar.library import GrammarVocabulary, schema_grammar

R = TypeVar("R")

SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "number"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value", "children"],
    "additionalProperties": False,
}
FIELD: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "pattern": "^[a-z]{2,40}-[0-9]{1,12}$"},
        {"type": "string", "maxLength": 300},
        {"enum": [f"value {number}" for number in range(40)]},
    ]
}
NAMES = [f"field_{number}" for number in range(60)]
LARGE: dict[str, Any] = {
    "type": "object",
    "properties": dict.fromkeys(NAMES, FIELD),
    "required": NAMES[:30],
    "additionalProperties": False,
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "small": (SMALL, {"name": 'Ada "x" Löwe 😀', "age": 36, "tags": ["a", "c"]}),
    "recursive": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"value": 1.5, "children": [{"value": -2, "children": []}, {"value": 3e5, "children": []}]},
    ),
    "large": (
        LARGE,
        {name: ("ab-12", "some text, with commas", "value 3")[i % 3] for i, name in enumerate(NAMES[:30])},
    ),
}


@click.command()
@click.argument("checkpoint")
@click.option(
    "--vocab-size", type=int, help="Grow the byte-level vocabulary to so many tokens, by joining random ones."
)
def main(checkpoint: str, vocab_size: int | None) -> None:
    from tokenizers import Tokenizer

    text = (locate_checkpoint(checkpoint) / "tokenizer.json").read_text()
    text = text if vocab_size is None else _grown(text, vocab_size)
    tokenizer = Tokenizer.from_str(text)
    size = tokenizer.get_vocab_size()
    vocabulary, seconds = _timed(lambda: GrammarVocabulary(text, size, {0}))
    click.echo(f"{size:,} tokens: vocabulary in {seconds:.2f} s")
    for name, (schema, document) in CASES.items():
        matcher, seconds = _timed(lambda schema=schema: vocabulary.matcher(schema_grammar(schema)))  # type: ignore[misc]
        times = []
        for token in tokenizer.encode(json.dumps(document, ensure_ascii=False), add_special_tokens=False).ids:
            bits, taken = _timed(lambda matcher=matcher: vocabulary.masks([matcher]))  # type: ignore[misc]
            assert int(bits[0, token // 32]) >> (token % 32) & 1, "the document follows its schema"
            assert matcher.consume_token(token)
            times.append(taken * 1e6)
        times.sort()
        middle, late = times[len(times) // 2], times[int(len(times) * 0.99)]
        mean = sum(times) / len(times)
        click.echo(
            f"{name:10} compiled in {seconds * 1e3:5.1f} ms; mask: mean {mean:.0f}, p50 {middle:.0f}, p99 {late:.0f} us"
        )


def _timed(run: Callable[[], R]) -> tuple[R, float]:
    started = time.perf_counter()
    found = run()
    return found, time.perf_counter() - started


def _grown(text: str, size: int) -> str:
    content, chance = json.loads(text), random.Random(0)
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    names = [name for name in vocabulary if not name.startswith("<|")]
    while len(vocabulary) < size:
        left, right = chance.choice(names), chance.choice(names)
        if len(left + right) < 24 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right])
    return json.dumps(content)


if __name__ == "__main__":
    main()
