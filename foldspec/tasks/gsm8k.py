"""GSM8K: grade-school mathematics, a number for an answer."""

from __future__ import annotations

from foldspec.tasks.answers import number, said, same_number
from foldspec.tasks.base import Score
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.published import Published

__all__ = ["GSM8K"]


class GSM8K(Published):
    """Zero-shot chat, reasoning allowed; nobody published a chat prompt. ``answer`` may be the official solution, which
    ends in ``#### 72``, or the number alone."""

    name, max_new = "gsm8k", 1024
    origin = Origin("openai/gsm8k", ("main/test-*.parquet", "test.jsonl"), "740312add88f781978c0658806c59bc2815b9866")
    part, columns = "main/test", ("question", "answer")
    own = "{question}\n\nReason step by step. Put the final answer, a number alone, into \\boxed{{}}."
    scoring = "the last boxed number, else the first after ####, else the last; second: math-verify"
    library = "math_verify"

    def name_of(self, row: Row, number: int) -> str:
        return str(row.get("id", number))

    def answer(self, row: Row) -> str:
        return str(row["answer"]).rpartition("####")[2].strip().replace(",", "")

    def score(self, answer: str, text: str) -> Score:
        spoken = said(text)
        found = None if spoken is None else number(spoken)
        return Score(float(found is not None and same_number(found, answer)), answered=found is not None)

    def by_library(self, answer: str, text: str) -> float:
        from math_verify import parse, verify

        # no timeouts: math-verify sets alarms for them, which only a process's first thread can
        found = parse(said(text) or "", parsing_timeout=None)
        return float(verify(parse(answer, parsing_timeout=None), found, timeout_seconds=None))
