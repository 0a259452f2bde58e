"""Refusals in the API's own form."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from formats.openai import ErrorBody, ErrorResponse


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        retry_after_s: when to try again, for a 429 or 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return Response(msgspec.json.encode(self.body()), self.status, headers, "application/json")

    def body(self) -> ErrorResponse:
        return ErrorResponse(error=ErrorBody(message=self.message, type=self._type, param=self.param, code=self.code))

    @property
    def _type(self) -> str:
        return {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
