"""How answers leave: whole, or as server-sent events; and that nothing is generated for a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gplan.serving.generation import (
    Answer,
    AnswerGivenUpError,
    ClientGoneError,
    Delta,
    Generation,
    InterruptedAnswerError,
)
from gplan.serving.http.errors import ApiError

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(value: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventWriter(Protocol):
    """Writes one request's events. What is there at the same time is written together."""

    def begin(self) -> bytes: ...

    def part(self, news: Sequence[tuple[int, Delta]]) -> bytes: ...

    def end(self) -> bytes: ...


class WholeAnswer(Response):
    """Waits for the answers, then answers with JSON.

    Args:
        generation: begun; closed by this response, which must be sent at once.
    """

    def __init__(self, generation: Generation, write: Callable[[list[Answer]], msgspec.Struct]) -> None:
        super().__init__()
        self._generation, self._write = generation, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _until_gone(self._generation, receive):
            try:
                answers = await self._generation.complete()
            except ClientGoneError:
                return
            except (InterruptedAnswerError, AnswerGivenUpError) as error:
                await _failed(error)(scope, receive, send)
                return
        response = Response(_encoder.encode(self._write(answers)), media_type="application/json")
        await response(scope, receive, send)


class EventStream(Response):
    """Answers with events as the text grows.

    Args:
        generation: begun; closed by this response, which must be sent at once.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: EventWriter) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._generation, self._writer = generation, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _until_gone(self._generation, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                last = await self._write(send)
            except ClientGoneError:
                return
            except (InterruptedAnswerError, AnswerGivenUpError) as error:
                last = event(_failed(error).body())
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send) -> bytes:
        data = self._writer.begin()
        while True:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            news = await self._generation.read()
            if not news:
                return self._writer.end() + DONE
            data = self._writer.part(news)


def _failed(error: InterruptedAnswerError | AnswerGivenUpError) -> ApiError:
    if isinstance(error, AnswerGivenUpError):
        return ApiError(error.status, error.message, code=error.code)
    return ApiError(500, error.message, code="engine_down")


@contextmanager
def _until_gone(generation: Generation, receive: Receive) -> Iterator[None]:
    """Closes the generation when the block ends or the client goes, whichever is first."""
    watcher = asyncio.create_task(_close_when_gone(generation, receive))
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


async def _close_when_gone(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    generation.close()
