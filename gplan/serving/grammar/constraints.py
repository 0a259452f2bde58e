"""What may follow in each running answer that has a grammar.

Grammars are compiled in a thread: their requests are scheduled once that is done, and nobody waits for them. A mask for
the next token needs the tokens before it. Where steps are kept in flight, the forward pass of the next one is on its
way before the host has read them, so they are read, and the mask made, while it runs: no row is held back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from gplan.core import Batch, Chunk, Request
from gplan.graphs.masking import TokenMask
from gplan.serving.grammar.library import GrammarError, GrammarVocabulary

_REMEMBERED = 32
"""Grammars kept compiled."""

_EVERYTHING = -1


@dataclass(slots=True)
class _Guided:
    """One answer under way.

    Attributes:
        num_taken: tokens of the answer that the matcher has seen.
        has_ended: its last token was drawn.
    """

    request: Request
    matcher: Any
    num_taken: int = 0
    has_ended: bool = False


class Constraints:
    """Grammars of the engine's requests. All calls come from the engine's thread.

    Args:
        vocabulary: None where no grammar can be served; then no request has one.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._guided: dict[str, _Guided] = {}
        self._compiling: list[tuple[Request, Future[Any]]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._failed: list[tuple[Request, str]] = []

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def begin(self, request: Request) -> None:
        """Starts to compile a request's grammar."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiling.append((request, self._thread.submit(self._matcher, request.params.grammar)))

    def take_compiled(self) -> list[Request]:
        """Requests that may be scheduled now. Those whose grammar cannot be used are among the failed instead."""
        ready = []
        for request, future in [entry for entry in self._compiling if entry[1].done()]:
            self._compiling.remove((request, future))
            try:
                self._guided[request.id] = _Guided(request, future.result())
            except GrammarError as error:
                self._failed.append((request, error.message))
            else:
                ready.append(request)
        return ready

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests that cannot go on, and why. The caller ends them."""
        failed, self._failed = self._failed, []
        return failed

    def forget(self, request_id: str) -> None:
        """Of a request that ended, however it did."""
        self._guided.pop(request_id, None)
        for request, future in self._compiling:
            if request.id == request_id:
                future.cancel()
        self._compiling = [entry for entry in self._compiling if entry[0].id != request_id]

    def applies_to(self, batch: Batch) -> bool:
        """Whether a mask is needed to draw a batch's tokens."""
        return bool(self._guided) and any(c.samples and c.request.params.grammar for c in batch.chunks)

    def mask(self, batch: Batch, flown: Iterable[tuple[Batch, Sequence[int]]]) -> TokenMask | None:
        """What may follow each chunk that samples.

        Args:
            flown: steps that were read but that the scheduler has not taken in yet, in order, with their tokens.
        """
        assert self._vocabulary is not None
        drawn = _tokens_by_request(flown)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        guided = [(index, found) for index, chunk in enumerate(sampling) if (found := self._guided_of(chunk, drawn))]
        if not guided:
            return None
        bits = self._vocabulary.masks([one.matcher for _, one in guided])
        for row, (_, one) in enumerate(guided):
            if one.matcher.is_error():
                self._fail(one)
                bits[row] = _EVERYTHING
        return TokenMask(tuple(index for index, _ in guided), torch.from_numpy(bits))

    def _guided_of(self, chunk: Chunk, drawn: dict[str, list[int]]) -> _Guided | None:
        """The answer that a chunk's token belongs to, its matcher where the chunk ends; None where anything may follow,
        as it does where nothing is to follow any more."""
        one = self._guided.get(chunk.request.id)
        if one is None or one.has_ended:
            return None
        request = chunk.request
        ahead = request.tokens[request.prompt_len + one.num_taken :] + drawn.get(request.id, [])
        for token in ahead:
            if token in request.params.stop_token_ids:
                one.has_ended = True
                return None
            one.num_taken += 1
            if not one.matcher.consume_token(token):
                self._fail(one)
                return None
        assert one.num_taken == chunk.end - request.prompt_len, "a grammar has not seen the tokens before its next"
        return one

    def _fail(self, one: _Guided) -> None:
        one.has_ended = True
        self._failed.append((one.request, f"its grammar: {one.matcher.get_error().strip()[:300]}"))

    def _matcher(self, grammar: str) -> Any:
        """Runs in the thread, which alone touches what is compiled."""
        assert self._vocabulary is not None
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._vocabulary.matcher(grammar)
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.deep_copy()


def _tokens_by_request(flown: Iterable[tuple[Batch, Sequence[int]]]) -> dict[str, list[int]]:
    drawn: dict[str, list[int]] = {}
    for batch, tokens in flown:
        sampling = [chunk.request.id for chunk in batch.chunks if chunk.samples]
        for request_id, token in zip(sampling, tokens, strict=True):
            drawn.setdefault(request_id, []).append(token)
    return drawn
