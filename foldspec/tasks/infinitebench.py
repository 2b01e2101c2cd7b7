"""InfiniteBench: a value looked up in a JSON object (Retr.KV), and summaries, questions and guesses about novels and
scripts (En.Sum, En.QA, En.MC, En.Dia)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, cast

from foldspec.tasks.answers import final, letter, said, token_f1, words
from foldspec.tasks.base import Score, Text, chat
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.prompts import Place, constant
from foldspec.tasks.published import Published

__all__ = ["Choice", "Dialogue", "InfiniteBench", "Questions", "RetrKV", "Summaries"]

REASON = "\n\nReason step by step, then give the final answer after the word Answer and a colon."


def _template(file: str, brief: tuple[str, str] | None, text: str) -> str:
    """One of the official prompts; raises KeyError and ValueError where it is not as it was."""
    template = cast(dict[str, str], constant(text, "gpt4_templates"))[file]
    if brief is None:
        return template
    after, before = brief
    end = template.rindex(before) if before else len(template)
    return template[: template.rindex(after, 0, end) + len(after)] + template[end:] + REASON


class InfiniteBench(Published):
    """The gpt4 family of the official prompts, of the data file ``file``. ``brief`` cuts an official prompt's demand
    for an answer without reasons, which the FOLD paper replaces by one for reasons first (its words are not published,
    so :data:`REASON` is ours); None: the prompt stays as it is."""

    file: ClassVar[str]
    brief: ClassVar[tuple[str, str] | None] = None  # what is cut lies after the one and before the other
    columns: tuple[str, ...] = ("id", "context", "input", "answer")

    def __init_subclass__(cls) -> None:
        data, cls.part = f"{cls.file}.jsonl", f"default/{cls.file}"
        cls.origin = Origin("xinrongzhang2022/InfiniteBench", (data,), "90f0394333616266d9fe85824ceaf505093cbaa5")
        pick = partial(_template, cls.file, cls.brief)
        cls.place = Place("OpenBMB/InfiniteBench", "88b3daa6989da2fbe0077170d7a3c84c25d5ae58", "src/prompt.py", pick)

    def facts(self) -> dict[str, str | None]:
        facts = super().facts()
        return facts | {"prompt": "official, but for the form of the answer"} if self._altered else facts

    @property
    def _altered(self) -> bool:
        return self.brief is not None and self.wording.source == "official"

    def text(self, row: Row) -> Text:
        options = dict(zip([f"OPTION_{x}" for x in "ABCD"], row.get("options") or (), strict=False))
        return chat(self.filled(context=row["context"], input=row["input"], question=row["input"], **options))

    def answer(self, row: Row) -> list[str]:
        return _listed(row["answer"])


class RetrKV(InfiniteBench):
    name, max_new, file = "retr_kv", 128, "kv_retrieval"
    own = "Here is a JSON object. It gives a value for each key.\n\n{context}\n\n{input}"
    scoring = "the value is one of the output's words"

    def score(self, answer: list[str], text: str) -> Score:
        found = words(said(text) or "")
        return Score(float(answer[0] in found), answered=bool(found))


class Summaries(InfiniteBench):
    name, max_new, file = "en_sum", 1200, "longbook_sum_eng"
    own = "Here is a book.\n\n{context}\n\nSummarise it."
    scoring = "rougeLsum F of rouge-score, best over references (with --score)"
    library = "rouge_score"

    def by_library(self, answer: list[str], text: str) -> float:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeLsum"])
        return max((float(scorer.score(gold, said(text) or "")["rougeLsum"].fmeasure) for gold in answer), default=0.0)


class Questions(InfiniteBench):
    name, max_new, file = "en_qa", 512, "longbook_qa_eng"
    brief = ("{question}", "")
    own = "Here is a book.\n\n{context}\n\nQuestion: {question}" + REASON
    scoring = "F1 of the words after the last `answer`, best over references"

    def score(self, answer: list[str], text: str) -> Score:
        found = final(said(text) or "").strip()
        return Score(token_f1(found, answer), answered=bool(found))


class Choice(InfiniteBench):
    """Officially the output's first letter counts, which is none of a text that reasons first."""

    name, max_new, file = "en_mc", 512, "longbook_choice_eng"
    brief = ("{question}", "\nA. ")
    columns = (*InfiniteBench.columns, "options")
    own = (
        "Here is a book.\n\n{context}\n\nQuestion: {question}\n"
        "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}" + REASON
    )
    chance = 0.25
    scoring = "the last `Answer: X`, not the first letter; chance is 25%"

    def answer(self, row: Row) -> list[str]:
        right = super().answer(row)
        return ["ABCD"[list(row["options"]).index(right[0])]] if right[0] in row["options"] else right[-1:]

    def score(self, answer: list[str], text: str) -> Score:
        found = letter(said(text) or "")
        return Score(float(found in answer), answered=found is not None)


class Dialogue(InfiniteBench):
    name, max_new, file = "en_dia", 512, "longdialogue_qa_eng"
    brief = ("?", "")
    own = (
        "Here is a script. Where $$MASK$$ stands, the name of a character was taken out.\n\n{context}\n\n"
        "Which character is it? Name one." + REASON
    )
    scoring = "the name is one of the words after the last `answer`"

    def score(self, answer: list[str], text: str) -> Score:
        found = [word.upper() for word in words(final(said(text) or ""))]
        return Score(float(any(name.upper() in found for name in answer)), answered=bool(found))


def _listed(answer: object) -> list[str]:
    return [str(each) for each in answer] if isinstance(answer, (list, tuple)) else [str(answer)]
