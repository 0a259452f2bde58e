"""Answers in the shapes of the API: logprobs and usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from formats.openai import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob, Usage
from gplan.core import FinishReason
from gplan.serving.generation import Scored
from gplan.serving.vocabulary import Vocabulary

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finish_reason(reason: FinishReason) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"


def usage_of(prompt_tokens: int, output_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens, completion_tokens=output_tokens, total_tokens=prompt_tokens + output_tokens
    )


def chat_logprobs(vocabulary: Vocabulary, tokens: Iterable[Scored]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_token(vocabulary, scored) for scored in tokens])


def completion_logprobs(vocabulary: Vocabulary, tokens: Sequence[Scored], wants_top: bool) -> CompletionLogprobs:
    top: list[dict[str, float] | None] | None = None
    if wants_top:
        top = [_top(vocabulary, scored) for scored in tokens]
    return CompletionLogprobs(
        tokens=[_text(vocabulary, scored.token) for scored in tokens],
        token_logprobs=[None if scored.logprob is None else _finite(scored.logprob) for scored in tokens],
        top_logprobs=top,
        text_offset=[scored.offset for scored in tokens],
    )


def _top(vocabulary: Vocabulary, scored: Scored) -> dict[str, float] | None:
    if scored.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, score in scored.top:
        # Tokens of the same text: the likelier one has it.
        top.setdefault(_text(vocabulary, token), _finite(score))
    return top


def _chat_token(vocabulary: Vocabulary, scored: Scored) -> TokenLogprob:
    return TokenLogprob(
        token=_text(vocabulary, scored.token),
        logprob=LOWEST if scored.logprob is None else _finite(scored.logprob),
        bytes=list(vocabulary.token_bytes(scored.token)),
        top_logprobs=[
            TopLogprob(
                token=_text(vocabulary, token), logprob=_finite(score), bytes=list(vocabulary.token_bytes(token))
            )
            for token, score in scored.top
        ],
    )


def _text(vocabulary: Vocabulary, token: int) -> str:
    """The token's text; bytes that are not whole characters as `bytes:\\xf0\\x9f`, as the API writes them."""
    data = vocabulary.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(score: float) -> float:
    return max(score, LOWEST)
