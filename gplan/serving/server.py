"""`gplan serve`: the HTTP process, from a plan file to the last answered request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from formats.container import encode
from formats.plan import Plan, plan_id
from gplan.errors import GplanError
from gplan.models import locate_checkpoint, read_headers, read_spec
from gplan.serving.client import EngineClient
from gplan.serving.http.app import make_app
from gplan.serving.http.service import Service
from gplan.serving.metrics import Metrics
from gplan.serving.protocol import Ready
from gplan.serving.tokenizer import ServedTokenizer

DRAIN_S = 30.0
"""How long running requests may take to end after SIGTERM."""

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


def serve(plan: Plan, options: ServeOptions, progress: Progress, on_ready: Callable[[Ready, str], None]) -> int:
    """Serves until SIGTERM or SIGINT; a second one ends at once.

    Args:
        on_ready: called with what the engine took and the server's address when requests are answered.

    Returns:
        The exit code: 0 after a drain, the engine's own where it died.

    Raises:
        GplanError: it could not be made ready; nothing is left running.
    """
    return asyncio.run(_serve(plan, options, progress, on_ready))


async def _serve(plan: Plan, options: ServeOptions, progress: Progress, on_ready: Callable[[Ready, str], None]) -> int:
    metrics = Metrics(plan)
    client = EngineClient(metrics)
    stopping = asyncio.Event()
    _on_signals(stopping)
    try:
        starting = asyncio.create_task(client.start(encode(plan), options.checkpoint, options.accept_drift, progress))
        loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, options.checkpoint))
        ready = await _or_stopped(starting, stopping)
        if ready is None:
            return 0
        tokenizer, eos = await loading
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
        )
        return await _answer(service, options, stopping, on_ready)
    finally:
        client.close()


async def _answer(
    service: Service, options: ServeOptions, stopping: asyncio.Event, on_ready: Callable[[Ready, str], None]
) -> int:
    config = uvicorn.Config(
        make_app(service),
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(DRAIN_S),
        h11_max_incomplete_event_size=64 << 10,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started and not running.done():
        await asyncio.sleep(0.02)
    if running.done():
        raise GplanError(f"cannot listen on {options.host}:{options.port}", "Choose another --port.")
    on_ready(service.ready, f"http://{options.host}:{server.port()}")
    dying = asyncio.create_task(service.client.died.wait())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({dying, told, running}, return_when=asyncio.FIRST_COMPLETED)
    service.is_draining = True
    code = 0
    if service.client.death is not None:
        # Health is red before the end, so that whatever watches it sees why.
        await asyncio.sleep(1.0)
        code = service.client.death.exit_code
    server.should_exit = True
    await running
    stopped = await service.client.stop(DRAIN_S)
    for task in (dying, told):
        task.cancel()
    return code or stopped


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    def install_signal_handlers(self) -> None:
        return

    def capture_signals(self):  # type: ignore[no-untyped-def]
        import contextlib

        return contextlib.nullcontext()

    def port(self) -> int:
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def _on_signals(stopping: asyncio.Event) -> None:
    """The first signal drains; after it, signals act as they do by default."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)


async def _or_stopped(starting: asyncio.Task[Ready], stopping: asyncio.Event) -> Ready | None:
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    return None


def _load_tokenizer(checkpoint: str) -> tuple[ServedTokenizer, frozenset[int]]:
    spec = read_spec(checkpoint, read_headers(checkpoint))
    return ServedTokenizer(str(locate_checkpoint(checkpoint))), frozenset(spec.eos_token_ids)
