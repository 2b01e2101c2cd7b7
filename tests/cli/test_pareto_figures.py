"""``foldspec plot`` and ``report`` on a sweep: figures as the second paper's Figures 3 and 4, and the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli.command import main, pair_words, refused
from swept import EFFORTS, swept

from foldspec.bench import plot
from foldspec.bench.frontier import QUALITIES

CELLS = [("kv", 512), ("docs", 2048)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plain bench, of which a sweep's result is the same with one more part."""
    out = tmp_path_factory.mktemp("bench") / "out"
    small = ("--tasks", "random", "--lengths", "24", "--limit", 2, "--max-new", 4, "--threads", 1, "--warmup", 0)
    assert main("bench", *pair_words(), *small, "--methods", "full", "--out", out, "--quiet").code == 0
    found: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return found


@pytest.fixture(scope="module")
def sweep() -> dict[str, Any]:
    found: dict[str, Any] = swept(CELLS, 12)
    return found


def drawn(measured: dict[str, Any], sweep: dict[str, Any], name: str) -> Any:
    return plot.draw({**measured, "pareto": sweep}, [name])[name]


def panels(figure: Any) -> Iterator[tuple[Any, tuple[str, int], str]]:
    """Each with its task and length and its speed."""
    speeds = ("latency_s", "tokens_s")
    for i, panel in enumerate(figure.axes):
        yield panel, CELLS[i // 2], speeds[i % 2]


def marks(panel: Any) -> list[Any]:
    """What stands at one place, but for the white points on the frontier."""
    return [line for line in panel.lines if line.get_marker() not in (".", "None")]


@pytest.mark.parametrize("quality", QUALITIES)
def test_every_point_stands_where_it_was_measured(quality: str, measured: Any, sweep: dict[str, Any]) -> None:
    for panel, cell, speed in panels(drawn(measured, sweep, f"pareto-{quality}")):
        mine = [p for p in sweep["points"] if (p["task"], p["length"]) == cell]
        wanted = (*cell, quality, speed)
        (row,) = (f for f in sweep["frontiers"] if (f["task"], f["length"], f["quality"], f["speed"]) == wanted)
        assert row["frontier"] and panel.get_title(loc="left") == f"{cell[0]} {cell[1]:,}, 12 requests"
        for point, mark in zip(mine, marks(panel), strict=True):
            assert tuple(mark.get_xydata()[0]) == (point[speed]["mean"], point[quality]["mean"])
            assert (mark.get_markerfacecolor() == "white") != (point["method"] in row["frontier"])
        by = {p["method"]: (p[speed]["mean"], p[quality]["mean"]) for p in mine}
        (thick,) = panel.collections
        pieces = [tuple(map(tuple, piece)) for piece in thick.get_segments()]
        assert all(one[1] == pytest.approx(other[0]) for one, other in pairwise(pieces))  # joined
        assert (pieces[0][0], pieces[-1][1]) == (by[row["frontier"][0]], pytest.approx(by[row["frontier"][-1]]))
        shares = [p["leniency"] for p in mine if p["method"] in row["frontier"] and p["leniency"] is not None]
        assert [text.get_text() for text in panel.texts] == [f"{share:g}" for share in shares]


def test_a_colour_is_an_effort(measured: dict[str, Any], sweep: dict[str, Any]) -> None:
    figure = drawn(measured, sweep, "pareto-score")
    panel, cell, _ = next(panels(figure))
    mine = [p for p in sweep["points"] if (p["task"], p["length"]) == cell]
    colours = {effort: set[str]() for effort in EFFORTS}
    for point, mark in zip(mine, marks(panel), strict=True):
        if point["kind"] == "point":
            colours[point["effort"]].add(mark.get_color())
    assert all(len(found) == 1 for found in colours.values()) and len(set.union(*colours.values())) == len(EFFORTS)
    (legend,) = figure.legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert entries == [*EFFORTS, "4 drafts", "8 drafts", "verifier alone", "drafter alone"]


def test_why_there_is_no_frontier_and_what_is_excluded(measured: dict[str, Any]) -> None:
    few = drawn(measured, swept(CELLS, 4, (8,)), "pareto-score")
    for panel, _, _ in panels(few):
        assert "no frontier: fewer than 5 requests decide nothing" in panel.get_title(loc="left")
        assert not panel.collections and not panel.texts
    near = drawn(measured, swept(CELLS, 12, (8,), skill=0.8), "pareto-score")
    assert "EXCLUDED: the drafter alone is about as good" in near.axes[0].get_title(loc="left")
    bad = drawn(measured, swept(CELLS, 12, (8,), skill=0.1), "pareto-score")
    assert "EXCLUDED: the drafter alone is worse than guessing" in bad.axes[0].get_title(loc="left")
    assert "EXCLUDED" not in bad.axes[2].get_title(loc="left")  # no chance of guessing is known there


def test_the_model_stands_beside_what_was_measured(measured: dict[str, Any], sweep: dict[str, Any]) -> None:
    figure = drawn(measured, sweep, "pareto-model")
    mine = [p for p in sweep["points"] if (p["task"], p["length"]) == CELLS[0] and p["kind"] == "point"]
    modelled, seen = ([(x, y) for line in panel.lines for x, y in line.get_xydata()] for panel in figure.axes[:2])
    assert sorted(modelled) == sorted((p["tokens_s_modelled"], p["agreement_modelled"]) for p in mine)
    assert sorted(seen) == sorted((p["tokens_s"]["mean"], p["agreement"]["mean"]) for p in mine)


def test_files_and_page(measured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "swept.json"
    path.write_text(json.dumps({**measured, "pareto": swept(CELLS[:1], 12, (8,))}))
    done = main("plot", path, "--figures", "pareto-score,pareto-model", "--out", tmp_path / "figures")
    assert [Path(line).name for line in done.out.splitlines()] == [
        f"swept-{name}.{form}" for name in ("pareto-score", "pareto-model") for form in ("png", "svg")
    ]
    assert main("report", path, "--out", tmp_path / "page.html").code == 0
    text = (tmp_path / "page.html").read_text()
    assert "foldspec pareto: " in text and "frontier, fastest first" in text and "exclusion" in text
    assert all(title in text for title in ("Score against speed", "The throughput model beside what was measured"))
    assert text.count("<details><summary>every task and length") == 1


def test_a_sweep_without_scores_or_a_model(measured: dict[str, Any], tmp_path: Path) -> None:
    poor = swept(CELLS[:1], 12, (8,))
    for point in poor["points"]:
        point |= {"score": None, "agreement": None, "agreement_modelled": None, "tokens_s_modelled": None}
    poor["frontiers"] = [row for row in poor["frontiers"] if row["quality"] == "logprob"]
    poor["exclusions"] = []
    path = tmp_path / "poor.json"
    path.write_text(json.dumps({**measured, "pareto": poor}))
    done = main("plot", path, "--out", tmp_path)
    assert [line for line in done.out.splitlines() if "pareto" in line and line.endswith("png")] == [
        f"{tmp_path}/poor-pareto-logprob.png"
    ]
    refused(main("plot", path, "--figures", "pareto-score", "--out", tmp_path), 2, "no numbers for pareto-score")
    path.write_text(json.dumps(measured))
    refused(main("plot", path, "--figures", "pareto-score", "--out", tmp_path), 2, "no numbers for pareto-score")
