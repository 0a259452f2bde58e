"""One client's connection: how long and how large the head of a request may be, and when a silent peer is given up.

The server's parser keeps what it has of a head for as long as the client likes; this bounds both. Bodies are bounded
where they are read (`bodies`), answers where they are made (`generation`).
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Bytes of request line and headers, beside those that came with the first, after which no more is read. A whole head
of that length is refused, too: see `app.MAX_HEADER_BYTES`."""

HEAD_WITHIN_S = 30.0
"""How long a client may take over the head of a request, or to send the first one."""

READ_WITHIN_S = 30
"""How long a client may leave what was sent to it unread, once the buffers between are full."""

_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 30, 10, 3


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol with bounded heads. Refusals close the connection."""

    head_within_s = HEAD_WITHIN_S
    _head_bytes = 0
    _in_head = True
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", b"the head of the request is too long")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._in_head = True
        if self._late is None:
            late = b"408 Request Timeout", b"the head of the request came too slowly"
            self._late = self.loop.call_later(self.head_within_s, self._refuse, *late)

    def _head_came(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes, why: bytes) -> None:
        if self.transport.is_closing():
            return
        body = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}' % why
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


def give_up_silent_peers(listener: socket.socket, read_within_s: int = READ_WITHIN_S) -> None:
    """Has the kernel end connections whose client reads nothing, or is no more there; connections that `listener`
    accepts inherit it. Linux; elsewhere a client that never reads keeps its connection, though never a page."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options: dict[str, int] = {
        "TCP_USER_TIMEOUT": read_within_s * 1000,
        "TCP_KEEPIDLE": _PROBE_AFTER_S,
        "TCP_KEEPINTVL": _PROBE_EVERY_S,
        "TCP_KEEPCNT": _PROBES,
    }
    for name, value in options.items():
        option: Any = getattr(socket, name, None)
        if option is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
