"""What a request says about itself outside its body: whom it is from, and how long it may take."""

from __future__ import annotations

import math

from starlette.requests import Request

from gplan.serving.http.errors import ApiError

TIMEOUT_HEADER = "X-Request-Timeout"


def client_of(request: Request) -> str:
    """Whose turns in the queue a request takes: the address it came from. What a client says of itself is not asked:
    it could be another with every request."""
    return request.client.host if request.client is not None else ""


def time_limit_of(request: Request, longest_s: float) -> float:
    """Seconds that a request may take.

    Args:
        longest_s: what the server allows; it holds where the request says nothing.

    Raises:
        ApiError: 400; the header is no number of seconds, or more than the server allows.
    """
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= longest_s:
        raise ApiError(
            400,
            f"{TIMEOUT_HEADER} is a number of seconds above 0, at most {longest_s:g} here, not {given[:50]!r}",
            param=TIMEOUT_HEADER,
            code="invalid_timeout",
        )
    return seconds
