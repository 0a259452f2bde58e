"""What a request says about itself outside its body: whom it is from, and how long it may take."""

from __future__ import annotations

import math

from starlette.types import Scope

from gplan.serving.http.errors import ApiError

TIMEOUT_HEADER = "X-Request-Timeout"
_TIMEOUT_HEADER = TIMEOUT_HEADER.lower().encode()


def client_of(scope: Scope) -> str:
    """Whose turns in the queue a request takes: the address it came from. What a client says of itself is not asked:
    it could be another with every request."""
    client = scope.get("client")
    return str(client[0]) if client is not None else ""


def time_limit_of(scope: Scope, longest_s: float) -> float:
    """Seconds that a request may take.

    Args:
        longest_s: what the server allows; it holds where the request says nothing.

    Raises:
        ApiError: 400; the header is no number of seconds, or more than the server allows.
    """
    found = next((value for name, value in scope["headers"] if name == _TIMEOUT_HEADER), None)
    if found is None:
        return longest_s
    given = found.decode("latin-1")
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
