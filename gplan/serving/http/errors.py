"""Refusals in the API's own form."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.types import Receive, Scope, Send

from formats.openai import ErrorBody, ErrorResponse


class ApiError(Exception):
    """A request that is answered with an error. It is an ASGI application, too: the one that answers with it, for next
    to nothing, as under overload that is what most of them get.

    Args:
        retry_after_s: when to try again, for a 429 or 503.
        allow: the methods that a path takes, for a 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s, self.allow = retry_after_s, allow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, body = self._parts()
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def whole(self, *more: tuple[bytes, bytes]) -> bytes:
        """The bytes of an HTTP response, with `more` headers."""
        headers, body = self._parts()
        lines = [b"HTTP/1.1 %d %b" % (self.status, HTTPStatus(self.status).phrase.encode())]
        lines += [b"%b: %b" % header for header in (*headers, *more)]
        return b"\r\n".join((*lines, b"", body))

    def _parts(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        body = msgspec.json.encode(self.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        return headers, body

    def body(self) -> ErrorResponse:
        return ErrorResponse(error=ErrorBody(message=self.message, type=self._type, param=self.param, code=self.code))

    @property
    def _type(self) -> str:
        return {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
