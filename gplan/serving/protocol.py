"""Messages between the HTTP process and the engine process, and how they are packed.

All outputs of a step travel in one message, so that the engine's cost per token stays small.
"""

from __future__ import annotations

import msgspec

from gplan.core import SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what is sent."""


class Debug(msgspec.Struct, frozen=True):
    """What serve checks beyond what it has to.

    Attributes:
        graphs: run every captured function eagerly, through the same runner, buffers and metadata.
        addresses: before every replay, check the addresses that its graph refers to.
        kv: check what every step reads and writes of the KV pool, and that canary pages stay as they are.
    """

    graphs: bool = False
    addresses: bool = False
    kv: bool = False


NO_DEBUG = Debug()


# To the engine ------------------------------------------------------------------------------------------------------


class Start(Message, frozen=True, array_like=True, tag=True):
    """The first message: what to serve. `plan` is the bytes of a plan file."""

    plan: bytes
    checkpoint: str
    accept_drift: list[str]
    debug: Debug


class Add(Message, frozen=True, array_like=True, tag=True):
    """A request to serve; `params.logit_bias` and stop tokens are already validated. `client` is whom it is for."""

    id: str
    prompt: list[int]
    params: SamplingParams
    client: str = ""


class Abort(Message, frozen=True, array_like=True, tag=True):
    """Requests that nobody waits for any more."""

    ids: list[str]


class Drain(Message, frozen=True, array_like=True, tag=True):
    """Finish what runs, then end."""


ToEngine = Start | Add | Abort | Drain


# From the engine ----------------------------------------------------------------------------------------------------


TokenScore = tuple[float, list[tuple[int, float]]]
"""Log probability of a token, and the likeliest (token, log probability) at its place."""


class Output(Message, frozen=True, array_like=True, tag=True):
    """Tokens of one request from one step.

    Attributes:
        logprobs: per token (log probability, likeliest (token, log probability) pairs), where asked for.
        finish_reason: `stop` or `length` where the request ended with these tokens, else empty.
        prompt_logprobs: the same of tokens of the prompt, from position `prompt_start` on. Some may come twice.
    """

    id: str
    tokens: list[int]
    logprobs: list[TokenScore]
    finish_reason: str
    prompt_logprobs: list[TokenScore] = []
    prompt_start: int = 0


class StepStats(Message, frozen=True, array_like=True, tag=True):
    """One step, for the metrics. `key` is empty where it ran eagerly, and `reason` where it was replayed; the last two
    are of replays that were timed.

    `preemptions`, `prefix_...` and `pages_evicted` count since the start; `pages_used` are those that requests hold,
    `pages_cached` those that none holds and another could begin with.
    """

    phase: str
    size: int
    key: str
    reason: str
    padding_rows: int
    elapsed_s: float
    num_running: int
    num_waiting: int
    pages_used: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    prefix_lookups: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    pages_evicted: int = 0
    pages_cached: int = 0
    replay_us: float | None = None
    cached_tokens: int = 0


class Outputs(Message, frozen=True, array_like=True, tag=True):
    """What one step gave, and how it went."""

    outputs: list[Output]
    stats: StepStats


class Progress(Message, frozen=True, array_like=True, tag=True):
    """How far start-up has come."""

    stage: str
    done: int
    total: int


class LedgerActual(msgspec.Struct, frozen=True):
    """One ledger row at ready; `actual_bytes` is None where nothing was booked."""

    name: str
    planned_bytes: int
    actual_bytes: int | None


class Ready(Message, frozen=True, array_like=True, tag=True):
    """The engine serves from now on.

    Attributes:
        num_pages: pages that requests may hold.
        accepted_drift, advisory_drift: sentences on drift that the user accepted, and on drift that needs no accepting.
        debug_costs: sentences on what the checks that were asked for cost.
        no_grammars: why no answer can follow a grammar; empty where it can.
    """

    ledger: list[LedgerActual]
    accepted_drift: list[str]
    advisory_drift: list[str]
    num_pages: int
    seconds: float
    debug_costs: list[str]
    no_grammars: str


class Idle(Message, frozen=True, array_like=True, tag=True):
    """No step is under way and nothing waits."""

    pages_used: int
    pages_cached: int


class Failed(Message, frozen=True, array_like=True, tag=True):
    """One request cannot go on, for a reason of its own; nothing more of it will come."""

    id: str
    message: str


class LedgerNow(Message, frozen=True, array_like=True, tag=True):
    """Rows of the ledger that can grow while serving.

    Attributes:
        overrun: names of those beyond tolerance.
    """

    rows: list[LedgerActual]
    overrun: list[str]


class Fatal(Message, frozen=True, array_like=True, tag=True):
    """The engine ends; its exit code will be `code`."""

    message: str
    hint: str
    code: int


FromEngine = Outputs | Progress | Ready | Idle | Failed | LedgerNow | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def pack(message: Message) -> bytes:
    return _encoder.encode(message)


def unpack_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def unpack_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)
