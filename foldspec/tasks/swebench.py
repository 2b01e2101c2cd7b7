"""SWE-bench with BM25 retrieval of 40K tokens: an issue and files of its repository, a patch wanted. Speed only."""

from __future__ import annotations

from foldspec.tasks.base import Text, chat
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.published import Published

__all__ = ["SWEBench"]


class SWEBench(Published):
    """``text`` is the whole prompt, as one turn of a user. The paper takes 288 instances in hash order: --limit 288."""

    name, max_new = "swebench", 512
    origin = Origin("princeton-nlp/SWE-bench_bm25_40K", ("data/test-*.parquet",))
    part, columns = "default/test", ("instance_id", "text")

    def name_of(self, row: Row, number: int) -> str:
        return str(row["instance_id"])

    def text(self, row: Row) -> Text:
        return chat(row["text"])
