"""A step as a simulation sees it."""

from __future__ import annotations

from typing import NamedTuple

from gplan.core import Phase, Request


class Advance(NamedTuple):
    """A step that was decided and taken for done, without a batch.

    Attributes:
        size: requests in decode, tokens in prefill.
        num_requests: in the step.
        num_decodes: of these, those that decoded.
        pages: given out while the step runs.
        cached_tokens: tokens already in the KV pool that the requests which decode read.
        pairs: of the prompts' tokens, pairs of one and one before it or itself, which attention compares.
        prompts: requests that got the first token after their prompt, or after computing their tokens again.
        complete: requests that got their last token.
        preempted: requests that gave their pages back.
    """

    phase: Phase
    size: int
    num_requests: int
    num_decodes: int
    pages: int
    cached_tokens: int
    pairs: int
    prompts: list[Request]
    complete: list[Request]
    preempted: list[Request]
