"""The tasks of the bench by name. A task is one file and one line here.

Those that are made here need no download and are nobody's published sets: figures of theirs compare methods here, and
with no paper. Those that are published are read from where they are, or from ``--data``; none is copied here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from foldspec.errors import UsageError
from foldspec.tasks.base import Task
from foldspec.tasks.data import Access

__all__ = ["MADE", "PUBLISHED", "TASKS", "chance", "make_task"]

# name -> "module:class"; imported when it is asked for
MADE = {  # of any length, without data
    "docs": "foldspec.tasks.docs:Docs",
    "code": "foldspec.tasks.code:Code",
    "kv": "foldspec.tasks.kv:KeyValue",
}
PUBLISHED = {
    "mcq_synthetic": "foldspec.tasks.mcq_synthetic:MCQSynthetic",  # by us, and shipped
    "govreport": "foldspec.tasks.govreport:GovReport",
    "longbench_v2": "foldspec.tasks.longbench_v2:LongBenchV2",
    "retr_kv": "foldspec.tasks.infinitebench:RetrKV",
    "en_sum": "foldspec.tasks.infinitebench:Summaries",
    "en_qa": "foldspec.tasks.infinitebench:Questions",
    "en_mc": "foldspec.tasks.infinitebench:Choice",
    "en_dia": "foldspec.tasks.infinitebench:Dialogue",
    "lca": "foldspec.tasks.lca:LongCodeArena",
    "repobench": "foldspec.tasks.repobench:RepoBenchPython",
    "repobench_java": "foldspec.tasks.repobench:RepoBenchJava",
    "swebench": "foldspec.tasks.swebench:SWEBench",
    "speedbench": "foldspec.tasks.speedbench:SpeedBench",
    "speedbench_qualitative": "foldspec.tasks.speedbench:SpeedBenchQualitative",
    "gsm8k": "foldspec.tasks.gsm8k:GSM8K",
    "humaneval": "foldspec.tasks.humaneval:HumanEval",
    "gpqa_diamond": "foldspec.tasks.gpqa:GPQADiamond",
    "mt_bench": "foldspec.tasks.mt_bench:MTBench",
}
TASKS = MADE | PUBLISHED


def make_task(name: str, access: Access | None = None) -> Task:
    """``access``: where a published task looks for its data. Raises :class:`UsageError` for an unknown name, and for
    data that is given to a task that takes none."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}", do=f"known: {', '.join(TASKS)}")
    kind = _kind(name)
    if name in MADE and access is not None and access.path is not None:
        raise UsageError("takes no data: it is made here", where=f"--data {name}={access.path}")
    task: Task = kind() if name in MADE else kind(access)
    return task


def chance(name: str) -> float | None:
    """The score that guessing gets; None for what is no task, or not scored."""
    return _kind(name).chance if name in TASKS and _kind(name).scoring else None


def _kind(name: str) -> Any:
    module, _, attribute = TASKS[name].partition(":")
    return getattr(import_module(module), attribute)
