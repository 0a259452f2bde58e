"""The HTTP process's side of the engine: starts it, hands it requests, and spreads what it sends.

Owns the engine process and the socket to it. Whatever the engine says last is kept: nobody waits for a dead engine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from gplan.core import SamplingParams
from gplan.errors import GplanError
from gplan.serving.protocol import (
    NO_DEBUG,
    Abort,
    Add,
    Debug,
    Drain,
    Failed,
    Fatal,
    Idle,
    LedgerActual,
    LedgerNow,
    Message,
    Output,
    Outputs,
    Progress,
    Ready,
    Start,
    StepStats,
    pack,
    unpack_from_engine,
)

WORKER = "gplan.serving.worker"

_STDERR = 2
_LAST_WORDS_S = 0.1
"""After the process ended, how long what it sent before may still be on its way."""


class EngineDiedError(GplanError):
    """The engine process ended; `exit_code` is its own."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = code


class Observer(Protocol):
    """Is told what happens; seconds."""

    def on_step(self, step: StepStats) -> None: ...

    def on_idle(self, pages_used: int, pages_cached: int) -> None: ...

    def on_ledger(self, rows: Sequence[LedgerActual], overrun: Sequence[str]) -> None: ...

    def on_first_token(self, seconds: float) -> None: ...

    def on_next_token(self, seconds: float) -> None: ...

    def on_last_token(self, seconds: float) -> None: ...


@dataclass(slots=True)
class _Stream:
    """An open request."""

    take: Callable[[Output], None]
    interrupt: Callable[[str], None]
    submitted_at: float
    last_token_at: float | None = None


class EngineClient:
    """One engine process.

    Args:
        observer: is told of every step and every token's delay.

    Raises:
        GplanError: there is no folder for its socket.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._folder = _temporary_folder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._endpoint = f"ipc://{self._folder / 'engine'}"
        self._bind()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[str, _Stream] = {}
        self._exit: asyncio.Future[int] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.is_ready = False
        self.death: EngineDiedError | None = None
        self.died = asyncio.Event()

    def _bind(self) -> None:
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._remove_folder()
            raise GplanError(
                f"cannot make a socket in {self._folder}: {error}", "Set TMPDIR to a short path that can be written to."
            ) from error

    @property
    def is_alive(self) -> bool:
        return self.is_ready and self.death is None

    async def start(
        self,
        plan: bytes,
        checkpoint: str,
        accept_drift: Sequence[str],
        progress: Callable[[str, int, int], None],
        debug: Debug = NO_DEBUG,
    ) -> Ready:
        """Starts the engine and waits until it is ready.

        Raises:
            EngineDiedError: it could not serve this plan; with its message and exit code.
        """
        command = [sys.executable, "-P", "-m", WORKER, self._endpoint, str(os.getpid())]
        # A process group of its own: ctrl-C in a terminal is for this process to act on.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=_STDERR, env=_environment(), process_group=0
        )
        loop = asyncio.get_running_loop()
        self._exit = loop.run_in_executor(None, self._process.wait)
        self._watcher = asyncio.create_task(self._watch(self._exit))
        ready: asyncio.Future[Ready] = loop.create_future()
        self._reader = asyncio.create_task(self._read(progress, ready))
        self._send(Start(plan, checkpoint, list(accept_drift), debug))
        died = asyncio.create_task(self.died.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [ready, died]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
        if self.death is not None:
            raise self.death
        self.is_ready = True
        return ready.result()

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        take: Callable[[Output], None],
        interrupt: Callable[[str], None],
        client: str = "",
    ) -> None:
        """Hands a request over.

        Args:
            client: whom it is for.
            take: called with each of its outputs as it arrives.
            interrupt: called if the last output will not come: with the reason where it is the request's own, with
                nothing where the engine died.

        Raises:
            EngineDiedError: there is no engine any more.
        """
        if self.death is not None:
            raise self.death
        self._streams[name] = _Stream(take, interrupt, time.monotonic())
        self._send(Add(name, list(prompt), params, client))

    def abort(self, names: Sequence[str]) -> None:
        """Gives up requests; those that ended are left alone."""
        known = [name for name in names if self._streams.pop(name, None) is not None]
        if known and self.death is None:
            self._send(Abort(known))

    async def stop(self, within_s: float) -> int:
        """Lets the engine finish what runs, ends it, and returns its exit code. Kills it when time is up."""
        process = self._process
        if process is None or self._exit is None:
            return 0
        if self.death is None:
            self._send(Drain())
        try:
            return await asyncio.wait_for(asyncio.shield(self._exit), within_s)
        except TimeoutError:
            process.kill()
            return await self._exit

    def close(self) -> None:
        """Ends the engine at once if it still runs, and removes the socket."""
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._context.destroy(linger=0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: Message) -> None:
        # Sends at once, or queues without bound: the future that it returns says nothing more.
        self._socket.send(pack(message))

    async def _read(self, progress: Callable[[str, int, int], None], ready: asyncio.Future[Ready]) -> None:
        try:
            await self._follow(progress, ready)
        except Exception as error:
            traceback.print_exc()
            self._die(Fatal(f"the server failed: {type(error).__name__}: {error}", "See the log above.", 1))

    async def _follow(self, progress: Callable[[str, int, int], None], ready: asyncio.Future[Ready]) -> None:
        while self.death is None:
            message = unpack_from_engine(await self._socket.recv())
            match message:
                case Outputs():
                    self._spread(message.outputs)
                    self._observer.on_step(message.stats)
                case Idle():
                    self._observer.on_idle(message.pages_used, message.pages_cached)
                case LedgerNow():
                    self._observer.on_ledger(message.rows, message.overrun)
                case Progress():
                    progress(message.stage, message.done, message.total)
                case Ready():
                    self._remove_folder()
                    ready.set_result(message)
                case Failed():
                    opened = self._streams.pop(message.id, None)
                    if opened is not None:
                        opened.interrupt(message.message)
                case Fatal():
                    self._die(message)

    async def _watch(self, exited: asyncio.Future[int]) -> None:
        """Turns the end of the process into a death, unless the engine's own last words did so first."""
        code = await exited
        await asyncio.sleep(_LAST_WORDS_S)
        if self.death is None:
            self._die(Fatal(f"the engine process {_ending(code)}", "See the log above.", _exit_code(code)))

    def _spread(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            is_last = bool(output.finish_reason)
            opened = self._streams.pop(output.id, None) if is_last else self._streams.get(output.id)
            if opened is None:
                continue
            opened.take(output)
            if output.tokens:
                if opened.last_token_at is None:
                    self._observer.on_first_token(now - opened.submitted_at)
                else:
                    self._observer.on_next_token(now - opened.last_token_at)
                opened.last_token_at = now
            if is_last:
                self._observer.on_last_token(now - opened.submitted_at)

    def _die(self, message: Fatal) -> None:
        self.death = EngineDiedError(message.message, message.hint, message.code)
        lost = list(self._streams.values())
        self._streams.clear()
        for opened in lost:
            opened.interrupt("")
        self.died.set()


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="gplan-"))
    except OSError as error:
        raise GplanError(
            f"cannot make a temporary folder: {error}", "Set TMPDIR to a short path that can be written to."
        ) from error


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code or 1


def _environment() -> dict[str, str]:
    """The worker must find this very gplan, wherever it was started from."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path}
