"""The errors a person at the terminal sees: what happened, where, what to do.

Every error that foldspec raises on purpose is a :class:`FoldspecError`. The command line prints ``str(error)`` on one
line and exits with ``error.exit_code``; library users catch the class they care about.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "FoldspecError", "MeasurementError", "PairError", "ResourceError", "UsageError"]


class FoldspecError(Exception):
    """Base of all foldspec errors.

    ``what`` happened, ``where`` (a file, an option, a tensor; may be empty) and what to ``do`` about it (may be empty).
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.do}" if self.do else text


class UsageError(FoldspecError):
    """An option, a prompt or an argument that cannot be used as given."""

    exit_code = 2


class CheckpointError(FoldspecError):
    """A checkpoint that is missing, incomplete, malformed or of an unknown kind."""

    exit_code = 3


class PairError(CheckpointError):
    """A drafter that was not made for this target."""


class ResourceError(FoldspecError):
    """Memory, disk, device or network that is not there."""

    exit_code = 4


class MeasurementError(FoldspecError):
    """A measurement that cannot be believed: the thing measured, or the way of measuring it, breaks its own rules."""
