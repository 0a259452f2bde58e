"""`gplan serve`: the HTTP process, from a plan file to the last answered request."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn

from formats.container import encode
from formats.plan import Plan
from formats.plan_id import plan_id
from gplan.errors import GplanError
from gplan.serving.client import EngineClient
from gplan.serving.http.app import make_app
from gplan.serving.http.connection import Connection, give_up_silent_peers
from gplan.serving.http.service import Service
from gplan.serving.metrics import Metrics
from gplan.serving.protocol import NO_DEBUG, Debug, Ready
from gplan.serving.tokenizer import ServedTokenizer

DRAIN_S = 30.0
"""How long running requests may take to end after SIGTERM."""

LAST_BYTES_S = 5
"""How long connections may then take over what was already written to them."""

RED_S = 1.0
"""How long health answers that the engine died before the server ends."""

T = TypeVar("T")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How a plan is served; nothing here changes what was planned."""

    checkpoint: str
    host: str = "127.0.0.1"
    port: int = 8000
    accept_drift: Sequence[str] = ()
    api_key: str | None = None
    model_name: str | None = None
    debug: Debug = NO_DEBUG
    plan_path: str = "PLAN"
    request_timeout_s: float = 600.0


def serve(
    plan: Plan,
    options: ServeOptions,
    progress: Progress,
    on_ready: Callable[[Ready, str], None],
    on_stop: Callable[[int], None] = lambda num_open: None,
) -> int:
    """Serves until SIGTERM or SIGINT; a second one ends at once.

    Args:
        on_ready: called with what the engine took and the server's address when requests are answered.
        on_stop: called when told to stop, with the number of answers that are still to be finished.

    Returns:
        The exit code: 0 after a drain.

    Raises:
        GplanError: it could not be made ready, or the engine died; nothing is left running.
        KeyboardInterrupt: SIGINT before it was ready.
    """
    return asyncio.run(_serve(plan, options, progress, on_ready, on_stop))


async def _serve(
    plan: Plan,
    options: ServeOptions,
    progress: Progress,
    on_ready: Callable[[Ready, str], None],
    on_stop: Callable[[int], None],
) -> int:
    _allow_many_connections()
    # Before anything slow, so that a port that is taken is known at once; connections are refused until ready.
    listener = _bind(options.host, options.port)
    metrics = Metrics(plan, path=options.plan_path, debug_graphs=options.debug.graphs)
    client = EngineClient(metrics)
    stopping = _Stopping()
    stopping.listen()
    try:
        starting = client.start(encode(plan), options.checkpoint, options.accept_drift, progress, options.debug)
        loading = _in_daemon(lambda: _load_tokenizer(options.checkpoint))
        started = await _or_stopped(asyncio.gather(starting, loading), stopping)
        if started is None:
            if stopping.told_by is signal.SIGINT:
                raise KeyboardInterrupt
            return 0
        ready, (tokenizer, eos) = started
        metrics.on_ledger(ready.ledger, ())
        service = Service(
            plan=plan,
            plan_id=plan_id(plan),
            model=options.model_name or Path(plan.model.source).name or "model",
            tokenizer=tokenizer,
            eos_token_ids=eos,
            client=client,
            metrics=metrics,
            ready=ready,
            api_key=options.api_key,
            debug=options.debug,
            request_timeout_s=options.request_timeout_s,
        )
        return await _answer(service, listener, stopping, on_ready, on_stop)
    finally:
        client.close()
        listener.close()


async def _answer(
    service: Service,
    listener: socket.socket,
    stopping: asyncio.Event,
    on_ready: Callable[[Ready, str], None],
    on_stop: Callable[[int], None],
) -> int:
    server = _Server(
        uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=LAST_BYTES_S,
            http=Connection,
            ws="none",
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.02)
    if not server.started:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, running.exception() or "it ended")
    on_ready(service.ready, _url(listener))
    dying = asyncio.create_task(service.client.died.wait())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({dying, told, running}, return_when=asyncio.FIRST_COMPLETED)
    service.is_draining = True
    if service.client.death is not None:
        # Health is red before the end, so that whatever watches it sees why.
        await asyncio.sleep(RED_S)
    else:
        on_stop(service.seats.taken)
        # Still listening, so that health answers that the server is stopping.
        await service.seats.wait_until_empty(DRAIN_S)
    server.should_exit = True
    await running
    for task in (dying, told):
        task.cancel()
    if service.client.death is not None:
        raise service.client.death
    return await service.client.stop(DRAIN_S)


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which many systems allow few unless asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it does not listen yet.

    Raises:
        GplanError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        give_up_silent_peers(listener)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, why: object) -> GplanError:
    return GplanError(
        f"cannot listen on {host} port {port}: {why}", "Choose another --host or --port; 0 is a free one."
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class _Stopping(asyncio.Event):
    """Set by the first signal, which drains; after it, signals act as they do by default."""

    told_by: signal.Signals | None = None

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told, number)

    def _told(self, told_by: signal.Signals) -> None:
        self.told_by = told_by
        self.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


def _in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a thread that nobody waits for when the server is told to stop first: an import that was begun
    cannot be ended."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return result


async def _or_stopped(work: asyncio.Future[T], stopping: asyncio.Event) -> T | None:
    """The result of `work`, or None if told to stop first."""
    told = asyncio.create_task(stopping.wait())
    waiting: list[asyncio.Future[Any]] = [work, told]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if work.done():
        return work.result()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    return None


def _load_tokenizer(checkpoint: str) -> tuple[ServedTokenizer, frozenset[int]]:
    # Imports torch, which takes seconds: while the engine does the same, and not before a port is known to be free.
    from gplan.models import locate_checkpoint, read_headers, read_spec

    spec = read_spec(checkpoint, read_headers(checkpoint))
    return ServedTokenizer(str(locate_checkpoint(checkpoint))), frozenset(spec.eos_token_ids)
