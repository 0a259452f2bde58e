"""Server-sent events: several answers of one request, merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from gplan.serving.client import EngineClient
from gplan.serving.generation import Delta, InterruptedAnswerError, Job, stream
from gplan.serving.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(value: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


async def merged(
    client: EngineClient, vocabulary: Vocabulary, jobs: Sequence[Job]
) -> AsyncIterator[list[tuple[int, Delta]]]:
    """Deltas of all answers as they come, with the index of their job; those that are there together come together.

    Raises:
        InterruptedAnswerError: the engine died.
    """
    queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    async def follow(index: int, job: Job) -> None:
        try:
            async for delta in stream(client, vocabulary, job):
                queue.put_nowait((index, delta))
        except InterruptedAnswerError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(index, job)) for index, job in enumerate(jobs)]
    unfinished = len(jobs)
    try:
        while unfinished:
            entries = [await queue.get()]
            while not queue.empty():
                entries.append(queue.get_nowait())
            found = []
            for entry in entries:
                if isinstance(entry, Exception):
                    raise entry
                unfinished -= entry[1].finish_reason is not None
                found.append(entry)
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
