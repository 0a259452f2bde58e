"""Files as the operating system has them: what cannot be read, and writes that are whole or not at all."""

from __future__ import annotations

import os
import resource
import signal
import stat
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from formats.container import MAX_FILE_BYTES, encode, read_plan, write_plan
from formats.errors import FileAccessError, InconsistentError, NotAPlanError, TooLargeError, TruncatedError
from formats.trace import Trace, TraceRequest, write_trace
from tests.formats.plans import make_plan

PLAN = make_plan()
OTHER = make_plan(max_batch=4, decode_sizes=[1, 4])
NOBODY = 65534


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """As on a full disk, a write beyond `nbytes` fails; Python sees an OSError (it ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_privileges() -> Iterator[None]:
    """Root may read and write anything; these tests need somebody who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that others may look into, for tests that give up their privileges."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.name.startswith(("pytest", "test")):
            folder.chmod(0o755)
    return tmp_path


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match=r"cannot read .*a\.gplan: does not exist"):
        read_plan(tmp_path / "a.gplan")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="is a directory"):
        read_plan(tmp_path)
    with pytest.raises(FileAccessError, match="is a directory"):
        write_plan(PLAN, tmp_path)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="not a regular file"):
        read_plan(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="not a regular file"):
        write_plan(PLAN, tmp_path / "pipe")


def test_a_device_without_end() -> None:
    with pytest.raises(FileAccessError, match="not a regular file"):
        read_plan("/dev/zero")


def test_symbolic_links(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "a.gplan")
    (tmp_path / "link").symlink_to("a.gplan")
    assert read_plan(tmp_path / "link") == PLAN
    with pytest.raises(FileAccessError, match="is a symbolic link") as caught:
        write_plan(OTHER, tmp_path / "link")
    assert "points to" in caught.value.hint
    assert read_plan(tmp_path / "a.gplan") == PLAN
    (tmp_path / "nowhere").symlink_to("gone")
    with pytest.raises(FileAccessError, match="is a symbolic link to nothing"):
        read_plan(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileAccessError, match="leads back to itself"):
        read_plan(tmp_path / "loop")


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileAccessError, match="a part of the path is not a directory"):
        read_plan(tmp_path / "file" / "a.gplan")
    with pytest.raises(FileAccessError, match="the name is too long"):
        read_plan(tmp_path / ("x" * 300))
    with pytest.raises(FileAccessError, match="null"):
        read_plan("a\0b")
    with pytest.raises(FileAccessError, match="the directory does not exist"):
        write_plan(PLAN, tmp_path / "gone" / "a.gplan")


def test_no_permission(open_folder: Path) -> None:
    path = open_folder / "a.gplan"
    write_plan(PLAN, path)
    path.chmod(0)
    with no_privileges(), pytest.raises(FileAccessError, match="permission denied"):
        read_plan(path)
    open_folder.chmod(0o555)
    try:
        with no_privileges(), pytest.raises(FileAccessError, match=r"cannot write .*permission denied") as caught:
            write_plan(PLAN, open_folder / "b.gplan")
    finally:
        open_folder.chmod(0o755)
    assert caught.value.hint
    assert os.listdir(open_folder) == ["a.gplan"]


def test_a_sparse_file_of_10_gb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    path.touch()
    os.truncate(path, 10 << 30)
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match="has 10737418240 bytes; a plan has at most"):
            read_plan(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("extra", [0, 1])
def test_the_cap_is_exact(extra: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    path.write_bytes(bytes(MAX_FILE_BYTES + extra))
    with pytest.raises(TooLargeError if extra else NotAPlanError):
        read_plan(path)


def test_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    path.write_bytes(encode(PLAN)[:100])
    with pytest.raises(TruncatedError) as caught:
        read_plan(path)
    assert caught.value.message == f"{path}: the file ends after 100 of {len(encode(PLAN))} bytes"


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    path.write_bytes(b"old")
    write_plan(PLAN, path)
    assert read_plan(path) == PLAN
    assert os.listdir(tmp_path) == ["a.gplan"]


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write_plan(PLAN, tmp_path / "a.gplan")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.gplan").stat().st_mode) == 0o644


@pytest.mark.parametrize("nbytes", [0, 1, 52, 1000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    write_plan(OTHER, path)
    with file_size_limit(nbytes), pytest.raises(FileAccessError, match="cannot write"):
        write_plan(PLAN, path)
    assert read_plan(path) == OTHER
    assert os.listdir(tmp_path) == ["a.gplan"]


def test_a_trace_is_written_as_carefully(tmp_path: Path) -> None:
    trace = Trace(requests=(TraceRequest(arrival_s=0.0, input_tokens=1, output_tokens=1),))
    with file_size_limit(10), pytest.raises(FileAccessError):
        write_trace(trace, tmp_path / "a.jsonl")
    assert os.listdir(tmp_path) == []


def test_an_inconsistent_plan_never_reaches_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    write_plan(PLAN, path)
    with pytest.raises(InconsistentError):
        write_plan(make_plan(num_kv_pages=1), path)
    assert read_plan(path) == PLAN


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_writer_that_fails_mid_way(
    call: str, failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gplan"
    write_plan(OTHER, path)

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(FileAccessError if isinstance(failure, OSError) else KeyboardInterrupt):
        write_plan(PLAN, path)
    assert read_plan(path) == OTHER
    assert os.listdir(tmp_path) == ["a.gplan"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gplan"
    write_plan(PLAN, path)
    done = threading.Event()

    def write() -> None:
        for plan in [OTHER, PLAN] * 40:
            write_plan(plan, path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        seen.append(read_plan(path))
    writer.join()
    assert {plan.limits.max_batch for plan in seen} <= {4, 8}
    assert os.listdir(tmp_path) == ["a.gplan"]


def test_a_writer_killed_mid_way_leaves_the_old_file(tmp_path: Path) -> None:
    """Killed at random moments, the name holds one whole plan or the other."""
    path = tmp_path / "a.gplan"
    write_plan(PLAN, path)
    for delay_ms in range(0, 20, 4):
        child = os.fork()
        if child == 0:
            while True:
                write_plan(OTHER, path)
        time.sleep(delay_ms / 1000)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert read_plan(path) in (PLAN, OTHER)
