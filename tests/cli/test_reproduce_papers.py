"""``scripts/reproduce``: the tables of published benchmarks. Dry runs from the registry alone, the papers' figures
against one another, means beside them counted in another way, and tiny runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored
from cli.command import ROOT, copied, pair_words, tell_bytes_apart, with_text
from masked import write_masked_llama
from reproduce import beside, command, counts, live, paper, report, roofline, tables
from reproduce.study import GENERAL, Part, Study, mean_of, one

from foldspec.checkpoints.registry import find
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import built_in

ROWS = ROOT / "tests/golden/tasks/rows"
STUDIES = [name for name in command.NAMES if hasattr(import_module(f"reproduce.{name}"), "STUDY")]
LLAMA, GEMMA = "llama-3.1-8b-dflash", "gemma-4-12b-dflash"
K = 1024


def reproduce(*words: object) -> int:
    return command.main([str(word) for word in words])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = with_text(copied(tmp_path_factory.mktemp("pair")), bos=True)
    tell_bytes_apart(folder)
    return pair_words(folder)


# The papers' figures


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("table")])
def test_every_column_of_a_table_has_its_figures(name: str) -> None:
    """Every pair, column and method of a study is in its file, and nothing else is."""
    study: Study = import_module(f"reproduce.{name}").STUDY
    known = paper.facts(study.facts)
    for pair in study.pairs:
        for column in study.chosen(pair):
            for part in column.parts:
                assert paper.requests(study.facts, pair, part.label) or (pair, part.lengths[0] > 128 * K) == (
                    LLAMA,
                    True,
                )
            if "rows" in known:
                assert [*study.figures(pair, column)] and {*study.figures(pair, column)} == {*study.arms}
        own = known.get("requests", {}).get(pair, {})
        assert {*own} <= {part.label for part in _parts(study.chosen(pair))}, (
            "what the text says of a part, it is there"
        )
    assert {*known.get("rows", study.pairs)} == {*study.pairs}


def test_averages_of_table_2_follow_from_its_columns() -> None:
    """Seven columns with the same weight; figures have two digits."""
    for methods in paper.facts("fold_table2")["rows"].values():
        for values in methods.values():
            *columns, average = np.array(values)
            assert np.mean(columns, axis=0) == pytest.approx(average, abs=0.0101)


# FOLD less DFlash on LCA at 32K, 64K and 122K, of the paper's Table 4: its two steps together.
GAINS = {LLAMA: (2.09, 2.38, 2.46), "qwen3.5-9b-dflash": (0.89, 1.20, 1.44), GEMMA: (0.24, 0.42, 0.57)}


def test_a_column_is_a_mean_over_requests_and_not_over_lengths() -> None:
    """So say Tables 2, 4 and 7 of the paper together; the mean of the lengths would be off for Qwen3.5 and Llama."""
    off = 0
    for pair, gains in GAINS.items():
        rows = paper.facts("fold_table2")["rows"][pair]
        printed = rows["fold"][4][0] - rows["full"][4][0]
        n = [paper.requests("fold_table7", pair, f"lca {size}") or 0 for size in ("32k", "64k", "122k")]
        assert np.average(gains, weights=n) == pytest.approx(printed, abs=0.015), pair
        off += abs(np.mean(gains) - printed) > 0.025
    assert off == 2


def test_counts_of_requests_agree_between_tables() -> None:
    total = sum(paper.requests("fold_table7", LLAMA, column.label) or 0 for column in _parts(GENERAL))
    assert total == paper.facts("fold_table10")["requests"]["All requests"] == 1531
    assert paper.requests("fold_table3", "gemma-4-12b-dspark", "longbench_v2") == 356  # its own, of long ones
    assert paper.requests("fold_table3", "gemma-4-12b-dspark", "lca 64k") == 232  # those of DFlash
    assert paper.requests("fold_table2", "smollm2-135m", "govreport") is None


def _parts(columns: list[Any]) -> list[Part]:
    return [part for column in columns for part in column.parts]


# Dry runs

ELSEWHERE = re.compile(rf"({'|'.join(map(re.escape, (str(ROOT), sys.prefix, sys.base_prefix, '/proc', '/sys')))})(/|$)")
watched: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is not None and event in ("open", "socket.connect", "socket.getaddrinfo"):
        where = str(arguments[0])
        if event != "open" or not ELSEWHERE.match(where):
            watched.append(f"{event} {where}")


sys.addaudithook(_watch)  # for good: a hook cannot be taken away


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Files outside the checkout and Python's own, and connections, of one test."""
    global watched
    watched = found = []
    yield found
    watched = None


@pytest.mark.parametrize("name", command.NAMES)
def test_a_dry_run_needs_the_registry_alone(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reproduce(name, "--dry-run") == 0
    said = capsys.readouterr()
    module = import_module(f"reproduce.{name}")
    assert module.MIRRORS in said.out and module.DIFFERS in said.out and "one request takes" in said.out
    assert said.err == "" and opened == []
    if name in STUDIES:
        study: Study = module.STUDY
        known = paper.facts(study.facts)
        assert known["source"] in said.out and all(line in said.out for line in known.get("missing", ()))
        for pair in study.pairs:
            assert f"| {pair} " in said.out
            for part in _parts(study.chosen(pair)):
                assert re.search(rf"\| {part.label} .*\| ", said.out), part
        expected = re.search(r"Expected: ([\d,.]+ (h|min|s)) on one ([AH]\d+)", said.out)
        assert bool(expected) == study.bench, "hours on a named GPU"


def test_a_dry_run_says_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pair", "qwen3-8b-dflash", "--tasks", "docs,govreport", "--lengths", "2k,4k", "--limit", 5)
    assert reproduce("table9", "--dry-run", *words, "--gpu", "a100") == 0
    said = capsys.readouterr().out
    assert re.search(r"\| govreport +\| Gov +\| +5 \| as asked for", said)
    assert re.search(r"\| docs +\| +\| +10 \| as asked for \| +2k 4k", said)
    assert "on one A100-80GB" in said and "32,191 (output 512)" in said


def test_a_dry_run_counts_data_that_is_given(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tasks", "gsm8k", "--data", f"gsm8k={ROWS / 'test.jsonl'}", "--offline")
    assert reproduce("table2", "--dry-run", *pair, *words, "--max-context", 2048) == 0
    assert re.search(r"\| gsm8k +\| +\| +4 \| ours ", capsys.readouterr().out)
    assert reproduce("table9", "--dry-run", *words) == 0
    said = capsys.readouterr().out
    assert "is not counted, for want of its tokenizer" in said and "| needs its data |" in said


# What a GPU takes


@pytest.mark.parametrize("gpu, ms", [("a100", 7.36), ("h100", 4.48), ("h200", 3.13)])
def test_a_step_is_the_roofline_at_its_share(gpu: str, ms: float) -> None:
    """Llama-3.1-8B: 15.0 GB of weights and 128 KiB of cache a token, from nominal bandwidths."""
    roof = roofline.Roofline(built_in(find(LLAMA), Kernels()), roofline.GPUS[gpu])
    assert roof.step(0) * 1e3 == pytest.approx(ms / 0.65, rel=0.005)
    cache = (roof.step(128 * K) - roof.step(0)) * 0.65 * roofline.GPUS[gpu].bandwidth
    assert cache == pytest.approx(128 * K * 128 * K)


def test_a_prefill_is_products_and_attention() -> None:
    """Llama: 32 layers of 32 heads of 128, half of the square. Gemma: 40 layers see 1,024 at most, 8 all."""
    gpu = roofline.GPUS["h100"]
    llama = roofline.Roofline(built_in(find(LLAMA), Kernels()), gpu)
    flops = 2 * 7.505e9 * 32 * K + 32 * 4 * 32 * 128 * (32 * K) ** 2 / 2
    assert llama.prefill(32 * K) == pytest.approx(flops / (0.5 * gpu.peak), rel=0.002)
    gemma = roofline.Roofline(built_in(find(GEMMA), Kernels()), gpu)
    heads = 4 * 16 * 32 * K
    attention = 40 * heads * 256 * K + 8 * heads * 512 * 16 * K
    assert gemma.prefill(32 * K) * 0.5 * gpu.peak == pytest.approx(2 * 11.907e9 * 32 * K + attention, rel=0.002)
    both = 3 * llama.prefill(K) + 3 * 100 * llama.step(K) * (2 + 1 / 2 + 1)
    warm = llama.prefill(K) + 4 * 100 * llama.step(K) * (1 + 1 / 2 + 1)
    assert llama.requests(3, K, 100, [2.0, 1.0]) == pytest.approx(both + warm)
    assert llama.requests(0, K, 100, [2.0]) == 0


# Beside the paper's

TWO = Study(
    facts="fold_table9",
    pairs=("made up",),
    columns=lambda pair: [
        mean_of("Gov", [one("a", Part("lca", (1024,))), one("b", Part("kv"))]),
        one("LBv2", Part("kv")),
    ],
)


def test_means_are_of_shares_and_lie_beside_the_papers(tmp_path: Path) -> None:
    lengths, lines = (1024, 4096), dict[str, Any]()
    for task in ("lca", "kv"):
        lines[task] = [line for line in stored.write_live(tmp_path, task, lengths, 6) if not line["clock_disturbed"]]
    taken = live.read([tmp_path / "live-lca", tmp_path / "live-kv"], ["lca", "kv"])

    def mean(task: str, *wanted: int) -> float:
        found = {
            (line["length"], line["id"], line["method"]): line["tpot_ms"]
            for line in lines[task] if line["length"] in wanted and line["method"] in ("ar", "fold")
        }  # fmt: skip
        return float(np.mean([found[n, i, "ar"] / tpot for (n, i, method), tpot in found.items() if method == "fold"]))

    rows = beside.rows_of(TWO, "qwen3-8b-dflash", TWO.chosen("qwen3-8b-dflash"), taken)
    first, second = (row for row in rows if row["method"] == "fold")
    both = (mean("lca", 1024) + mean("kv", *lengths)) / 2
    assert first["ours"]["speedup"]["mean"] == pytest.approx(both), "4,096 tokens of lca are in no share"
    assert second["ours"]["speedup"]["mean"] == pytest.approx(mean("kv", *lengths))
    assert (first["n"], first["fewest"], second["n"]) == (18, 6, 12)
    assert first["paper"] == {"tau": 2.85, "speedup": 2.63} and second["paper"]["speedup"] == 4.00
    assert first["difference"]["speedup"] == pytest.approx(both - 2.63)
    assert first["ours"]["speedup"]["low"] < both < first["ours"]["speedup"]["high"]
    table = beside.table(rows)
    assert re.search(r"\| fold .*\| +2\.63 \| +-\d\.\d\d \*", table) and len(table.splitlines()) == len(rows) + 2
    unknown = beside.table(beside.rows_of(TWO, "another", TWO.chosen("another"), taken))
    assert "paper" not in unknown and "less it" not in unknown


def test_a_weighted_mean_has_a_weighted_interval() -> None:
    """Against other draws: requests of each share by themselves, then the weighted mean of both means."""
    draw, shares = np.random.default_rng(3), [(0.8, 12), (0.2, 30)]
    values = [(weight, draw.exponential(2.0 - weight, n)) for weight, n in shares]
    found = beside.mean([(weight, [*each]) for weight, each in values], lambda value: value)  # type: ignore[list-item]
    means = sum(weight * draw.choice(each, (20_000, len(each))).mean(axis=1) for weight, each in values)
    wide = found["high"] - found["low"]
    assert (found["low"], found["high"]) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.06 * wide)
    assert found["mean"] == pytest.approx(sum(weight * each.mean() for weight, each in values))


def test_a_star_needs_requests_and_an_interval_without_the_papers_figure() -> None:
    row = {"ours": {"tau": {"mean": 2.0, "low": 1.9, "high": 2.1}}, "difference": {"tau": -0.5}, "paper": {"tau": 2.5}}
    assert beside._paper({**row, "fewest": 5}, "tau") == ["2.50", "-0.50 *"]
    assert beside._paper({**row, "fewest": 4}, "tau") == ["2.50", "-0.50"]
    assert beside._paper({**row, "paper": {"tau": 2.1}, "fewest": 5}, "tau") == ["2.10", "-0.50"]


def test_a_column_that_loses_a_part_is_none_of_the_papers() -> None:
    study: Study = import_module("reproduce.table2").STUDY
    names = [column.name for column in study.chosen(LLAMA)]
    assert names == paper.facts("fold_table2")["columns"]
    assert sum(weight for weight, _ in study.chosen(LLAMA)[-1].shares) == pytest.approx(1)
    left = study.chosen(LLAMA, ["en_qa", "lca", "repobench", "repobench_java", "docs"], [32 * K, 128 * K])
    assert [(column.name, column.known) for column in left] == [
        *(("en_qa", False), ("lca", False), ("repobench", False), ("repobench_java", False)),
        *(("docs", False), ("Avg.", False)),
    ]
    assert left[1].parts == [Part("lca", (32 * K,))] and left[4].parts == [Part("docs", (32 * K, 128 * K), 20)]
    parts = [part.label for parts in tables.by_task(study.chosen(LLAMA)).values() for part in parts]
    assert len(parts) == len({*parts}) == 13, "each part once, though the average has it too"
    whole = study.chosen(LLAMA, ["lca", "govreport"])
    assert [(column.name, column.known) for column in whole] == [("Gov", True), ("LCA", True), ("Avg.", False)]
    for tasks, lengths in ((["docs"], []), (["lca"], [512])):
        with pytest.raises(UsageError):
            study.chosen(LLAMA, tasks, lengths)


def test_the_second_engine_counts_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of docs differ under some method: the common set is the other ten."""
    from reproduce import table10

    stored.write_live(tmp_path, "docs", (1024,), 12)
    path = tmp_path / "live-docs" / "requests.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        if (line["id"], line["method"]) in (("docs/3", "fold"), ("docs/3", "cmr"), ("docs/7", "fold")):
            line["first_diff"] = 4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    taken = live.read([tmp_path / "live-docs"], ["docs"])
    columns = [mean_of(table10.ALL, [one("docs", Part("docs"))])]
    monkeypatch.setattr(tables, "measured", lambda study, chosen: [(LLAMA, columns, taken)])
    made = table10.run(argparse.Namespace())
    rows = {(row["column"], row["method"]): row for row in made.results["rows"]}
    assert rows[table10.ALL, "fold"]["n"] == 12 and rows[table10.COMMON, "fold"]["n"] == 10
    kept = [r.tau["fold"] for r in taken.requests if r.id not in ("docs/3", "docs/7")]
    assert rows[table10.COMMON, "fold"]["ours"]["tau"]["mean"] == pytest.approx(np.mean(kept))
    assert rows[table10.COMMON, "fold"]["paper"] == {"tau": 3.26, "speedup": 2.50}
    said = next(note for note in made.notes if note.startswith("Outputs that differ"))
    assert "full 0 (paper 83)" in said and "cmr 1 (paper 82)" in said and "fold 2 (paper 83)" in said


def test_a_method_that_is_not_plain_decoding_has_no_figures(tmp_path: Path) -> None:
    stored.write_live(tmp_path, "kv", (1024,), 5)
    parity = {"fold": {"state": "red", "why": "differs at token 3"}, "full": {"state": "green", "why": ""}}
    (tmp_path / "live-kv" / "bench.json").write_text(json.dumps({"parity": parity}))
    taken = live.read([tmp_path / "live-kv"], ["kv"])
    columns = TWO.chosen("qwen3-8b-dflash")[1:]
    methods = {row["method"] for row in beside.rows_of(TWO, "qwen3-8b-dflash", columns, taken)}
    assert "full" in methods and "fold" not in methods
    assert "PARITY RED, fold is left out: differs at token 3." in report.sample(taken)
    for bad in ("red", {"fold": 3}, {"fold": {}}):
        (tmp_path / "live-kv" / "bench.json").write_text(json.dumps({"parity": bad}))
        with pytest.raises(UsageError, match="parity"):
            live.read([tmp_path / "live-kv"], ["kv"])


# Counts of requests


def test_table_7_counts_what_is_at_hand_and_names_what_is_not(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = ["--tasks", "gsm8k,swebench", "--data", f"gsm8k={ROWS / 'test.jsonl'}", "--offline"]
    assert reproduce("table7", *pair, *words, "--max-context", 2048) == 0
    said = capsys.readouterr().out
    assert re.search(r"\| gsm8k +\|[ |]+\| +4 \| +\| 0\.\dK-0\.\dK +\| +0 \| own", said), said
    assert "swebench: data not at hand: give --data swebench=PATH, or fetch it: hf download princeton-nlp" in said
    assert reproduce("table7", "--pair", LLAMA, *words) == 0
    said = capsys.readouterr().out
    assert "for want of its tokenizer" in said and re.search(r"swebench +\| +288 \| 31K-39K \|", said)
    assert reproduce("table7", *pair, "--tasks", "gsm8k", "--data", "gsm8k=nowhere", "--offline") == 2


def test_table_7_fetches_no_data(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(repo: str, **how: Any) -> str:
        asked.append(how["local_files_only"])
        raise OSError("not there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("foldspec.tasks.prompts._fetched", lambda place, offline: None)
    assert reproduce("table7", *pair, "--tasks", "govreport", "--max-context", 2048) == 0
    assert asked == [True] and "or fetch it: hf download" in capsys.readouterr().out


def test_lengths_are_printed_as_the_paper_prints_them() -> None:
    assert counts.span([1843, 27_648]) == "1.8K-27K" and counts.span([10 * K, 124_928]) == "10K-122K"


def test_short_prompts_of_the_general_tasks_are_left_out(pair: list[str]) -> None:
    """As with DSpark drafters: the longest two of four are long enough."""
    chosen = argparse.Namespace(
        target=pair[1], offline=True, seed=0, max_new=None, limit=None, data=[f"gsm8k={ROWS / 'test.jsonl'}"]
    )
    about = counts.about(chosen, None, 2048)
    sizes = sorted(len(item.ids) for item in counts.cells_of(about, [Part("gsm8k")], chosen)[0].inputs)
    assert len(sizes) == 4
    (cell,) = counts.cells_of(about, [Part("gsm8k", least=sizes[2])], chosen)
    assert sorted(len(item.ids) for item in cell.inputs) == sizes[2:]
    assert counts.cells_of(about, [Part("gsm8k", least=sizes[3] + 1)], chosen) == []


# Refused


def test_what_cannot_be_used_ends_in_one_line(
    pair: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cases: list[tuple[list[object], int]] = [
        (["table2"], 2),
        (["table2", "--dry-run", "--pair", "nonsense"], 2),
        (["table2", "--dry-run", "--tasks", "nonsense"], 2),
        (["table2", "--dry-run", "--lengths", "0"], 2),
        (["table2", "--dry-run", "--tasks", "docs"], 2),
        (["table2", "--dry-run", "--gpu", "tpu"], 2),
        (["table2", "--dry-run", "--data", "govreport"], 2),
        (["table2", "--dry-run", "--pair", "a,b", "--target", "c"], 2),
        (["table2", "--dry-run", "--pair", LLAMA, "--max-context", 1 << 20], 2),
        (["diffusion_figure3", "--dry-run", "--leniency", "2"], 2),
        (["diffusion_figure3", "--dry-run", "--steps", "many"], 2),
        (["diffusion_figure5", "--dry-run", "--pair", "qwen3-8b-dspark", "--draft-tokens", "99"], 2),
        (["table8", *pair[:2], "--drafter", "none", "--tasks", "docs", "--lengths", "512", "--out", tmp_path], 2),
    ]
    for words, code in cases:
        assert reproduce(*words) == code, words
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("reproduce: ") and said.err.count("\n") == 1, said


# Measured


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
    monkeypatch.setattr("foldspec.bench.session.read_bandwidth", lambda device: 10.0)
    monkeypatch.setattr("foldspec.bench.calibrate.STEPS", (1, 2))
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_table_of_made_tasks_is_measured_once(
    tmp_path: Path, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--tasks", "docs,kv", "--lengths", "512", "--limit", 2, "--max-new", 8, "--window", 64, "--threads", 1]
    assert reproduce("table2", *pair, *small, "--out", tmp_path) == 0
    first = capsys.readouterr()
    made = json.loads((tmp_path / "table2.json").read_text())
    assert [(row["column"], row["n"]) for row in made["rows"] if row["method"] == "fold"] == [
        *(("docs", 2), ("kv", 2), ("Avg.", 4))
    ]
    each = {(row["column"], row["method"]): row["ours"]["tau"]["mean"] for row in made["rows"]}
    assert each["Avg.", "fold"] == pytest.approx((each["docs", "fold"] + each["kv", "fold"]) / 2)
    lines = (tmp_path / "work" / "the target" / "live-kv" / "requests.jsonl").read_text().splitlines()
    taus = [np.mean(line["commits"]) for line in map(json.loads, lines) if line["method"] == "fold"]
    assert each["kv", "fold"] == pytest.approx(np.mean(taus))
    assert "has a speedup of" in first.out and "no figures" in first.out
    assert reproduce("table2", *pair, *small, "--out", tmp_path) == 0
    again = capsys.readouterr()
    assert again.out == first.out and "warming" not in again.err, "nothing was left to measure"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_figure_of_the_second_paper_is_a_sweep(
    tmp_path: Path, pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproduce.diffusion.find_spec", lambda name: None)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
    drafter = write_masked_llama(tmp_path / "drafter", **shape)
    words = ["--target", pair[1], "--drafter", drafter, "--tasks", "mcq_synthetic", "--limit", 2, "--max-new", 8]
    words += ["--draft-tokens", "3", "--steps", "1,2", "--leniency", "0,1", "--max-context", 2048, "--threads", 1]
    out = tmp_path / "out"
    assert reproduce("diffusion_figure3", *words, "--out", out) == 0
    said = capsys.readouterr().out
    (result,) = json.loads((out / "diffusion_figure3.json").read_text())["pairs"]
    kinds = [(p["kind"], p["effort"], p["leniency"]) for p in result["pareto"]["points"]]
    assert kinds == [("verifier", None, None)] + [
        each for k in ("K 1", "K 2") for each in (("point", k, 0), ("point", k, 1), ("drafter", k, None))
    ]
    assert len([line for line in said.splitlines() if line.startswith("| the target")]) == len(kinds)
    assert "Missing in the stored text" in said and "want of matplotlib" in said
    assert (
        reproduce("diffusion_table1", *words[:-4], "--max-context", 2048, "--threads", 1, "--out", tmp_path / "b") == 0
    )
    said = capsys.readouterr().out
    assert re.search(r"\| the target +\| mcq_synthetic +\| +\d\.\d{3} \| +\d\.\d{3} \|", said)
