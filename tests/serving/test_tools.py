"""Tools: how templates write calls, how answers are read, and calls of a real server by the official client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from formats.openai_tools import FunctionDefinition
from gplan.serving.grammar.library import GrammarError, tools_grammar
from gplan.serving.grammar.tool_calls import Arguments, Called, Piece, ToolCallReader, Words
from gplan.serving.grammar.tool_syntax import ToolSyntax, read_syntax
from tests.checkpoints import CHAT_TEMPLATE, make_tokenizer
from tests.serving.live import MODEL, Live

HERMES = r"""
{%- if tools %}{{- '<|im_start|>system\nTools:' }}{%- for tool in tools %}{{- " " + tool.function.name }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role }}
{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
ONE_CALL = """{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}

{% if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
{%- set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
LIST = """{%- for m in messages %}<|im_start|>{{ m.role }}:
{%- if m.tool_calls %}CALLS [
{%- for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]
{%- else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "-", "parameters": schema}}
    for name, schema in {
        "weather": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "time": {"type": "object", "properties": {}, "additionalProperties": False},
    }.items()
]
FUNCTIONS = [
    FunctionDefinition(name=tool["function"]["name"], parameters=tool["function"]["parameters"])  # type: ignore[index]
    for tool in TOOLS
]


def syntax_of(template: str) -> ToolSyntax:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template

    def render(messages: Any, begins: bool) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=begins))

    return read_syntax(render, SPECIAL)


def test_what_templates_write_is_read_off_them() -> None:
    assert syntax_of(HERMES) == ToolSyntax(
        begin="<tool_call>\n",
        head='{"name": "',
        middle='", "arguments": ',
        tail="}",
        separator="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
    )
    assert syntax_of(ONE_CALL) == ToolSyntax("", '{"name": "', '", "parameters": ', "}", None, "")
    found = syntax_of(LIST)
    assert (found.begin, found.separator, found.end, found.trigger) == ("CALLS [", ", ", "]", "CALLS [")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHAT_TEMPLATE, "does not write calls"),
        (HERMES.replace(r"<tool_call>\n{", r"<|pad|>\n{"), "special tokens"),
        (HERMES.replace("{{- call.function.arguments | tojson }}", "...."), "arguments as a JSON object"),
        (HERMES.replace('{"name": "', "<name>"), "JSON object of name"),
        (HERMES.replace(r"'<|im_start|>assistant\n'", "'<|im_start|>model'"), "begin an answer"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(template: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        syntax_of(template)


def written(syntax: ToolSyntax, words: str, calls: list[tuple[str, str]]) -> str:
    """An answer as the model would write it."""
    if not calls:
        return words
    parts = [f"{syntax.head}{name}{syntax.middle}{arguments}{syntax.tail}" for name, arguments in calls]
    return words + syntax.begin + (syntax.separator or "").join(parts) + syntax.end


def read(reader: ToolCallReader, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    pieces: list[Piece] = [piece for part in parts for piece in reader.push(part)] + reader.finish()
    names = [piece.name for piece in pieces if isinstance(piece, Called)]
    texts = ["" for _ in names]
    for piece in pieces:
        if isinstance(piece, Arguments):
            texts[piece.index] += piece.text
    return "".join(p.text for p in pieces if isinstance(p, Words)), list(zip(names, texts, strict=True))


JSON_TEXTS = st.dictionaries(st.text(max_size=5), st.text(alphabet='ab"\\{}[]<\n', max_size=8), max_size=3)


@given(
    template=st.sampled_from([HERMES, ONE_CALL, LIST]),
    words=st.text(alphabet="ab <\n/tol_c>", max_size=20),
    calls=st.lists(st.tuples(st.sampled_from(["weather", "time"]), JSON_TEXTS.map(json.dumps)), max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_an_answer_is_read_however_it_is_cut(
    template: str, words: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    syntax = syntax_of(template)
    calls = calls if syntax.separator is not None else calls[:1]
    whole = written(syntax, words, calls)
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    parts = [whole[a:b] for a, b in pairwise(ends)]
    found_words, found_calls = read(ToolCallReader(syntax, may_talk=True), parts)
    assert found_calls == calls
    assert found_words.rstrip() == words.rstrip() if calls else found_words == words


@pytest.mark.parametrize("template", [HERMES, ONE_CALL, LIST])
@pytest.mark.parametrize("may_talk", [False, True])
def test_grammars_can_be_compiled(template: str, may_talk: bool) -> None:
    assert tools_grammar(syntax_of(template).grammar(FUNCTIONS, may_talk=may_talk, may_repeat=True))


# A real server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(plan_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a server whose checkpoint has the Hermes template."""
    folder = tmp_path_factory.mktemp("tools")
    checkpoint = folder / MODEL
    shutil.copytree(plan_path.with_suffix(""), checkpoint)
    (checkpoint / "chat_template.jinja").write_text(HERMES)
    plan = folder / plan_path.name
    shutil.copy(plan_path, plan)
    with Live(plan, "--accept-drift", "chat_template_digest") as live:
        yield live.client()


BIAS = {str(make_tokenizer().encode(space)[0]): -50 for space in " \t"}
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, "logit_bias": BIAS}


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{**ASK, "max_tokens": 220, "seed": 5, **options})


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.type == "function"
    assert call.id.startswith("call_")
    if call.function.name == "weather":
        assert arguments["city"] in ("Oslo", "Rome")
        assert 1 <= arguments["days"] <= 9
    else:
        assert (call.function.name, arguments) == ("time", {})


def test_a_required_call_is_made_as_its_parameters_say(client: OpenAI) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = choice.message.tool_calls
    check(call)


def test_a_tool_that_is_named_is_called(client: OpenAI) -> None:
    choice = ask(client, tool_choice={"type": "function", "function": {"name": "weather"}}, n=2)
    for each in choice.choices:
        (call,) = each.message.tool_calls
        assert call.function.name == "weather"
        check(call)
        assert each.finish_reason == "stop"


def test_a_stream_of_calls_is_the_same(client: OpenAI) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    whole = ask(client, **options).choices[0].message.tool_calls[0]
    name, arguments, reasons = "", "", []
    for chunk in ask(client, stream=True, **options):
        delta = chunk.choices[0].delta
        assert not delta.content
        for call in delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_an_answer_may_do_without_calls(client: OpenAI) -> None:
    choice = ask(client, max_tokens=20, temperature=0).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content
    plain = ask(client, max_tokens=20, temperature=0, tool_choice="none").choices[0]
    assert plain.message.tool_calls is None


def test_calls_and_their_results_go_back_into_the_conversation(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    longer = ask(client, messages=messages, max_tokens=3)
    shorter = ask(client, messages=messages[:1], max_tokens=3)
    said = '<|im_start|>assistant\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'
    said += "<|im_start|>tool\n12:00<|im_end|>\n"
    expected = len(make_tokenizer().encode(said, add_special_tokens=False))
    assert longer.usage.prompt_tokens - shorter.usage.prompt_tokens == expected


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        ask(client, **options)
    assert refusal.value.param == param


def test_a_template_that_knows_no_tools_refuses_them(server: Live) -> None:
    with pytest.raises(BadRequestError, match="knows no tools") as refusal:
        ask(server.client())
    assert refusal.value.param == "tools"


def test_the_templates_here_are_templates() -> None:
    for template in (HERMES, ONE_CALL, LIST):
        jinja2.Environment().parse(template)
