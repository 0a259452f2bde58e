"""What an interrupt (Ctrl-C) does: it ends a command with code 130 and one word, whatever the command is doing."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130

_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


def handle_interrupts() -> None:
    """Has interrupts end this process well, unless it was started with interrupts ignored, as by `nohup` or a shell's
    `&`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; but in the middle of an import ends the process: torch is C++, through which no
    exception may pass while it is loaded, and there is nothing to put in order yet."""
    if _is_importing(frame):
        os.write(2, b"\ninterrupted\n")
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False
