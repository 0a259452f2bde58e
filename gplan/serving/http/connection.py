"""One client's connection: how long and how large what it sends may be beside the bodies that are read, what it may ask
of the protocol, and when a silent peer is given up.

The server's parser keeps what it has of a head for as long as the client likes; this bounds both. Bodies are bounded
where they are read (`bodies`), answers where they are made (`generation`).
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol, runtime_checkable

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Bytes of request line and headers, beside those that came with the first, after which no more is read; the same of
what stands between and behind the pieces of a body. A whole head of that length is refused, too: see
`app.MAX_HEADER_BYTES`."""

HEAD_WITHIN_S = 30.0
"""How long a client may take over the head of a request, or to send the first one."""

MAX_UNREAD_BYTES, REST_WITHIN_S = 64 << 20, 60.0
"""What a client may go on to send of a body that nobody reads any more, because its request was refused, and for how
long: clients that send all before they read should still see why. Then the connection ends; within that, it goes on."""

PIPELINED = 16
"""Requests that may wait on a connection while one before them is answered, before no more is read: whether its client
is still there shows in reading alone."""

READ_WITHIN_S = 30
"""How long a client may leave what was sent to it unread, once the buffers between are full."""

_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 30, 10, 3
_FRAMING = (b"content-length", b"transfer-encoding")


@runtime_checkable
class Refusing(Protocol):
    """An application that can tell of some requests at once that they are refused."""

    def refuse(self, method: str, path: str, scope: Scope) -> bytes | None:
        """The whole response to a request whose head came; None where the application is to be called.

        Args:
            path: as it was sent.
            scope: has the headers and the client.
        """


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol with bounds, with one protocol only, and with a shorter way for what is refused at once: under
    overload that is most of what comes. Refusals of what is no request close the connection, others leave it open."""

    head_within_s = HEAD_WITHIN_S
    rest_within_s = REST_WITHIN_S
    _head_bytes = _unread_bytes = 0
    """Since the message or the last piece of its body began; of a body that nobody reads."""
    _in_head, _in_body, _is_repeated, _is_refused = True, False, False, False
    _late: asyncio.TimerHandle | None = None
    _refusing: Refusing | None = None
    _answered: RequestResponseCycle | None = None
    """What is being answered; `cycle` is what came last."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refusing = self.app if isinstance(self.app, Refusing) else None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        self._parse(data)
        if (self._in_head or self._in_body) and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", b"the request has too much beside its body")
        elif not (self._in_head or self._in_body or self._answered):
            self._expect_head()  # line breaks before a request

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"this is no HTTP request")

    def _go_on_without(self, rest: bytes) -> None:
        """The parser takes what follows on the head of a request that asks for another protocol for that protocol's.
        Clients that would like HTTP/2 ask so, and send the body all the same: another parser goes on with it."""
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._is_repeated = self._in_body = self.cycle.more_body = True
        self._parse(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._is_repeated = False
        if rest:
            self._parse(rest)

    def on_message_begin(self) -> None:
        if self._is_repeated:
            return
        self._head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Headers that follow on a body are not used: what was decided by those before it stays decided."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeated:
            return
        self._stop_waiting()
        self._in_head, self._in_body, self._unread_bytes = False, True, 0
        if self._answered is None and self._refuses():
            return
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        elif len(self.pipeline) < PIPELINED:
            self.flow.resume_reading()

    def _refuses(self) -> bool:
        """Answers a request that is refused at once."""
        if self._refusing is None or self.parser.should_upgrade():
            return False
        method, path = self.parser.get_method().decode(), self.url.decode("latin-1")
        response = self._refusing.refuse(method, path, dict(self.scope))
        if response is None:
            return False
        self._is_refused = True
        self.transport.write(response)
        # As for answers: a client of HTTP/1.0 would have to be told that the connection stays.
        if not self.parser.should_keep_alive() or self.parser.get_http_version() == "1.0":
            self.transport.close()
        self._wait(self.rest_within_s, self.transport.close)
        return True

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._is_refused or self.cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self.transport.close()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self._in_head:
            self._stop_waiting()
        if self._is_refused:
            self._is_refused = False
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete:
            self._wait(self.rest_within_s, self.transport.close)

    def _expect_head(self) -> None:
        self._in_head = True
        late = b"408 Request Timeout", b"the head of the request came too slowly"
        self._wait(self.head_within_s, self._refuse, *late)

    def _wait(self, seconds: float, then: Any, *arguments: bytes) -> None:
        if self._late is None:
            self._late = self.loop.call_later(seconds, then, *arguments)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes, why: bytes) -> None:
        """Ends the connection, with a reason unless an answer is under way, which it would become part of."""
        if self.transport.is_closing():
            return
        if self._answered is not None and (self.pipeline or self._answered.response_started):
            self.transport.abort()
        else:
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
