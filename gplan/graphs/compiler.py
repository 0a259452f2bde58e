"""What forwards are compiled with, and the folder where compiled code is kept; compiles nothing itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gplan.errors import GplanError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
NO_COMPILER = "there is nothing here to compile with: a CPU needs g++ or clang++, a GPU Triton"
PROBE_BYTES = 1 << 16


def cache_folder() -> Path:
    """Where compiled code is kept: TORCHINDUCTOR_CACHE_DIR, or a folder of our own in the user's cache.

    Raises:
        GplanError: neither is named, and the user has no home.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gplan" / "compiled"
    except RuntimeError:
        raise GplanError("there is no home folder to keep compiled code in", f"Set {VARIABLE} to a folder.") from None


def has_compiler(device: str) -> bool:
    """Whether there is what Inductor compiles with: Triton for a GPU, a C++ compiler for a CPU."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


def require_compiler(device: str) -> None:
    """Makes sure that forwards can be compiled and their code kept. Code that an earlier start left needs both as well:
    it is loaded with locks held in the folder, and looked up by the compiler.

    Raises:
        GplanError: there is no compiler, or nothing can be written to the folder.
    """
    if not has_compiler(device):
        raise GplanError(NO_COMPILER, "Install it, or plan without --try-compile and piecewise prefill.")
    require_cache()


def require_cache() -> None:
    """
    Raises:
        GplanError: nothing can be written to the folder of compiled code.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise _unusable(folder, str(error)) from None


@contextmanager
def compiling() -> Iterator[None]:
    """While forwards are compiled.

    Raises:
        GplanError: the compiler failed; names its own words and the folder of compiled code.
    """
    from torch._inductor.exc import InductorError

    os.environ[VARIABLE] = str(cache_folder())
    try:
        yield
    except (InductorError, OSError) as error:
        raise _unusable(cache_folder(), str(error).strip().splitlines()[0]) from error


def _unusable(folder: Path, reason: str) -> GplanError:
    return GplanError(
        f"compiled code cannot be made and kept in {folder}: {reason}",
        f"Set {VARIABLE} to a folder that can be written to and has room; what lies in this one can be copied there.",
    )
