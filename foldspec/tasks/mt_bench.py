"""MT-Bench: open questions of eight kinds. Speed only: judging them takes another model."""

from __future__ import annotations

from foldspec.errors import UsageError
from foldspec.tasks.base import Text, chat
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.published import Published

__all__ = ["MTBench"]


class MTBench(Published):
    """The first turn of each question, as the data has it (columns ``prompt_id`` and ``prompt``, or FastChat's
    ``question_id`` and ``turns``)."""

    name, max_new = "mt_bench", 1024
    origin = Origin(
        "HuggingFaceH4/mt_bench_prompts",
        ("data/train-*.parquet", "raw/question.jsonl", "question.jsonl"),
        "e3a795c5e9a82ee40611c416b8a7786c73198991",
    )
    part, columns = "default/train", ("category",)

    def name_of(self, row: Row, number: int) -> str:
        return str(row.get("prompt_id", row.get("question_id", number)))

    def text(self, row: Row) -> Text:
        turns = row.get("prompt", row.get("turns"))
        if not turns or not isinstance(turns, (list, tuple)):
            raise UsageError("a row has neither prompt nor turns", where=self.name)
        return chat(str(turns[0]))
