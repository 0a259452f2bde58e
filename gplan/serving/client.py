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
from collections.abc import Callable, Sequence
from pathlib import Path

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


class EngineClient:
    """One engine process.

    Args:
        on_step: called with the figures of every step.
        on_pages: called with the pages in use when the engine falls idle.
    """

    def __init__(self, on_step: Callable[[StepStats], None], on_pages: Callable[[int], None]) -> None:
        self._on_step, self._on_pages = on_step, on_pages
        self._folder = Path(tempfile.mkdtemp(prefix="gplan-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._endpoint = f"ipc://{self._folder / 'engine'}"
        self._socket.bind(self._endpoint)
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[str, asyncio.Queue[Output | None]] = {}
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
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._streams[name] = queue
        await self._send(pack(Add(name, prompt, params)))
        return queue

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
                    self._on_step(message.stats)
                case Idle():
                    self._on_pages(message.pages_used)
                case Fatal():
                    self._die(message)
                case _:
                    continue

    def _spread(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            finished = bool(output.finish_reason)
            queue = self._streams.pop(output.id, None) if finished else self._streams.get(output.id)
            if queue is not None:
                queue.put_nowait(output)

    def _die(self, message: Fatal) -> None:
        self.death = EngineDiedError(message.message, message.hint, message.code)
        for queue in self._streams.values():
            queue.put_nowait(None)
        self._streams.clear()
        self.died.set()


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code or 1


def _environment() -> dict[str, str]:
    """The worker must find this very gplan, wherever it was started from."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path}
