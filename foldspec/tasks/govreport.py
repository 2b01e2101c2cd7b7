"""GovReport, of LongBench-E: reports of US government offices, to be summarised."""

from __future__ import annotations

import json

from foldspec.tasks.answers import said
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.prompts import Place
from foldspec.tasks.published import Published

__all__ = ["GovReport"]


class GovReport(Published):
    """LongBench's own prompt, as one turn of a user; its code would cut long reports in the middle, here they are
    left out."""

    name, max_new = "govreport", 512
    origin = Origin(
        "THUDM/LongBench",
        ("gov_report_e.jsonl", "data.zip"),
        "5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
        member="data/gov_report_e.jsonl",
    )
    part, columns = "gov_report_e/test", ("context", "answers", "_id")
    own = "Here is a report of a government office.\n\n{context}\n\nSummarise it on one page."
    place = Place(
        "THUDM/LongBench",
        "2e00731f8d0bff23dc4325161044d0ed8af94c1e",
        "LongBench/config/dataset2prompt.json",
        lambda text: str(json.loads(text)["gov_report"]),
    )
    scoring = "rouge-l F of the package rouge, best over references (with --score)"
    library = "rouge"

    def name_of(self, row: Row, number: int) -> str:
        return str(row["_id"])

    def answer(self, row: Row) -> list[str]:
        return [str(each) for each in row["answers"]]

    def by_library(self, answer: list[str], text: str) -> float:
        from rouge import Rouge

        spoken = (said(text) or "").strip()
        if not spoken.replace(".", "").strip():  # the package takes no empty text
            return 0.0
        return max((float(Rouge().get_scores([spoken], [gold])[0]["rouge-l"]["f"]) for gold in answer), default=0.0)
