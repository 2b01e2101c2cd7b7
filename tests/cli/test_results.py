"""``foldspec compare``, ``plot`` and ``report`` on results of a bench of a tiny pair."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli.command import main, pair_words, refused

LENGTHS = (24, 64)
METHODS = ("full", "window:window=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "out"
    small = (
        "--tasks",
        "random",
        "--lengths",
        "24,64",
        "--limit",
        5,
        "--max-new",
        12,
        "--threads",
        1,
        "--ignore-eos",
        "--warmup",
        0,
    )
    assert main("bench", *pair_words(), *small, "--methods", ",".join(METHODS), "--out", out, "--quiet").code == 0
    return out


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """The result with a change, as a file of its own."""

    def write(change: Callable[[dict[str, Any]], object]) -> Path:
        value = json.loads((folder / "bench.json").read_text())
        change(value)
        path = tmp_path / "other.json"
        path.write_text(json.dumps(value))
        return path

    return write


def each_run(value: dict[str, Any], method: str, column: str, change: Callable[[Any], Any]) -> None:
    columns = value["requests"]["columns"]
    for row in value["requests"]["rows"]:
        if row[columns.index("method")] == method:
            row[columns.index(column)] = change(row[columns.index(column)])


def compared(*words: object) -> dict[str, Any]:
    done = main("compare", *words, "--format", "json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_every_run_that_counts_is_in_the_result(folder: Path) -> None:
    value = json.loads((folder / "bench.json").read_text())
    rows = [dict(zip(value["requests"]["columns"], row, strict=True)) for row in value["requests"]["rows"]]
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    kept = sum(cell["n"] for cell in value["tasks"])
    assert len(rows) == kept * 4 > 0
    for row in rows:
        assert any(all(line[name] == row[name] for name in row) for line in lines)
    for cell in value["summary"]:
        mine = [x for x in rows if (x["length"], x["method"]) == (cell["length"], cell["method"])]
        assert sum(cell["commit_counts"]) == sum(x["rounds"] for x in mine)
        counted = sum(count * tokens for tokens, count in enumerate(cell["commit_counts"], 1))
        assert counted == sum(x["n_out"] - 1 for x in mine)


def test_a_result_is_equal_to_itself(folder: Path) -> None:
    found = compared(folder, folder / "bench.json")
    assert found["differ"] == [] and list(found["only"].values()) == [0, 0]
    assert {tuple(row["methods"]) for row in found["rows"]} == {(name, name) for name in ("ar", *METHODS)}
    for row in found["rows"]:
        assert row["speedup_ci"] == pytest.approx([1, 1]) == row["relative_ci"] and row["tau_ci"] == [0, 0]
        assert row["equal"] == row["n"]
    text = main("compare", folder, folder).out
    assert "1.000 [1.000, 1.000]" in text and "DIFFERENT" not in text


def test_what_became_twice_as_fast_has_twice_the_speed(folder: Path, changed: Any) -> None:
    other = changed(lambda value: each_run(value, "full", "decode_ms", lambda x: x / 2))
    found = {row["methods"][0]: row for row in compared(folder, other)["rows"] if row["length"] == 64}
    assert found["full"]["speedup_mean"] == found["full"]["relative_mean"] == pytest.approx(2)
    assert found["full"]["relative_ci"] == pytest.approx([2, 2]) and found["full"]["verdict"] in ("gain", "few")
    assert found[METHODS[1]]["relative_ci"] == pytest.approx([1, 1])


def test_a_machine_that_became_faster_is_no_gain(folder: Path, changed: Any) -> None:
    def faster(value: dict[str, Any]) -> None:
        for method in ("ar", *METHODS):
            each_run(value, method, "decode_ms", lambda x: x / 3)

    for row in compared(folder, changed(faster))["rows"]:
        assert row["speedup_mean"] == pytest.approx(3) and row["relative_mean"] == pytest.approx(1)
        assert row["verdict"] not in ("gain", "loss")


def test_one_sides_method_with_the_others(folder: Path) -> None:
    found = compared(folder, folder, "--methods", f"full/{METHODS[1]}")
    assert [row["methods"] for row in found["rows"] if row["length"] == 24] == [["ar", "ar"], ["full", METHODS[1]]]
    summary = json.loads((folder / "bench.json").read_text())["summary"]
    means = {(row["length"], row["method"]): row["tau_mean"] for row in summary}
    for row in found["rows"]:
        one, two = row["methods"]
        assert row["tau_mean"] == pytest.approx(means[row["length"], two] - means[row["length"], one])


def test_what_differs_is_said(folder: Path, changed: Any) -> None:
    def change(value: dict[str, Any]) -> None:
        value["env"]["device"] = "another"
        value["methods"]["full"]["draft_tokens"] = 3

    text = main("compare", folder, changed(change)).out
    assert "DIFFERENT env device" in text and "DIFFERENT full draft_tokens" in text


def test_a_side_that_was_disturbed_is_named(folder: Path, changed: Any) -> None:
    def change(value: dict[str, Any]) -> None:
        value["noise"] |= {"ar_vs_ar_ci": [0.9, 1.1], "width": 0.2}
        value["env"]["load_before"] = [7.5, 0, 0]

    def quiet(value: dict[str, Any]) -> None:
        value["noise"] |= {"ar_vs_ar_ci": [0.99, 1.01], "width": 0.02}

    noisy = changed(change)
    said = [line for line in main("compare", noisy, noisy).out.splitlines() if "NOISY" in line]
    assert len(said) == 2 and said[0].startswith(f"{noisy}: ") and "[0.900, 1.100], load average 7.5 before" in said[0]
    calm = changed(quiet)
    assert "NOISY" not in main("compare", calm, calm).out


def test_other_prompts_are_not_compared(folder: Path, changed: Any) -> None:
    other = changed(lambda value: each_run(value, "ar", "input_sha256", lambda x: x[::-1]))
    refused(main("compare", folder, other), 2, "is another prompt")


def test_requests_of_one_side_alone_are_counted(folder: Path, changed: Any) -> None:
    def fewer(value: dict[str, Any]) -> None:
        at = value["requests"]["columns"].index("length")
        value["requests"]["rows"] = [row for row in value["requests"]["rows"] if row[at] == 64]

    other = changed(fewer)
    found = compared(folder, other)
    assert found["only"][str(folder)] > 0 == found["only"][str(other)]
    assert {row["length"] for row in found["rows"]} == {64}


def drop(value: dict[str, Any], method: str) -> None:
    value["requests"]["rows"] = [row for row in value["requests"]["rows"] if method not in row]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value: value.pop("requests"), "keeps no requests"),
        (lambda value: value["requests"]["rows"].clear(), "no request in common"),
        (lambda value: drop(value, "ar"), "requests that are not whole"),
        (lambda value: value["requests"]["rows"][0].__setitem__(0, [1]), "requests that are not whole"),
        (lambda value: value.update(schema="other"), "is no result of foldspec bench"),
        (lambda value: value.update(summary="none"), "breaks its schema"),
        (lambda value: each_run(value, "full", "rounds", lambda x: 0), "does not agree with itself"),
        (lambda value: each_run(value, "full", "n_out", lambda x: "many"), "does not agree with itself"),
        (lambda value: each_run(value, "full", "decode_ms", lambda x: float("nan")), "numbers that are not finite"),
    ],
)
def test_what_is_no_result_is_refused(folder: Path, changed: Any, change: Any, says: str) -> None:
    refused(main("compare", folder, changed(change)), 2, says)


@pytest.mark.parametrize("command", ["compare", "plot", "report"])
def test_a_changed_result_is_refused_with_or_without_jsonschema(
    folder: Path, changed: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema holds the form alone, and is asked only where jsonschema is there."""
    monkeypatch.setattr("foldspec.bench.results.check", lambda result: None)
    more, out = ([folder], ()) if command == "compare" else ([], ("--out", tmp_path / "made"))
    wrong = {"parity": {"full": {"state": "red"}}, "methods": {"ar": {}}, "summary": 5}
    read = {"compare": ["parity"], "plot": ["methods", "summary"], "report": [*wrong]}[command]
    for name in read:
        other = changed(lambda value, name=name: value.update({name: wrong[name]}))
        refused(main(command, other, *more, *out), 2, "does not agree with itself", "other.json")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("command", ["compare", "plot", "report"])
def test_files_that_are_not_there_or_no_json(folder: Path, tmp_path: Path, command: str) -> None:
    more = [folder] if command == "compare" else []
    refused(main(command, tmp_path / "nothing.json", *more), 2, "is not there")
    (tmp_path / "torn.json").write_text('{"schema": ')
    refused(main(command, tmp_path / "torn.json", *more), 2, "is not JSON")


def test_figures(folder: Path, tmp_path: Path) -> None:
    done = main("plot", folder, "--out", tmp_path / "figures")
    names = ("speedup", "tau", "acceptance", "commits", "forest")
    written = [Path(line) for line in done.out.splitlines()]
    assert [path.name for path in written] == [f"out-{name}.{form}" for name in names for form in ("png", "svg")]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    for method in METHODS:
        assert f"<!-- {method} -->" in written[1].read_text()


def test_a_figure_that_a_result_has_no_numbers_for(folder: Path, changed: Any, tmp_path: Path) -> None:
    other = changed(lambda v: v.update(summary=[row for row in v["summary"] if row["length"] == 24]))
    refused(main("plot", other, "--figures", "tau", "--out", tmp_path / "f"), 2, "no numbers for tau")
    refused(main("plot", other, "--figures", "pie", "--out", tmp_path / "f"), 2, "unknown figure 'pie'")
    assert not (tmp_path / "f").exists()
    (one, _) = main("plot", other, "--figures", "forest", "--out", tmp_path / "f").out.splitlines()
    assert Path(one).name == "other-forest.png"


def test_a_place_that_takes_no_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(main("plot", folder, "--out", tmp_path / "file"), 4, "cannot be written")
    refused(main("report", folder, "--out", tmp_path / "file" / "r.html"), 4, "cannot be written")
    for name in (tmp_path, "", "/", "."):
        refused(main("report", folder, "--out", name), 4, "cannot be written")
    (tmp_path / "inner").mkdir()
    refused(main("report", folder, "--out", tmp_path / "inner" / ".."), 4, "cannot be written")
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "inner"}  # nothing half done stays


def test_without_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(main("plot", folder, "--out", tmp_path), 2, "figures need matplotlib", "foldspec[bench]")


class Reader(HTMLParser):
    """What a page says, what it fetches, and which ids it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe")
        self.fetched += [str(known[name]) for name in ("src", "href", "xlink:href") if name in known]
        self.ids += [str(known["id"])] if "id" in known else []

    def handle_data(self, data: str) -> None:
        self.said.append(data.strip())


def test_the_page_holds_everything_and_fetches_nothing(folder: Path, changed: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    other = changed(lambda value: value["target"].update(name="<b>Target & Co</b>"))
    assert main("report", other, "--out", path).out == f"{path}\n"
    text = path.read_text()
    page = Reader(text)
    assert any(line.startswith("foldspec bench: <b>Target & Co</b> with ") for line in page.said)
    value = json.loads((folder / "bench.json").read_text())
    for row in value["summary"]:
        low, high = row["tau_ci"]
        assert f"{row['tau_mean']:.2f} [{low:.2f}, {high:.2f}]" in page.said
    assert all(link.startswith("#") for link in page.fetched) and page.fetched
    assert {link[1:] for link in page.fetched} <= set(page.ids) and len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)
    assert text.count("<svg") == 5
