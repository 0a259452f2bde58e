"""Reading and writing whole files with care: sizes are known before anything is read, a write is all or nothing."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from formats.errors import FileAccessError, TooLargeError

_REASONS = {
    errno.ENOENT: "does not exist",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EISDIR: "is a directory",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ELOOP: "is a symbolic link that leads back to itself",
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "larger than files may be here",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
}

_HINTS = {"read": "Check the path and its permissions.", "write": "Write to another place, or make this one writable."}


def read_bounded(path: str | os.PathLike[str], max_bytes: int, what: str) -> bytes:
    """Reads a regular file that may have at most `max_bytes`; symbolic links are followed.

    The size is checked before anything is read, and again by what is read: a file that grows meanwhile is refused.

    Args:
        what: what the file should be, for messages: `a plan`.

    Raises:
        FileAccessError: missing, not a regular file (a pipe or a device would never end), or not readable.
        TooLargeError: more bytes than allowed.
    """
    with _os_errors(path, "read"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
                raise FileAccessError(f"cannot read {os.fspath(path)}: is {kind}", f"Give the path of {what}.")
            if info.st_size > max_bytes:
                raise _too_large(path, info.st_size, max_bytes, what)
            data = file.read(info.st_size + 1)
    if len(data) > max_bytes:
        raise _too_large(path, len(data), max_bytes, what)
    return data


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file so that it is there whole or not at all; on failure an older file at `path` is intact.

    The bytes go to a temporary file in the same directory, are flushed to the disk, and take the name in one rename.

    Raises:
        FileAccessError: names the reason. A symbolic link or anything else but a regular file is not replaced.
    """
    target = Path(path)
    with _os_errors(path, "write"):
        _refuse_to_replace(target)
        temporary = _temporary_beside(target)
        try:
            descriptor = os.open(temporary, _NEW_FILE, 0o666)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    _flush_directory(target.parent)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Finds out whether `write_atomic` could write there, for those who have long work to do before they write.

    Raises:
        FileAccessError: as `write_atomic` would.
    """
    target = Path(path)
    with _os_errors(path, "write"):
        _refuse_to_replace(target)
        temporary = _temporary_beside(target)
        os.close(os.open(temporary, _NEW_FILE, 0o666))
        temporary.unlink()


_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _temporary_beside(target: Path) -> Path:
    return target.parent / f".gplan-{secrets.token_hex(8)}.tmp"


def _refuse_to_replace(target: Path) -> None:
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise FileAccessError(f"cannot write {target}: is a symbolic link", "Give the path of the file it points to.")
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileAccessError(f"cannot write {target}: is {kind}", "Give the path of a file.")


def _flush_directory(directory: Path) -> None:
    """Makes the rename itself survive a power cut; a file system that cannot is no reason to fail."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _os_errors(path: str | os.PathLike[str], verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        if error.errno == errno.ENOENT and (Path(path).is_symlink() or verb == "write"):
            reason = "the directory does not exist" if verb == "write" else "is a symbolic link to nothing"
        raise FileAccessError(f"cannot {verb} {os.fspath(path)}: {reason}", _HINTS[verb]) from error
    except ValueError as error:
        raise FileAccessError(f"cannot {verb} {os.fspath(path)!r}: {error}", _HINTS[verb]) from error


def _too_large(path: str | os.PathLike[str], found: int, allowed: int, what: str) -> TooLargeError:
    return TooLargeError(
        f"{os.fspath(path)} has {found} bytes; {what} has at most {allowed}", f"This is not {what}; check the path."
    )
