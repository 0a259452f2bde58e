"""Grammars in the engine over a real executor: with results read late, in a pool too small, beside free answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gplan.core import SamplingParams
from gplan.graphs.executor import Executor
from gplan.serving.engine import Engine
from gplan.serving.grammar.constraints import Constraints
from gplan.serving.grammar.library import GrammarError, GrammarVocabulary, check, schema_grammar
from gplan.serving.protocol import Abort, Add, Drain, Failed, FromEngine, Outputs, ToEngine
from tests.checkpoints import EOS, VOCAB_SIZE, make_checkpoint, make_tokenizer
from tests.graphs.drive import limits_of, make_executor

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOKENIZER = make_tokenizer()
BIAS = tuple((int(TOKENIZER.encode(space)[0]), -50.0) for space in " \n\r\t")
LIMITS = limits_of(max_batch=4, max_len=128, chunk=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("grammars") / "tiny")


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, {EOS})


class Script:
    """A channel that hands over its messages at once, and a drain when as many answers have ended."""

    def __init__(self, adds: Sequence[ToEngine], count: int) -> None:
        self._adds, self._count = list(adds), count
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.decode_keys: list[str] = []
        self.preemptions = 0

    def receive(self, wait_ms: int) -> list[ToEngine]:
        adds, self._adds = self._adds, []
        return adds or ([Drain()] if len(self.ends) == self._count else [])

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self.ends[message.id] = message.message
        if not isinstance(message, Outputs):
            return
        self.preemptions = message.stats.preemptions
        if message.stats.phase == "decode":
            self.decode_keys.append(message.stats.key)
        for output in message.outputs:
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            if output.finish_reason:
                self.ends[output.id] = output.finish_reason

    def text(self, name: str) -> str:
        return str(TOKENIZER.decode(self.tokens[name]))


def add(name: str, grammar: str = "", **params: Any) -> Add:
    """A request; of a grammar's whitespace it makes little."""
    prompt = [int(token) for token in TOKENIZER.encode(f"{name}: a JSON", add_special_tokens=False)]
    values = {"max_tokens": 60, "temperature": 0.0, "stop_token_ids": frozenset({EOS}), "logit_bias": BIAS, **params}
    return Add(name, prompt, SamplingParams(grammar=grammar, **values))


def executor_of(checkpoint: Path, num_pages: int = 400, lag: int = 0) -> Executor:
    executor = make_executor(
        checkpoint, limits=LIMITS, num_pages=num_pages, decode_ladder=(1, 2, 4), prefill_ladder=(32, 64)
    )
    executor.device.result_lag = lag
    return executor


def run(executor: Executor, adds: Sequence[ToEngine], vocabulary: GrammarVocabulary | None) -> Script:
    script = Script(adds, sum(isinstance(message, Add) for message in adds))
    pages = executor.parts.kv_pool.num_pages
    Engine(executor, LIMITS, pages, script, lambda: False, Constraints(vocabulary)).run()
    return script


def free() -> list[Add]:
    return [add(f"free {index}", stop_token_ids=frozenset()) for index in range(3)]


def follows(text: str) -> bool:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False
    assert set(found) == {"name", "age", "tags"}
    return len(found["name"]) <= 6 and 0 <= found["age"] <= 150 and set(found["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("num_pages", [400, 20])
@pytest.mark.parametrize("lag", [0, 1])
def test_answers_follow_and_free_ones_beside_them_are_what_they_were(
    checkpoint: Path, vocabulary: GrammarVocabulary, lag: int, num_pages: int
) -> None:
    grammar = schema_grammar(SCHEMA)
    executor = executor_of(checkpoint, num_pages, lag)
    guided = [add(f"guided {i}", grammar, temperature=i / 3, seed=i) for i in range(6)]
    alone, together = run(executor, free(), None), run(executor, [*guided, *free()], vocabulary)
    assert (together.preemptions > 0) == (num_pages == 20), "the small pool must have preempted, the large one not"
    for index in range(3):
        assert together.tokens[f"free {index}"] == alone.tokens[f"free {index}"]
        assert not follows(together.text(f"free {index}"))
    for index in range(6):
        assert together.ends[f"guided {index}"] == "stop"
        assert follows(together.text(f"guided {index}"))
    assert all(together.decode_keys), "decode stays replayed while grammars are active"


def test_reading_results_late_changes_no_token(checkpoint: Path, vocabulary: GrammarVocabulary) -> None:
    found = []
    for lag in (0, 1):
        adds = [add(f"guided {i}", schema_grammar(SCHEMA), temperature=1.0, seed=i) for i in range(5)]
        found.append(run(executor_of(checkpoint, lag=lag), adds, vocabulary).tokens)
    assert found[0] == found[1]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    checkpoint: Path, vocabulary: GrammarVocabulary
) -> None:
    executor = executor_of(checkpoint)
    script = run(executor, [add("wrong", '{"grammars": []}'), add("right", schema_grammar(SCHEMA))], vocabulary)
    assert script.ends["wrong"] not in ("stop", "length")
    assert "wrong" not in script.tokens
    assert follows(script.text("right"))


@pytest.mark.parametrize("lag", [0, 1])
def test_an_answer_whose_mask_takes_too_long_fails_alone(
    checkpoint: Path, vocabulary: GrammarVocabulary, lag: int
) -> None:
    tokenizer = TOKENIZER.backend_tokenizer.to_str()
    hasty = GrammarVocabulary(tokenizer, VOCAB_SIZE, {EOS}, step_fuel=300)
    slow = schema_grammar({"type": "string", "pattern": "^(.*a.{300})+$"})
    simple = schema_grammar({"enum": [1, 2]})
    script = run(executor_of(checkpoint, lag=lag), [add("slow", slow), add("simple", simple), *free()], hasty)
    assert "grammar" in script.ends["slow"]
    given, patient = script.tokens.get("slow", []), run(executor_of(checkpoint), [add("slow", slow)], vocabulary)
    assert given == patient.tokens["slow"][: len(given)], "a token that was drawn without a mask"
    assert script.text("simple") in ("1", "2")
    assert all(script.ends[f"free {index}"] in ("stop", "length") for index in range(3))


def test_a_request_that_is_aborted_while_its_grammar_compiles_is_forgotten(
    checkpoint: Path, vocabulary: GrammarVocabulary
) -> None:
    executor = executor_of(checkpoint)
    gone, stays = add("gone", schema_grammar(SCHEMA)), add("stays")
    script = Script([gone, Abort(["gone"]), stays], 1)
    Engine(executor, LIMITS, 400, script, lambda: False, Constraints(vocabulary)).run()
    assert set(script.ends) == {"stays"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, '"not"'),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, '"if", "then"'),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "format": "idn-hostname"}, "idn-hostname"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
        ({"enum": ["x" * 300_000]}, "longer than"),
    ],
)
def test_a_schema_that_is_not_enforced_is_refused_by_the_name_of_its_keyword(
    schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(GrammarError, match=named.replace("$", r"\$").replace("(", r"\(")):
        schema_grammar(schema)


@pytest.mark.parametrize("depth", [300, 2000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="nested too deeply"):
        schema_grammar(schema)


def test_a_grammar_is_checked_without_a_tokenizer() -> None:
    check(schema_grammar(SCHEMA))
    with pytest.raises(GrammarError):
        check('{"grammars": []}')


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="end-of-text"):
        GrammarVocabulary(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, set())


def test_a_tokenizer_beyond_the_library_is_refused() -> None:
    with pytest.raises(GrammarError, match="cannot read"):
        GrammarVocabulary("{}", VOCAB_SIZE, {EOS})
