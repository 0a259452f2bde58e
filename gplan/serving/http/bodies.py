"""Bodies of requests: read no further than allowed, and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from formats.errors import FormatError
from gplan.serving.http.errors import ApiError

R = TypeVar("R")

MAX_BODY_BYTES = 4 << 20
BODY_WITHIN_S = 60.0


async def decode_body(request: Request, decode: Callable[[bytes], R]) -> R:
    """Reads and decodes a JSON body.

    Raises:
        ApiError: 400 with the parameter that is wrong, 408, 413, or 415.
    """
    _check_headers(request)
    try:
        body = await asyncio.wait_for(_read_body(request), BODY_WITHIN_S)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_WITHIN_S:.0f} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ends too early") from None
    try:
        return decode(body)
    except FormatError as error:
        code = getattr(error, "code", None)
        raise ApiError(400, error.message, param=error.path or None, code=code) from None


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        raise ApiError(415, f"the body must be application/json, not {kind[:100]}", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"the body must not be encoded: {encoding[:100]}", code="unsupported_content_encoding")


async def _read_body(request: Request) -> bytes:
    """The whole body, refused as soon as it is too long."""
    too_long = ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_long
    return bytes(body)
