"""Routes of the server, and what holds for every request: access, request ids, errors in the API's form."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from formats.explain import shorten
from formats.openai import ModelCard, ModelList
from formats.openai_rules import decode_detokenize, decode_tokenize
from formats.plan import PhasePlan, bucket_key
from gplan.serving.client import EngineDiedError
from gplan.serving.http.bodies import decode_body
from gplan.serving.http.chat import chat_completions
from gplan.serving.http.completions import completions
from gplan.serving.http.errors import ApiError
from gplan.serving.http.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]
Headers = Sequence[tuple[bytes, bytes]]

log = logging.getLogger("gplan.http")

MAX_HEADER_BYTES = 32 << 10
CLIENT_GONE = 499
"""Status in log and metrics of a request whose client left before it was answered."""


def make_app(service: Service) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application of one served plan."""
    routes = [
        _route(service, "/v1/completions", completions, "POST"),
        _route(service, "/v1/chat/completions", chat_completions, "POST"),
        _route(service, "/v1/models", _models, "GET"),
        _route(service, "/v1/models/{name:path}", _model, "GET"),
        _route(service, "/tokenize", _tokenize, "POST"),
        _route(service, "/detokenize", _detokenize, "POST"),
        _route(service, "/health", _health, "GET"),
        _route(service, "/metrics", _metrics, "GET"),
        _route(service, "/server_info", _server_info, "GET"),
    ]
    app = Starlette(routes=routes, exception_handlers=_HANDLERS)
    # A redirect would send the client to wherever it says in Host that it is.
    app.router.redirect_slashes = False
    return _Observed(app, service)


class _Observed:
    """Around every request: the key, an id, a line in the log, a count. The log never holds a prompt or an answer."""

    def __init__(self, app: Starlette, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), CLIENT_GONE
        request_id = _request_id(scope["headers"])

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            self._check(scope["method"], scope["path"], scope)
        except ApiError as refusal:
            await refusal(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)
        finally:
            self._note(scope["method"], scope["path"], status, request_id, time.monotonic() - started)

    def refuse(self, method: str, path: str, scope: Scope) -> bytes | None:
        """As `connection.Refusing`."""
        if path not in _ANSWERING:
            return None
        started = time.monotonic()
        try:
            self._check(method, path, scope)
        except ApiError as refusal:
            request_id = _request_id(scope["headers"])
            self._note(method, path, refusal.status, request_id, time.monotonic() - started)
            return refusal.whole((b"x-request-id", request_id))
        return None

    def _check(self, method: str, path: str, scope: Scope) -> None:
        """What can be told before anything else is done for a request.

        Raises:
            ApiError: 431, 401, or as `Service.refuse_early`.
        """
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
        if self._service.api_key is not None and path != "/health":
            self._check_key(self._service.api_key, scope["headers"])
        if path in _ANSWERING and method == "POST":
            self._service.refuse_early(scope)

    def _check_key(self, key: str, headers: Headers) -> None:
        # Of digests, so that not even the key's length shows in the time it takes.
        given = sha256(_header(headers, b"authorization")).digest()
        wanted = sha256(b"Bearer " + key.encode()).digest()
        if not hmac.compare_digest(given, wanted):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    def _note(self, method: str, path: str, status: int, request_id: bytes, seconds: float) -> None:
        self._service.metrics.requests.labels(path if path in _COUNTED else "other", str(status)).inc()
        if log.isEnabledFor(logging.INFO):
            line = {
                "time": time.time(),
                "request_id": request_id.decode(),
                "method": method,
                "path": path[:200],
                "status": status,
                "seconds": round(seconds, 6),
            }
            log.info(msgspec.json.encode(line).decode())


_ANSWERING = frozenset({"/v1/completions", "/v1/chat/completions"})
_COUNTED = _ANSWERING | {"/v1/models", "/tokenize", "/detokenize"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def _header(headers: Headers, wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def _request_id(headers: Headers) -> bytes:
    """The client's own id, where it is a harmless one."""
    given = _header(headers, b"x-request-id")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _route(service: Service, path: str, handler: Handler, method: str) -> Route:
    async def endpoint(request: Request) -> ASGIApp:
        try:
            return await handler(service, request)
        except ApiError as error:
            return error
        except EngineDiedError as error:
            return ApiError(503, error.message, code="engine_down")

    return Route(path, endpoint, methods=[method])


async def _our_bug(request: Request, error: Exception) -> ASGIApp:
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")


async def _no_such_path(request: Request, error: Exception) -> ASGIApp:
    return ApiError(404, f"there is no {shorten(request.scope['path'])} here", code="unknown_url")


async def _wrong_method(request: Request, error: Exception) -> ASGIApp:
    allow = (getattr(error, "headers", None) or {}).get("Allow")
    what = f"{request.scope['path']} takes {allow}, not {request.method}"
    return ApiError(405, what, code="method_not_allowed", allow=allow)


_HANDLERS: Any = {404: _no_such_path, 405: _wrong_method, Exception: _our_bug}


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# Models and tokens --------------------------------------------------------------------------------------------------


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.model, created=service.started_at, max_model_len=service.plan.limits.max_len)


async def _models(service: Service, request: Request) -> Response:
    return _json(ModelList(data=[_card(service)]))


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["name"])
    return _json(_card(service))


async def _tokenize(service: Service, request: Request) -> Response:
    body = await decode_body(request, decode_tokenize)
    service.check_model(body.model or service.model)
    tokens = await service.aside(service.tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens)
    return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.plan.limits.max_len})


async def _detokenize(service: Service, request: Request) -> Response:
    body = await decode_body(request, decode_detokenize)
    service.check_model(body.model or service.model)
    vocab_size = service.plan.model.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400, f"token id {wrong} is outside the vocabulary of {vocab_size}", param="tokens", code="invalid_token_id"
        )
    return _json({"prompt": await service.aside(service.tokenizer.decode, body.tokens)})


# State --------------------------------------------------------------------------------------------------------------


async def _health(service: Service, request: Request) -> Response:
    if not service.client.is_alive:
        death = service.client.death
        raise ApiError(503, "the engine is not running" if death is None else death.message, code="engine_down")
    if service.is_draining:
        raise ApiError(503, "the server is stopping", code="stopping")
    return _json({"status": "ok"})


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _server_info(service: Service, request: Request) -> Response:
    plan, ready = service.plan, service.ready
    return _json(
        {
            "plan_id": service.plan_id,
            "model": service.model,
            "kernels": plan.kernels,
            "dtype": plan.dtype,
            "limits": plan.limits,
            "decode": _phase(plan.decode),
            "prefill": _phase(plan.prefill),
            "kv_pages": plan.num_kv_pages - 1,
            "kv_tokens": (plan.num_kv_pages - 1) * plan.limits.page_size,
            "ledger": ready.ledger,
            "accepted_drift": ready.accepted_drift,
            "advisory_drift": ready.advisory_drift,
            "debug": {
                "graphs": service.debug.graphs,
                "addresses": service.debug.addresses,
                "kv": service.debug.kv,
                "costs": ready.debug_costs,
            },
            "engine_start_seconds": ready.seconds,
        }
    )


def _phase(phase: PhasePlan) -> dict[str, Any]:
    return {
        "backend": phase.backend,
        "ladder": [bucket.size for bucket in phase.base_ladder],
        "keys": [bucket_key(phase.phase, bucket) for bucket in phase.ladder],
        "max_size": phase.max_size,
        "eager_sizes": phase.eager_sizes,
        "padding_cap": phase.padding_cap,
    }
