"""What can be wrong with anything that enters the process: one named error for each way.

Same shape as gplan's own errors (message, hint, exit code), which cannot be imported here: `formats` stands alone.
"""

from __future__ import annotations


class FormatError(Exception):
    """Something read or about to be written is not what its format says.

    Args:
        message: what is wrong, with the value that is wrong.
        hint: what to do next; a command where there is one.
        path: where in the value, as `limits.max_batch` or `decode.ladder[3].size`; empty where there is no such place.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.path = path

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class FileAccessError(FormatError):
    """The operating system does not let the file be read or written: missing, a directory, no permission, disk full."""


class EmptyFileError(FormatError):
    """The file has no bytes."""


class NotAPlanError(FormatError):
    """The file does not begin as a plan does."""


class WrongVersionError(FormatError):
    """The file is a plan of another format version."""


class TooLargeError(FormatError):
    """A size, stated or real, is beyond the format's cap."""


class TruncatedError(FormatError):
    """The file ends before the bytes its header states."""


class CorruptError(FormatError):
    """The bytes are not those that were written: checksum, sizes, compression or JSON syntax do not hold."""


class NotCanonicalError(FormatError):
    """The JSON states a plan in other bytes than the one form that the format allows (a repeated key, say)."""


class UnknownFieldError(FormatError):
    """A field that the format does not have."""


class MissingFieldError(FormatError):
    """A field that the format requires is not there."""


class WrongTypeError(FormatError):
    """A field holds a value of another type or outside its range of values."""


class InconsistentError(FormatError):
    """Fields contradict each other."""


class NotATraceError(FormatError):
    """A traffic trace in no known format, or without a request."""


class BadTraceRowError(FormatError):
    """A row of a traffic trace that cannot be read; names file, line and field."""


class BadWorkloadError(FormatError):
    """A stated workload, such as `poisson:rate=8,in=512,out=128`, that cannot be read."""


class BadRequestError(FormatError):
    """A request to the HTTP API that is refused. `path` is the parameter's name.

    Attributes:
        code: OpenAI's word for the kind of refusal, such as `unknown_parameter`.
    """

    def __init__(self, message: str, path: str = "", code: str = "invalid_value") -> None:
        super().__init__(message, path=path)
        self.code = code
