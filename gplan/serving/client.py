"""The HTTP process's side of the engine: starts it, hands it requests, and spreads what it sends.

Owns the engine process and the socket to it. Whatever the engine says last is kept: nobody waits for a dead engine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from gplan.core import SamplingParams
from gplan.errors import GplanError
from gplan.serving.protocol import (
    Abort,
    Add,
    Drain,
    Fatal,
    Idle,
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


class EngineDiedError(GplanError):
    """The engine process ended; `exit_code` is its own."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = code


class Observer(Protocol):
    """Is told what happens; seconds."""

    def on_step(self, step: StepStats) -> None: ...

    def on_idle(self, pages_used: int) -> None: ...

    def on_first_token(self, seconds: float) -> None: ...

    def on_next_token(self, seconds: float) -> None: ...

    def on_last_token(self, seconds: float) -> None: ...


@dataclass(slots=True)
class _Stream:
    """An open request; None in the queue says that the engine died."""

    submitted_at: float
    last_token_at: float | None = None
    queue: asyncio.Queue[Output | None] = field(default_factory=asyncio.Queue)


class EngineClient:
    """One engine process.

    Args:
        observer: is told of every step and every token's delay.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._folder = Path(tempfile.mkdtemp(prefix="gplan-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._endpoint = f"ipc://{self._folder / 'engine'}"
        self._socket.bind(self._endpoint)
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[str, _Stream] = {}
        self._reader: asyncio.Task[None] | None = None
        self.death: EngineDiedError | None = None
        self.died = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Requests that are with the engine."""
        return len(self._streams)

    @property
    def is_alive(self) -> bool:
        return self._reader is not None and self.death is None

    async def start(
        self, plan: bytes, checkpoint: str, accept_drift: Sequence[str], progress: Callable[[str, int, int], None]
    ) -> Ready:
        """Starts the engine and waits until it is ready.

        Raises:
            EngineDiedError: it could not serve this plan; with its message and exit code.
        """
        command = [sys.executable, "-m", WORKER, self._endpoint]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_environment())
        await self._send(pack(Start(plan, checkpoint, list(accept_drift))))
        while True:
            message = await self._receive()
            if isinstance(message, Progress):
                progress(message.stage, message.done, message.total)
            elif isinstance(message, Ready):
                self._reader = asyncio.create_task(self._read())
                return message
            elif isinstance(message, Fatal):
                self._process.wait()
                raise EngineDiedError(message.message, message.hint, message.code)

    async def submit(self, name: str, prompt: list[int], params: SamplingParams) -> asyncio.Queue[Output | None]:
        """Hands a request over; its outputs arrive in the queue, None last if the engine dies.

        Raises:
            EngineDiedError: there is no engine any more.
        """
        if self.death is not None:
            raise self.death
        opened = self._streams[name] = _Stream(time.monotonic())
        await self._send(pack(Add(name, prompt, params)))
        return opened.queue

    async def abort(self, names: Sequence[str]) -> None:
        """Gives up requests; those that ended are left alone."""
        known = [name for name in names if self._streams.pop(name, None) is not None]
        if known and self.death is None:
            await self._send(pack(Abort(known)))

    async def stop(self, within_s: float) -> int:
        """Lets the engine finish what runs, ends it, and returns its exit code. Kills it when time is up."""
        process = self._process
        if process is None:
            return 0
        if self.death is None:
            await self._send(pack(Drain()))
        try:
            code = await asyncio.wait_for(asyncio.to_thread(process.wait), within_s)
        except TimeoutError:
            process.kill()
            code = process.wait()
        return code

    def close(self) -> None:
        """Ends the engine at once if it still runs, and removes the socket."""
        if self._reader is not None:
            self._reader.cancel()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, data: bytes) -> None:
        await self._socket.send(data)

    async def _receive(self) -> Outputs | Progress | Ready | Idle | Fatal:
        """The next message; a `Fatal` of our own making where the process ended without one."""
        assert self._process is not None
        while not await self._socket.poll(200):
            code = self._process.poll()
            if code is not None and not await self._socket.poll(50):
                return Fatal(f"the engine process ended with code {code}", "See the log above.", _exit_code(code))
        return unpack_from_engine(await self._socket.recv())

    async def _read(self) -> None:
        while self.death is None:
            message = await self._receive()
            match message:
                case Outputs():
                    self._spread(message.outputs)
                    self._observer.on_step(message.stats)
                case Idle():
                    self._observer.on_idle(message.pages_used)
                case Fatal():
                    self._die(message)
                case _:
                    continue

    def _spread(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            is_last = bool(output.finish_reason)
            opened = self._streams.pop(output.id, None) if is_last else self._streams.get(output.id)
            if opened is None:
                continue
            opened.queue.put_nowait(output)
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
        for opened in self._streams.values():
            opened.queue.put_nowait(None)
        self._streams.clear()
        self.died.set()


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code or 1


def _environment() -> dict[str, str]:
    """The worker must find this very gplan, wherever it was started from."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path}
