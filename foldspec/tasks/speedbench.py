"""SPEED-Bench: prompts of nominal lengths and of eleven kinds. Speed only.

Its licence forbids handing the resolved prompts on, and the hub's rows hold placeholders: NVIDIA's own command makes
the data, ``--data`` names the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from foldspec.errors import UsageError
from foldspec.tasks.base import Text, chat
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.published import Published

__all__ = ["SpeedBench", "SpeedBenchQualitative"]

SIZES = {1024: "1k", 2048: "2k", 8192: "8k", 16384: "16k", 32768: "32k"}
PLACEHOLDER = "FULL BENCHMARK DATA"
PREPARE = "run prepare_data.py --dataset speed --config all of NVIDIA Model-Optimizer's examples/specdec_bench"


class SpeedBenchQualitative(Published):
    """The first turn of each question."""

    name, max_new = "speedbench_qualitative", 1024
    config = "qualitative"
    origin = Origin("nvidia/SPEED-Bench", ("qualitative/*.parquet", "qualitative.jsonl"))
    part, columns = "qualitative/test", ("question_id", "turns")

    def name_of(self, row: Row, number: int) -> str:
        return str(row["question_id"])

    def text(self, row: Row) -> Text:
        return chat(str(row["turns"][0]))

    def _named(self, origin: Origin) -> Iterator[tuple[str, Row]]:
        for name, row in super()._named(origin):
            if not row["turns"] or str(row["turns"][0]).startswith(PLACEHOLDER):
                do = f"{PREPARE}, then --data {self.name}=FOLDER"
                raise UsageError("the data holds placeholders, not prompts", where=self.name, do=do)
            yield name, row


class SpeedBench(SpeedBenchQualitative):
    """``--lengths`` 1k, 2k, 8k, 16k and 32k are the nominal lengths, counted by another tokenizer. The paper takes 256
    items of the first three and 768 of the others."""

    name, whole = "speedbench", False
    sized = True

    @property
    def dataset(self) -> str:
        return f"{self.origin.repo} throughput"

    def rows(self, length: int) -> Iterable[tuple[str, Row]]:
        if length not in SIZES:
            raise UsageError(f"has none of {length} tokens", where=self.name, do=f"it has {', '.join(SIZES.values())}")
        config = f"throughput_{SIZES[length]}"
        self.origin = Origin(self.origin.repo, (f"{config}/*.parquet", f"{config}.jsonl"))
        self.part = f"{config}/test"
        return super().rows(length)
