"""Published tasks on small rows of the official shape: the requests that they make, their order, and what is refused.

The rows of ``tests/golden/tasks/rows`` are made by hand; none is of a published set.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from foldspec.bench.inputs import Source, make_cells
from foldspec.errors import FoldspecError, ResourceError, UsageError
from foldspec.tasks import MADE, PUBLISHED, make_task
from foldspec.tasks.data import Access
from foldspec.tasks.infinitebench import REASON
from foldspec.tasks.lca import cut_line, distance
from foldspec.tasks.published import longest_prompt

GOLDEN = Path(__file__).parents[1] / "golden" / "tasks"
ROWS = GOLDEN / "rows"
FILES = {
    "govreport": "gov_report_e.jsonl",
    "longbench_v2": "data.json",
    "retr_kv": "kv_retrieval.jsonl",
    "en_sum": "longbook_sum_eng.jsonl",
    "en_qa": "longbook_qa_eng.jsonl",
    "en_mc": "longbook_choice_eng.jsonl",
    "en_dia": "longdialogue_qa_eng.jsonl",
    "repobench": "repobench.jsonl",
    "repobench_java": "repobench_java.jsonl",
    "swebench": "swebench.jsonl",
    "speedbench": "throughput_1k.jsonl",
    "gsm8k": "test.jsonl",
    "humaneval": "HumanEval.jsonl",
    "gpqa_diamond": "gpqa_diamond.csv",
    "mt_bench": "question.jsonl",
}


def task(name: str, path: Path | None = None) -> Any:
    return make_task(name, Access(path or ROWS / FILES[name], offline=True))


def as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(f"<{m['role']}>{m['content']}" for m in prompt)


def encode(prompt: Any) -> tuple[int, ...]:
    return tuple(as_text(prompt).encode())


def asked(name: str, length: int = 32768) -> dict[str, tuple[str, Any]]:
    """id -> the request's text and answer."""
    return {i.id: (bytes(i.prompt).decode(), i.answer) for i in task(name).items(encode, length, 9, 0)}


def test_every_published_task_has_rows_here() -> None:
    assert set(FILES) | {"mcq_synthetic", "lca", "speedbench_qualitative"} == set(PUBLISHED)


def test_requests_in_words_of_our_own() -> None:
    """All of the row, in its place, as one turn of a user; no official wording is at hand."""
    row = "Ann listens while Bob sings. The price was Who sings?."  # the official order: a $Q$ of the text is one too
    text, answer = asked("longbench_v2")["b1"]
    assert text.startswith(f"<user>{row}\n\nA question about the text above: Who sings?\n(A) Ann\n(B) Bob\n(C) Cid\n")
    assert answer == "B"
    text, answer = asked("govreport")["kites"]
    assert text == (
        "<user>Here is a report of a government office.\n\nThe Office of Kites counted 12 kites in 2020 and 15 in 2021."
        "\n\nSummarise it on one page."
    )
    assert answer == ["The office counted more kites in 2021 than in 2020."]
    text, answer = asked("retr_kv")["0"]
    assert text.endswith('JSON data:\n{"4c1f": "9a77", "77aa": "0b3d"}\n\nKey: "77aa"') and answer == ["0b3d"]
    text, answer = asked("en_mc")["0"]
    assert text.endswith("Question: What does Mara plant?\nA. An oak\nB. A rose\nC. A pear\nD. A fern" + REASON)
    assert answer == ["C"]
    assert (
        asked("en_qa")["0"][1] == ["a pear tree", "pears"]
        and "Question: What does Mara plant?" in asked("en_qa")["0"][0]
    )
    assert "MARA: Hello, $$MASK$$.\nTOM: Hello, Mara." in asked("en_dia")["0"][0]
    assert asked("en_sum")["0"][0].startswith("<user>Here is a book.\n\nMara plants a tree.")
    text, answer = asked("gsm8k")["1"]
    assert text.startswith("<user>A pond is 1,200 feet long") and "\\boxed{}" in text and answer == "600"
    assert [asked("gsm8k")[i][1] for i in "023"] == ["725", "-3", "1034"]
    text, answer = asked("humaneval")["Made/0"]
    assert '```python\nimport math\n\n\ndef half(n: int) -> int:\n    """Half of n, rounded down."""\n```' in text
    assert answer["entry_point"] == "half"


def test_requests_that_the_data_has_whole() -> None:
    assert asked("swebench")["bob__ponds-2"] == ("<user>An issue: ponds leak.", None)
    assert asked("mt_bench")["81"] == ("<user>Write a line about kites.", None)
    assert asked("speedbench", 1024)["q1"] == ("<user>Sort these words: pear, fig.", None)
    for name in ("swebench", "mt_bench", "speedbench"):
        assert task(name).facts()["prompt"] == "data"


def test_the_layout_of_repobench() -> None:
    """Raw text; blank lines at the end of the code go, and four line ends or more become two."""
    found = asked("repobench")
    assert len(found) == 1  # one example a file, and of this level alone
    (text, answer), (name,) = next(iter(found.values())), found
    other = "# Repo Name: ann/kites\n# Path: kites/fly.py\n\ndef other():\n"
    whole = (
        "# Repo Name: ann/kites\n# Path: kites/wind.py\ndef wind():\n    return 3\n\n"
        "# Path: kites/line.py\nLINE = 40\n\n"
        "# Path: kites/fly.py\nfrom kites.wind import wind\ndef fly():\n    speed = wind()\n"
    )
    assert (text, answer) in [(whole, "    return speed * 2"), (other, "    pass")]
    rows = [json.loads(line) for line in (ROWS / "repobench.jsonl").read_text().splitlines()[:2]]
    texts = {f"ann/kites/kites/fly.py:{hashlib.sha256(r['cropped_code'].encode()).hexdigest()[:8]}": r for r in rows}
    assert name == min(texts, key=lambda i: key("tianyang/repobench_python_v1.1/default/cross_file_first", i))
    assert {r["next_line"]: as_text(task("repobench").text(r)) for r in rows} == {
        rows[0]["next_line"]: whole,
        "    pass": other,
    }
    (text, _), *_ = asked("repobench_java").values()
    assert text == "// Repo Name: ann/kites\n// Path: Fly.java\nimport kites.Wind;\nclass Fly {\n"
    assert list(asked("repobench", 65536)) != [] and asked("repobench", 131072) == {}
    with pytest.raises(UsageError, match=r"^repobench: has no level of 512 tokens; levels are 32k, 64k, 128k$"):
        asked("repobench", 512)


def key(part: str, name: str) -> str:
    return hashlib.sha256(f"{part}:{name}".encode()).hexdigest()


def test_the_order_is_that_of_hashes_whatever_the_seed() -> None:
    for name, part in [
        ("gsm8k", "openai/gsm8k/main/test"),
        ("swebench", "princeton-nlp/SWE-bench_bm25_40K/default/test"),
    ]:
        ids = [item.id for item in task(name).items(encode, 512, 9, 0)]
        assert ids == sorted(ids, key=lambda i: key(part, i))
        assert ids == [item.id for item in task(name).items(encode, 512, 2, 5)]


def test_long_code_arena(tmp_path: Path) -> None:
    tiny = json.loads((GOLDEN / "lca_tiny.json").read_text())
    target, files = tiny["target"], tiny["files"]
    row = {
        "repo": "made/toolbox",
        "commit_hash": "0123456789abcdef",
        "completion_file": {"filename": target, "content": files[target]},
        "completion_lines": {"infile": [51], "inproject": [3, 71], "common": [52], "commited": [70, 9]},
        "repo_snapshot": {"filename": list(files), "content": list(files.values())},
    }
    small = {**row, "repo": "made/small", "completion_lines": {"inproject": [49], "commited": []}}
    path = tmp_path / "large_context.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (small, row)))
    assert cut_line(row["completion_lines"]) == tiny["cut_line_0based"] and cut_line(small["completion_lines"]) is None
    others = [name for name in files if name.endswith(".py") and name != target]
    assert [[name, distance(target, name)] for name in sorted(others, key=lambda o: (distance(target, o), o))] == tiny[
        "nearest_first"
    ]
    for case in tiny["cases"]:
        found = list(task("lca", path).items(encode, case["limit"], 9, 0))
        if not case["eligible"]:
            assert found == []
            continue
        (item,) = found
        assert item.id == "made/toolbox@0123456789ab/toolbox/core/job.py" and len(item.prompt) == case["limit"]
        assert hashlib.sha256(bytes(item.prompt)).hexdigest() == case["sha256"]
        text = bytes(item.prompt).decode()
        assert text.startswith(case["starts_with"]) and text.endswith(case["ends_with"])
    huge = tmp_path / "huge"
    huge.mkdir()
    many = [{**row, "commit_hash": f"{i:040d}"} for i in range(50)]
    for each in many:
        each["repo_snapshot"] = {"filename": ["a.py"], "content": ["x = 1\n" * 40_000]}
    (huge / "huge_context.jsonl").write_text("".join(json.dumps(each) + "\n" for each in many[:3]))
    made = task("lca", huge)
    assert len(list(made.items(encode, 180_000, 9, 0))) == 3 and made.facts()["dataset"].endswith("huge_context/test")


def test_option_orders() -> None:
    from foldspec.tasks.gpqa import OPTIONS, option_order

    rows = [json.loads(line) for line in (GOLDEN / "mcq_synthetic_12.jsonl").read_text().splitlines()]
    items = {item.id: item for item in make_task("mcq_synthetic").items(encode, 512, 99, 0)}
    assert len(rows) == len(items) == 12
    for row in rows:
        item, order = items[row["Record ID"]], row["expected_order"]
        assert option_order(row["Record ID"]) == order and item.answer == row["expected_letter"]
        shown = "\n".join(f"{letter}) {row[OPTIONS[i]]}" for letter, i in zip("ABCD", order, strict=True))
        assert f"{row['Question']}\n\n{shown}\n\n" in bytes(item.prompt).decode()
    text, answer = asked("gpqa_diamond")["synthetic-dev-001"]  # as from a CSV with line ends in a field
    assert "air,\nat sea level?\n\nA) Carbon dioxide\nB) Argon\nC) Nitrogen\nD) Oxygen\n\n" in text and answer == "C"


OFFICIAL = {
    "prompt.py": "import os\n\nraise SystemExit  # nothing of it is run\n\ngpt4_templates = {\n    # a remark\n"
    '    "kv_retrieval": "KV {context} / {input}",  # noqa\n    "longbook_sum_eng": "SUM {context}",\n'
    '    "longbook_qa_eng": "QA {context}\\n\\nQuestion: {question}\\n\\nShort!",\n'
    '    "longbook_choice_eng": "MC {context}\\n\\nQuestion: {question}\\n\\nOne letter. No more.\\n'
    'A. {OPTION_A}\\nB. {OPTION_B}\\nC. {OPTION_C}\\nD. {OPTION_D}",\n'
    '    "longdialogue_qa_eng": "DIA {context}\\n\\nWho is \\"$$MASK$$\\"? Only the name.",\n}\n'
    'other = {"a": "b" + "c"}\n',
    "0shot.txt": "DOC $DOC$ Q $Q$ $C_A$|$C_B$|$C_C$|$C_D$",
    "dataset2prompt.json": '{"gov_report": "GOV {context} end", "other": "x"}',
    "common.py": 'import os\nQUERY_TEMPLATE_MULTICHOICE = """\nPICK {Question} [{A}|{B}|{C}|{D}]\n""".strip()\n',
}


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """The data, with wordings in the official files' shape beside it; the texts are ours."""
    shutil.copytree(ROWS, tmp_path / "all")
    for name, text in OFFICIAL.items():
        (tmp_path / "all" / name).write_text(text)
    return tmp_path / "all"


def test_official_wordings_come_from_their_files(beside: Path) -> None:
    def text(name: str) -> str:
        return bytes(next(iter(task(name, beside).items(encode, 512, 9, 0))).prompt).decode().removeprefix("<user>")

    tree = "Mara plants a pear tree."
    assert text("retr_kv").startswith("KV JSON data:\n{")
    assert text("en_sum") == "SUM Mara plants a tree. The tree grows. Mara sits under it."
    assert text("en_qa") == f"QA {tree}\n\nQuestion: What does Mara plant?{REASON}"
    options = "A. An oak\nB. A rose\nC. A pear\nD. A fern"
    assert text("en_mc") == f"MC {tree}\n\nQuestion: What does Mara plant?\n{options}{REASON}"
    assert text("en_dia") == f'DIA MARA: Hello, $$MASK$$.\nTOM: Hello, Mara.\n\nWho is "$$MASK$$"?{REASON}'
    assert text("govreport").startswith("GOV ") and text("longbench_v2").endswith(("Ann|Bob|Cid|Dot",))
    assert text("gpqa_diamond").startswith("PICK Wh")
    altered = "official, but for the form of the answer"
    for name, said in {"en_qa": altered, "en_mc": altered, "en_dia": altered, "en_sum": "official"}.items():
        made = task(name, beside)
        assert made.facts()["prompt"] == said and task(name).facts()["prompt"] == "own"
        assert made.facts()["prompt_sha256"] != task(name).facts()["prompt_sha256"]
    wording = hashlib.sha256(b"GOV {context} end").hexdigest()
    assert task("govreport", beside / "gov_report_e.jsonl").facts()["prompt_sha256"] == wording


@pytest.mark.parametrize(
    ("file", "content", "name", "says"),
    [
        (
            "prompt.py",
            "gpt4_templates = {'longbook_qa_eng': 'QA'}",
            "en_qa",
            "has no wording where OpenBMB/InfiniteBench",
        ),
        ("prompt.py", "templates = {}", "en_sum", "has no wording"),
        ("prompt.py", "gpt4_templates = dict(", "retr_kv", "has no wording"),
        ("prompt.py", "gpt4_templates = open('x')", "retr_kv", "has no wording"),
        ("dataset2prompt.json", "{", "govreport", "has no wording"),
        ("dataset2prompt.json", '{"gov_report": "{report}"}', "govreport", "the wording asks for 'report'"),
        ("common.py", "import x", "gpqa_diamond", "has no wording"),
    ],
)
def test_a_wording_that_is_none_is_refused(beside: Path, file: str, content: str, name: str, says: str) -> None:
    (beside / file).write_text(content)
    with pytest.raises(UsageError, match=says):
        list(task(name, beside).items(encode, 512, 9, 0))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "mcq_synthetic"])
def test_offline_without_data_says_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("foldspec.tasks.humaneval.find_spec", lambda name: None)
    made = make_task(name, Access(offline=True))
    with pytest.raises(ResourceError) as caught:
        list(made.items(encode, 32768, 1, 0))
    said = str(caught.value)
    assert "\n" not in said and said.startswith(f"{name}: its data, ") and "is not in the hub's cache" in said
    assert f"give --data {name}=PATH, or fetch it: hf download " in said and "--repo-type dataset" in said
    revision = made.origin.revision
    assert revision is None or (len(revision) == 40 and f"--revision {revision}" in said)


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    def refuses(name: str, path: Path, says: str) -> None:
        with pytest.raises(FoldspecError, match=says) as caught:
            list(task(name, path).items(encode, 32768, 9, 0))
        assert "\n" not in str(caught.value)

    refuses("gsm8k", tmp_path / "none.jsonl", "no such file or folder")
    refuses("gsm8k", tmp_path, r"holds none of main/test-\*\.parquet, test\.jsonl; or name the file itself")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a", "answer": "1"}\n{"question": "b"}\n')
    refuses("gsm8k", bad, "row 2 has no 'answer'")
    for content in ('{"question": "a", "ans', "[1]\n", "\xff"):
        bad.write_bytes(content.encode("latin-1"))
        refuses("gsm8k", bad, "is not jsonl as it should be|row 1 has no 'question'")
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    refuses("gsm8k", tmp_path / "bad.gz", "cannot be read")
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    refuses("govreport", tmp_path / "bad.zip", "is not zip as it should be")
    refuses(
        "speedbench_qualitative", ROWS / "qualitative.jsonl", "placeholders, not prompts; run prepare_data.py .*FOLDER"
    )
    with pytest.raises(UsageError, match=r"has none of 512 tokens; it has 1k, 2k, 8k, 16k, 32k"):
        asked("speedbench", 512)
    with pytest.raises(UsageError, match=r"^--data docs=x: takes no data: it is made here$"):
        make_task("docs", Access(Path("x")))
    with pytest.raises(UsageError, match="unknown task 'poems'"):
        make_task("poems")


def test_data_in_every_form(tmp_path: Path) -> None:
    """As JSONL, packed, in the zip or the folders in which it is published: the same requests."""
    for file, name in (("test.jsonl", "gsm8k"), ("gov_report_e.jsonl", "govreport")):
        expected = list(task(name).items(encode, 512, 9, 0))
        packed = tmp_path / f"{file}.gz"
        packed.write_bytes(gzip.compress((ROWS / file).read_bytes()))
        assert list(task(name, packed).items(encode, 512, 9, 0)) == expected
        marked = tmp_path / f"marked-{file}"  # as editors of Windows write it
        marked.write_bytes(b"\xef\xbb\xbf" + (ROWS / file).read_bytes().replace(b"\n", b"\r\n"))
        assert list(task(name, marked).items(encode, 512, 9, 0)) == expected
    table = tmp_path / "gpqa_diamond.csv"
    table.write_bytes(b"\xef\xbb\xbf" + (ROWS / table.name).read_bytes())
    assert list(task("gpqa_diamond", table).items(encode, 512, 9, 0)) == list(
        task("gpqa_diamond").items(encode, 512, 9, 0)
    )
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(ROWS / "gov_report_e.jsonl", "data/gov_report_e.jsonl")
    assert list(task("govreport", tmp_path / "data.zip").items(encode, 512, 9, 0)) == expected
    assert list(task("govreport", tmp_path).items(encode, 512, 9, 0)) == expected
    speed = tmp_path / "speed" / "throughput_1k"
    speed.mkdir(parents=True)
    (tmp_path / "speed" / "throughput_1k.jsonl").write_bytes((ROWS / "throughput_1k.jsonl").read_bytes())
    assert [i.id for i in task("speedbench", tmp_path / "speed").items(encode, 1024, 9, 0)] == ["q1"]


def test_parquet_as_published(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [json.loads(line) for line in (ROWS / "test.jsonl").read_text().splitlines()]
    for folder, part in (("main", rows), ("socratic", rows[:1])):
        (tmp_path / folder).mkdir()
        parquet.write_table(arrow.Table.from_pylist(part), tmp_path / folder / "test-00000-of-00001.parquet")
    expected = list(task("gsm8k").items(encode, 512, 9, 0))
    assert list(task("gsm8k", tmp_path).items(encode, 512, 9, 0)) == expected
    rows = [json.loads(line) for line in (ROWS / "repobench.jsonl").read_text().splitlines()]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "cross_file_first-00000-of-00001.parquet")
    assert {
        i.id: (bytes(i.prompt).decode(), i.answer) for i in task("repobench", tmp_path).items(encode, 32768, 9, 0)
    } == asked("repobench")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match="is not parquet as it should be"):
        list(task("gsm8k", tmp_path / "broken.parquet").items(encode, 512, 9, 0))


@pytest.mark.parametrize(
    ("context", "longest"),
    [  # evaluation.md 4.1, for outputs of 128, 256, 512 and 1,200 tokens
        (32768, [32575, 32447, 32191, 31503]),
        (131072, [130879, 130751, 130495, 129807]),
        (262144, [261951, 261823, 261567, 260879]),
    ],
)
def test_the_longest_prompt(context: int, longest: list[int]) -> None:
    assert [longest_prompt(context, new) for new in (128, 256, 512, 1200)] == longest
    for new, most in zip((128, 256, 512, 1200), longest, strict=True):
        assert -(-(most + new + 65) // 256) * 256 <= context < -(-(most + 1 + new + 65) // 256) * 256


class Thing:
    def __init__(self, name: str, size: int, answer: object = None) -> None:
        self.id, self.prompt, self.answer = name, (len(name), *range(1, size)), answer


def test_whole_prompts_fall_into_lengths() -> None:
    """Each once, the lower bound inclusive; what is longer than all lengths or the context is counted, not cut."""
    sizes = {"a": 3, "bb": 8, "ccc": 7, "dddd": 16, "eeeee": 17, "ffffff": 12, "ggggggg": 4}
    things = [Thing(name, size) for name, size in sizes.items()]
    source = Source(lambda length, count: things, 16, 5, whole=True, published=True, facts=lambda: {"dataset": "x"})
    eight, sixteen = make_cells({"t": source}, [8, 16], limit=9)
    assert [i.id for i in eight.inputs] == ["a", "ccc", "ggggggg"]
    assert [i.id for i in sixteen.inputs] == ["bb", "dddd", "ffffff"]
    assert (eight.too_long, sixteen.too_long) == (0, 1) and {c.facts["dataset"] for c in (eight, sixteen)} == {"x"}
    assert all(i.max_new == 5 for i in (*eight.inputs, eight.spare))
    (only,) = make_cells({"t": source}, [2, 8], limit=9)  # nothing so short: no cell, and no complaint
    assert only.length == 8 and only.too_long == 3
    with pytest.raises(UsageError, match=r"^--tasks t: has no item of 2 tokens; 7 are too long; 16 leave room for 5"):
        make_cells({"t": source}, [2], limit=9)


def test_a_prompt_that_comes_again_is_measured_once() -> None:
    things = [Thing("a", 4), Thing("b", 4), Thing("cc", 4)]  # a and b have the same ids
    (cell,) = make_cells({"t": Source(lambda length, count: things, 16, 5, published=True)}, [8], limit=9)
    assert [i.id for i in cell.inputs] == ["a", "cc"] and cell.repeated == 1


def test_the_datas_own_sizes_are_not_cut_to_what_fits() -> None:
    asked: list[int] = []

    def items(length: int, count: int) -> Any:
        asked.append(length)
        return [Thing("a", 4)]

    source = Source(items, 16, 5, published=True, sized=True)
    (cell,) = make_cells({"t": source}, [16], limit=1, named=[64])
    assert asked == [64] and cell.length == 64
    make_cells({"t": Source(items, 16, 5, published=True)}, [16], limit=1, named=[64])
    assert asked == [64, 16]
    assert {name for name in PUBLISHED if make_task(name).sized} == {"repobench", "repobench_java", "speedbench"}


def test_no_more_is_read_than_is_needed() -> None:
    taken: list[str] = []

    def items(length: int, count: int) -> Any:
        for i in range(100):
            taken.append(str(i))
            yield Thing("x" * i, 6 + i % 3)

    make_cells({"t": Source(items, 16, 5, published=True)}, [8], limit=3)
    assert len(taken) == 4


def test_tasks_made_here_take_no_part() -> None:
    assert not MADE.keys() & PUBLISHED.keys()
    assert all(make_task(name).facts()["dataset"] for name in MADE)
