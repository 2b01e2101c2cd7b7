"""LongBench v2: questions with four options about texts from 8,000 words to two million."""

from __future__ import annotations

from foldspec.tasks.answers import named_letter, said
from foldspec.tasks.base import Score, Text, chat
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.prompts import Place
from foldspec.tasks.published import Published

__all__ = ["LongBenchV2"]

MARKS = {"$DOC$": "context", "$Q$": "question", **{f"$C_{x}$": f"choice_{x}" for x in "ABCD"}}


class LongBenchV2(Published):
    """Zero-shot, the official template with its marks replaced one after the other, each by a text without blanks at
    its ends."""

    name, max_new = "longbench_v2", 128
    origin = Origin("THUDM/LongBench-v2", ("data.json",), "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9")
    part, columns = "default/train", ("_id", "answer", *MARKS.values())
    own = (
        "$DOC$\n\nA question about the text above: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n\n"
        'Answer in this form: "The correct answer is (X)", with the letter of the right option.'
    )
    place = Place("THUDM/LongBench", "2e00731f8d0bff23dc4325161044d0ed8af94c1e", "prompts/0shot.txt")
    chance = 0.25
    scoring = "the letter after `The correct answer is`; chance is 25%"

    def name_of(self, row: Row, number: int) -> str:
        return str(row["_id"])

    def text(self, row: Row) -> Text:
        text = self.wording.text
        for mark, column in MARKS.items():
            text = text.replace(mark, str(row[column]).strip())
        return chat(text)

    def answer(self, row: Row) -> str:
        return str(row["answer"])

    def score(self, answer: str, text: str) -> Score:
        spoken = said(text)
        found = None if spoken is None else named_letter(spoken)
        return Score(float(found == answer), answered=found is not None)
