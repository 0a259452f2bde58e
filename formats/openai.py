"""Structs of the OpenAI HTTP API: requests as they arrive, responses as they leave. Bodies only; no server here.

Every documented request field is named, so that nothing is silently dropped. A field is one of three kinds:

* supported: it has a type of its own below;
* harmless: it changes nothing about the answer, and is accepted and not used (`Ignored`);
* refused: it would change the answer and is not supported, so any value but a neutral one is an error that names it
  (`Refused`; the neutral values are in `openai_rules`).

A field that is not named at all is refused as unknown. Limits here are those of the API; what depends on the model or
the plan (lengths, token ids) is for the server to check. `openai_rules` reads the bodies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from formats.openai_tools import MAX_TOOLS, NamedToolChoice, Tool, ToolCall, ToolCallDelta, ToolChoice

MAX_CHOICES = 128
"""`n` and `best_of` at most, and prompts of one request."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LIST = 1024
"""Entries of `logit_bias` and `stop_token_ids` at most."""

Ignored = Any
Refused = Any

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completion share. `None` is always "not given"; the server knows the defaults.

    Extensions to the API: top_k (0 and -1: no limit), min_p, repetition_penalty, ignore_eos, min_tokens,
    stop_token_ids.
    """

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LIST)] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LIST)] | None = None
    user: Ignored = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of usage alone (and every other chunk says `"usage": null`)."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `max_tokens` not given means 16, as the API documents; 0 only scores an echoed prompt."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prompt: str | list[str | TokenId | list[TokenId]]
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Refused = None

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One entry per prompt: its text, or its token ids. Never empty, never mixed (`openai_rules` saw to it)."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(item for item in self.prompt if isinstance(item, int)),)
        return tuple(
            item if isinstance(item, str) else tuple(item) for item in self.prompt if not isinstance(item, int)
        )

    @property
    def max_output_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named JSON schema. It is always enforced: `strict` changes nothing."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: dict[str, Any] | bool | None = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must be: any text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """What the answer must follow; None for any text."""
        if self.type == "text":
            return None
        found = self.json_schema.schema if self.json_schema is not None else None
        return {"type": "object"} if found is None else found


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Refused = None
    input_audio: Refused = None
    file: Refused = None
    refusal: Refused = None
    prompt_cache_breakpoint: Ignored = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of the conversation. The fields an answer carries may be sent back with it, where they are null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Refused = None
    annotations: Refused = None
    audio: Refused = None
    function_call: Refused = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content; text parts are joined with nothing between them."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it; `developer` is the API's newer word for `system`."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatCompletionRequest(SamplingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`. Without a token limit the answer may fill the model's planned length.

    Extensions to the API: chat_template_kwargs, add_generation_prompt.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None

    audio: Refused = None
    function_call: Refused = None
    functions: Refused = None
    modalities: Refused = None
    moderation: Refused = None
    prediction: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    @property
    def max_output_tokens(self) -> int | None:
        """None: as many as fit. Where both limits are given they are equal (`openai_rules` saw to it)."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools that the answer may call: all, or the one that was chosen by name, or none."""
        match self.tool_choice:
            case "none":
                return ()
            case NamedToolChoice(function=chosen):
                return tuple(tool for tool in self.tools or () if tool.function.name == chosen.name)
            case _:
                return tuple(self.tools or ())

    @property
    def may_talk(self) -> bool:
        """Whether the answer need not call a tool."""
        return self.tool_choice in (None, "auto", "none")


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Aligned lists, one entry per token; the first token of an echoed prompt has no probability.

    Attributes:
        text_offset: characters before each token, from the start of the returned text.
        top_logprobs: token text to log probability; null where no alternatives were asked for or exist.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or in a stream the next part of it, with `finish_reason` in the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, and each chunk of its stream. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes`: the token's own bytes, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null where there are calls and nothing was said."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatAnswer
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds. Only the first chunk of a choice has a role; the last adds nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream. `usage` is left out unless asked for; then null, and set in the last, empty chunk."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. `max_model_len` is an extension: prompt plus answer, in tokens."""

    id: str
    created: int
    owned_by: str = "gplan"
    object: Literal["model"] = "model"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
