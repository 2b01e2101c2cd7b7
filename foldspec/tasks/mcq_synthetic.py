"""``mcq_synthetic``: twelve easy questions in GPQA's columns, written for this project (CC0-1.0), shipped with it."""

from __future__ import annotations

from pathlib import Path

from foldspec.tasks.data import Access
from foldspec.tasks.gpqa import GPQADiamond

__all__ = ["MCQSynthetic"]


class MCQSynthetic(GPQADiamond):
    """Everything of GPQA Diamond but its questions: to try a run of it, and no measure of anything."""

    name, max_new = "mcq_synthetic", 256
    place = None

    def __init__(self, access: Access | None = None) -> None:
        own = access.path if access else None
        super().__init__(Access(own or Path(__file__).with_suffix(".jsonl"), offline=True))

    @property
    def dataset(self) -> str:
        return "12 synthetic questions (CC0-1.0)"
