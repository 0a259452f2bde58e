"""Errors that a person is meant to read: what is wrong, and what to do next.

Anything raised because of input, a file or a machine is a `GplanError`; an `assert` is for our own bugs.
"""


class GplanError(Exception):
    """A failure with its remedy.

    Args:
        message: what is wrong, with the name and the value that is wrong.
        hint: what to do next; a command where there is one.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class DriftError(GplanError):
    """The machine or the checkpoint is not the one that was planned for."""

    exit_code = 3


class FitError(GplanError):
    """Memory does not hold what was asked for; the message names the ledger row."""

    exit_code = 4


class VerificationError(GplanError):
    """A replayed graph does not give what eager execution gives."""

    exit_code = 5


class UnsupportedError(GplanError):
    """A model, an option or a request that gplan refuses by name rather than run wrongly."""


class CaptureError(GplanError):
    """A graph could not be captured, or capture was asked for after ready."""


class GuardError(GplanError):
    """An address that a captured graph refers to no longer belongs to the same buffer."""


class KVError(GplanError):
    """A step would read or write keys and values that are not its own, or did."""
