"""Entry point of the engine process: `python -m gplan.serving.worker ENDPOINT PARENT`.

Started by the HTTP process, which it talks to over one socket and does not outlive. Signals that ask for an end are for
the parent to act on. What takes long to import is imported once it is certain that the parent lives.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable

import zmq

from formats.container import decode
from formats.errors import FormatError
from gplan.errors import GplanError
from gplan.scheduling.packing import packer_of_plan
from gplan.serving.protocol import (
    Fatal,
    FromEngine,
    LedgerActual,
    Progress,
    Ready,
    Start,
    ToEngine,
    pack,
    unpack_to_engine,
)

DEVICE_FAILED = 6
"""Exit code after an error of the device."""

CRASHED = 70
"""Exit code of an engine that failed in a way that nobody foresaw."""

_PR_SET_PDEATHSIG = 1


class SocketChannel:
    """Messages over the socket to the HTTP process."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.connect(endpoint)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if wait_ms and not self._socket.poll(wait_ms):
            return messages
        while True:
            try:
                messages.append(unpack_to_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self._socket.send(pack(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def main(endpoint: str, parent: int) -> int:
    """Serves until drained or orphaned; returns the exit code.

    Args:
        parent: process id of the HTTP process.
    """
    _die_with_parent()
    if os.getppid() != parent:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = SocketChannel(endpoint)
    code = 0
    try:
        _serve(channel, parent)
    except (GplanError, FormatError) as error:
        code = getattr(error, "exit_code", 1)
        channel.send(Fatal(error.message + _where(error), error.hint, code))
    except Exception as error:
        traceback.print_exc()
        last_words = _last_words(error)
        code = last_words.code
        channel.send(last_words)
    finally:
        channel.close()
    return code


def _last_words(error: Exception) -> Fatal:
    """What is said of an error that nobody foresaw. A failure of the device is told in one line, the last of all."""
    from gplan.memory.failures import is_device_failure

    if is_device_failure(error):
        return Fatal(f"the device failed: {str(error).splitlines()[0]}{_where(error)}", "", DEVICE_FAILED)
    what = f"the engine failed: {type(error).__name__}: {error}{_where(error)}"
    return Fatal(what, "See the log above.", CRASHED)


def _where(error: Exception) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _die_with_parent() -> None:
    """Has the kernel kill this process when its parent is gone, whatever it is busy with then. Linux only; elsewhere
    the engine notices between two steps."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(channel: SocketChannel, parent: int) -> None:
    def is_orphan() -> bool:
        return os.getppid() != parent

    start = _wait_for_start(channel, is_orphan)
    if start is None:
        return
    from gplan.graphs.kv_check import CANARY_PAGES
    from gplan.serving.engine import Engine
    from gplan.serving.grammar.constraints import Constraints
    from gplan.serving.grammar.vocabulary import GrammarsAtStart
    from gplan.serving.ledger_watch import LedgerWatch
    from gplan.serving.startup import start_executor

    plan = decode(start.plan)
    grammars = GrammarsAtStart(start.checkpoint, plan.model.vocab_size)
    ready = start_executor(
        plan,
        start.checkpoint,
        lambda stage, done, total: channel.send(Progress(stage, done, total)),
        start.accept_drift,
        start.debug,
    )
    num_pages = plan.num_kv_pages - (CANARY_PAGES if start.debug.kv else 0)
    vocabulary, no_grammars = grammars.result()
    gc.collect()
    gc.freeze()
    channel.send(
        Ready(
            ledger=[LedgerActual(e.name, e.planned_bytes, e.actual_bytes) for e in ready.ledger],
            accepted_drift=[drift.sentence for drift in ready.accepted],
            advisory_drift=[drift.sentence for drift in ready.drifts if not drift.refuses],
            num_pages=num_pages - 1,
            seconds=ready.seconds,
            debug_costs=list(ready.debug_costs),
            no_grammars=no_grammars,
        )
    )
    constraints, watch = Constraints(vocabulary), LedgerWatch(ready.executor.device, ready.ledger)
    packer = packer_of_plan(plan)
    Engine(ready.executor, plan.limits, num_pages, channel, is_orphan, constraints, watch.look, packer).run()
    ready.executor.close()


def _wait_for_start(channel: SocketChannel, is_orphan: Callable[[], bool]) -> Start | None:
    while not is_orphan():
        for message in channel.receive(200):
            if isinstance(message, Start):
                return message
    return None


def run(endpoint: str, parent: int) -> None:
    """Ends the process with what `main` returns; after a failure of the device without tidying up, which may hang."""
    code = main(endpoint, parent)
    if code == DEVICE_FAILED:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
