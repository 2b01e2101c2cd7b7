"""GPQA Diamond: hard questions with four options. Its terms ask that no example be published: none is ever printed."""

from __future__ import annotations

import hashlib
from typing import cast

from foldspec.tasks.answers import letter, said
from foldspec.tasks.base import Score, Text, chat
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.prompts import Place, constant
from foldspec.tasks.published import Published

__all__ = ["GPQADiamond", "option_order"]

OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def option_order(record: str) -> list[int]:
    """Which of :data:`OPTIONS` stand at A, B, C and D: a function of the row's id alone."""
    return sorted(range(4), key=lambda i: hashlib.sha256(f"{record}:{i}".encode()).hexdigest())


class GPQADiamond(Published):
    """One turn of a user, with the options in the order of :func:`option_order`."""

    name, max_new = "gpqa_diamond", 4096
    origin = Origin("Idavidrein/gpqa", ("gpqa_diamond.csv",))
    part, columns = "gpqa_diamond/train", ("Record ID", "Question", *OPTIONS)
    own = (
        "{Question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}\n\n"
        "Which option is right? Reason step by step, then end with a line that says Answer: and its letter."
    )
    place: Place | None = Place(
        "openai/simple-evals",
        "ee3b0318d8d1d9d72755a4120879be65f7c07e9e",
        "common.py",
        lambda text: cast(str, constant(text, "QUERY_TEMPLATE_MULTICHOICE")),
    )
    chance = 0.25
    scoring = "the last `Answer: X`, else the boxed letter; chance is 25%"

    def name_of(self, row: Row, number: int) -> str:
        return str(row["Record ID"])

    def text(self, row: Row) -> Text:
        options = [str(row[OPTIONS[i]]).strip() for i in option_order(row["Record ID"])]
        return chat(self.filled(Question=row["Question"], **dict(zip("ABCD", options, strict=True))))

    def answer(self, row: Row) -> str:
        return "ABCD"[option_order(row["Record ID"]).index(0)]

    def score(self, answer: str, text: str) -> Score:
        spoken = said(text)
        found = None if spoken is None else letter(spoken)
        return Score(float(found == answer), answered=found is not None)
