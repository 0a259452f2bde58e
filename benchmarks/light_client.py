"""A client that costs little, for load on machines whose cores the server needs: streamed completions over connections
that are kept, of which only what is counted is read.

Times are of `time.perf_counter`. For everything but load, `clients` is simpler.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_EVENT, _NO_TEXT = b"data: {", b'"choices":[]'
_KEPT_BYTES = 1024
"""Of what came last: more than the last two events and what ends a chunked body take."""


@dataclass(slots=True)
class Reply:
    """What a request got.

    Attributes:
        code: the API's code of an error, also of one within a stream; empty where the answer is complete.
        tokens: generated, as the server counts them.
        arrivals: when parts of the answer came, each with one or more tokens.
    """

    code: str = ""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)


class LightClient:
    """Sends from one address of this machine.

    Args:
        host, port: of the server.
        address: that requests come from.
    """

    def __init__(self, host: str, port: int, address: str) -> None:
        self._server, self._address = (host, port), address
        self._idle: list[_Connection] = []

    async def stream(self, body: Mapping[str, Any], **headers: str) -> Reply:
        """Asks `/v1/completions`; leaving early closes the connection.

        Raises:
            OSError: the connection was lost.
        """
        connection = await self._connection()
        try:
            reply = await connection.ask(_request(body, headers))
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, *self._server, local_addr=(self._address, 0))
        return made


def _request(body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps({**body, **wanted}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


class _Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self) -> None:
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._reply, self._last, self._is_stream = Reply(), b"", False
        self._answered: asyncio.Future[Reply] | None = None

    async def ask(self, request: bytes) -> Reply:
        assert self._transport is not None
        self._reply, self._last = Reply(), b""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if not self._last:
            self._is_stream = data.startswith(b"HTTP/1.1 200")
        if _EVENT in data and _NO_TEXT not in data:
            self._reply.arrivals.append(time.perf_counter())
        self._last = (self._last + data)[-_KEPT_BYTES:]
        if self._last.endswith(b"0\r\n\r\n" if self._is_stream else b"}}"):
            self._end(self._last)

    def _end(self, last: bytes) -> None:
        if b'"error":{' in last:
            self._reply.code = _found(rb'"code":"(\w+)"', last) or "unknown"
        else:
            self._reply.tokens = int(_found(rb'"completion_tokens":(\d+)', last) or 0)
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(self._reply)


def _found(pattern: bytes, text: bytes) -> str:
    found = re.search(pattern, text)
    return "" if found is None else found[1].decode()
