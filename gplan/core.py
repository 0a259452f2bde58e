"""The words every package shares: phases, keys, requests and the batch of one step. No torch here.

Lengths follow one scheme. Of a request's `num_tokens`, the first `cached_len` have their keys and values in the KV
pool (or will have once the steps already launched are done). A step extends it by `Chunk.length` tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

DUMMY_PAGE = 0
DUMMY_ROW = 0


class Phase(enum.StrEnum):
    """What varies in a step: requests of one token each (decode), or tokens (prefill, and any mixed step)."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, order=True, slots=True)
class ShapeKey:
    """Names one captured graph: whatever changes the sequence of kernels is in here.

    Attributes:
        phase: decode or prefill.
        size: the bucket: requests in decode, tokens in prefill.
        width: tokens per request in decode (1, or 1 + k when k draft tokens are verified).
        variant: whatever else changes the kernels; empty for the plain graph.
    """

    phase: Phase
    size: int
    width: int = 1
    variant: str = ""

    def __str__(self) -> str:
        text = f"{self.phase}:{self.size}"
        if self.width != 1:
            text += f"x{self.width}"
        return f"{text}:{self.variant}" if self.variant else text


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Values are already validated; `0` temperature means greedy.

    Applied in this order: penalties, `logit_bias`, `grammar`, temperature, `top_k`, `top_p`, `min_p`, draw.

    Attributes:
        max_tokens: tokens to generate at most; at least 1.
        top_k: 0 for no limit.
        seed: draws depend on the seed and the token's position alone, never on the batch mates.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty, frequency_penalty: subtracted for tokens seen in the output, as OpenAI defines them.
        logprobs: how many top alternatives to report with each token; None reports nothing.
        prompt_logprobs: the same for each token of the prompt but the first; its tokens are then all computed.
        stop_token_ids: end the answer and are not part of it.
        min_tokens: until the answer has so many, none of `stop_token_ids` is drawn.
        grammar: what the answer must follow, in the grammar library's own form; empty for anything.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    grammar: str = ""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being served: its tokens, and where its keys and values are.

    Owned by the scheduler, which alone changes it. `num_pending` tokens were sampled by steps whose results the host
    has not read yet: they count in `num_tokens` though `tokens` does not hold them. `client` is whom it is for: waiting
    requests take turns by client. `is_unique`: no other request begins as this one does, as far as a simulation knows.
    """

    id: str
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    arrival: float = 0.0
    client: str = ""
    is_unique: bool = False
    row: int = DUMMY_ROW
    pages: list[int] = field(default_factory=list)
    cached_len: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def is_running(self) -> bool:
        return self.row != DUMMY_ROW


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The part of one request that a step computes: tokens `[start, start + length)`.

    Attributes:
        pages: page ids covering `[0, start + length)`, as they were when the step was scheduled.
        samples: whether the step samples the token after the chunk (false for all but a prompt's last chunk).
    """

    request: Request
    start: int
    length: int
    pages: tuple[int, ...]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step: what is computed together. A decode batch holds one token of each request; anything else is prefill."""

    phase: Phase
    chunks: tuple[Chunk, ...]

    @property
    def num_requests(self) -> int:
        return len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def size(self) -> int:
        """The size that is looked up on the ladder: requests in decode, tokens in prefill."""
        return self.num_requests if self.phase is Phase.DECODE else self.num_tokens
