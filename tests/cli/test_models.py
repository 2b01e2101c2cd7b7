"""``foldspec models``: the named pairs, each value with its source, memory, the README's table; and names of the
registry on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from cli.command import PAIR, ROOT, main, refused

from foldspec.checkpoints.registry import load_registry
from foldspec.drafters import KINDS

REGISTRY = load_registry()


def test_the_list() -> None:
    done = main("models", "--json")
    assert done.code == 0 and done.err == ""
    assert list(done.json["pairs"]) == list(yaml.safe_load((ROOT / "checkpoints.yaml").read_text())["pairs"])
    assert {"full", "window", "fold"} <= set(done.json["contexts"]) and "exact" in done.json["rules"]
    assert "LlamaForCausalLM" in done.json["targets"] and "DFlashDraftModel" in done.json["drafters"]
    llama, uno = (done.json["pairs"][name] for name in ("llama-3.1-8b-dflash", "qwen3-8b-uno"))
    assert llama["runs"] == "yes" and llama["bytes"] == 16_060_522_496 + 2_097_252_864 and llama["on disk"] is False
    assert uno["runs"] == "target alone" and uno["kind"] == "adapter"
    assert done.json["pairs"]["qwen2.5-32b-qwen2.5-1.5b"]["runs"] == "yes"
    assert done.json["pairs"]["qwen2.5-32b-dream-7b"]["runs"] == "yes"
    lines = main("models").out.splitlines()
    assert [line.split()[0] for line in lines[: len(REGISTRY.pairs)]] == list(REGISTRY.pairs)
    assert lines[2].endswith("; 18.2 GB, not on this disk") and "not yet" not in lines[len(REGISTRY.pairs) - 1]
    assert any(line.startswith("contexts: full, window, fold, ") for line in lines)


def test_what_is_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDSPEC_CACHE", str(tmp_path / "none"))
    assert main("models", "smollm2-135m", "--json").json["smollm2-135m"]["target"]["on disk"] is False
    (tmp_path / "none").write_text("a file in its place")
    assert main("models", "smollm2-135m", "--json").json["smollm2-135m"]["target"]["on disk"] is False


def test_one_pair_tells_every_value_and_its_source() -> None:
    text = main("models", "llama-3.1-8b-dflash", "--max-context", "32k").out
    for line in (
        "    window: 2048 (paper)",
        "    YaRN reference: 3072 (paper)",
        "    revision: d3af30def9601abdd10810aba220d692f0e803f0 (published)",
        "    tensors: 58, 2.1 GB",
        "      block_size: 10 (paper)",
        "      intermediate_size: 12288 (file)",
        "      rope_theta: 500000.0 (unverified)",
        "      dflash_config.target_layer_ids: [1, 8, 15, 22, 29] (unverified)",
        "    one request of: 32,768 tokens, all in bfloat16",
        "    weights: 18.2 GB",
        "    target cache: 4.33 GB",
        "    side cache in the paper's layout: 0.671 GB",
        "  runs: yes",
    ):
        assert line.replace("0.671 GB", "671 MB") in text.splitlines(), line
    assert "    window: 256 (ours)" in main("models", "smollm2-135m").out.splitlines()


def test_every_unverified_value_is_printed_so() -> None:
    for name in ("llama-3.1-8b-dflash", "gemma-4-12b-dspark", "qwen3-8b-sdar-8b", "qwen2.5-32b-dream-7b"):
        pair = REGISTRY.pairs[name]
        text = main("models", name).out
        marks = [m for s in (pair.target, pair.drafter) if s for _, _, m in s.values()]
        marks += ["unverified" for s in (pair.target, pair.drafter) if s for key in s.unverified if key == "licence"]
        assert text.count("(unverified)") == marks.count("unverified"), name


def test_memory_grows_with_the_length() -> None:
    reports = [main("models", "llama-3.1-8b-dflash", "--max-context", n, "--json").json for n in (8192, 131072)]
    small, large = (report["llama-3.1-8b-dflash"]["memory"] for report in reports)
    assert small["weights"] == large["weights"] == "18.2 GB"
    assert (small["target cache"], large["target cache"]) == ("1.11 GB", "17.2 GB")  # 131,072 B an entry, and one page
    assert large["side cache in the paper's layout"] == "2.68 GB"  # 2.5 GiB
    paper = large["in the paper's layout"]  # keys and values twice, in place of the ring of 2,048 + 2 B keys
    assert (large["draft cache"], large["rings"]) == ("2.69 GB", "21.2 MB")
    assert paper == {"draft cache": "5.39 GB", "rings": "0 MB", "in all": "40.9 GB"}


def test_a_pair_that_does_not_run_yet_says_why() -> None:
    report = main("models", "qwen3-8b-uno", "--json").json["qwen3-8b-uno"]
    assert report["runs"] == "target alone" and report["memory"]["weights"] == "16.4 GB"
    assert report["refused"].startswith(
        "s-sahoo/uno-qwen3-8B: is a drafter of the kind adapter, which this version does"
    )
    assert report["drafter"]["tensors"] == "unknown" and report["drafter"]["licence"] == "unknown"
    assert report["memory"]["without"] == "s-sahoo/uno-qwen3-8B, which this version does not run"
    assert report["defaults"]["block"] == {"value": 4, "source": "ours"} and "coverage" not in report["defaults"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("smollm",), 2, "no pair is called 'smollm'"),
        (("llama-3.1-8b-dflash", "--max-context", 131073), 2, "the target holds 131072 positions, not 131073"),
        (("llama-3.1-8b-dflash", "--max-context", 0), 2, "--max-context: must be at least 1, not 0"),
        (("--max-context", 100), 2, "--max-context: needs the name of a pair"),
        (("--markdown", "--json"), 2, "--markdown: is the table of all pairs"),
        (("smollm2-135m", "--markdown"), 2, "--markdown: is the table of all pairs"),
    ],
)
def test_wrong_words(words: tuple[object, ...], code: int, says: str) -> None:
    refused(main("models", *words), code, says)


def test_the_readme_has_this_table() -> None:
    """``foldspec models --markdown`` makes it. Nothing in it says how fast a pair is."""
    made = main("models", "--markdown").out
    readme = (ROOT / "README.md").read_text()
    begin, end = "<!-- pairs: foldspec models --markdown -->\n", "<!-- end of pairs -->"
    assert readme[readme.index(begin) + len(begin) : readme.index(end)] == f"\n{made}\n", made
    rows = [line for line in made.splitlines() if line.startswith("| `")]
    assert len(rows) == len(REGISTRY.pairs) and max(map(len, rows)) < 200
    assert "| 10 | 2048 | 18.2 | yes |" in rows[2] and rows[0].endswith("| dflash | 5 | 256 (ours) | 0.273 | yes |")
    assert not re.search(r"speed|fast|tau\b|×|tokens/s", made)


UNBUILT = {name: p.drafter for name, p in REGISTRY.pairs.items() if p.drafter and p.drafter.kind not in KINDS}


@pytest.mark.parametrize("name", UNBUILT)
def test_a_drafter_that_is_not_built_is_refused_before_anything_is_fetched(name: str) -> None:
    """Tests reach no network: had it been asked for, the error would be another."""
    drafter = UNBUILT[name]
    for command in (("generate", name, "-p", "x"), ("check", name)):
        line = refused(main(*command), 3, f"is a drafter of the kind {drafter.kind}", "this version does not run")
        assert drafter.name in line and "--drafter lookup" in line


def test_a_pair_that_runs_and_is_not_here() -> None:
    refused(main("generate", "llama-3.1-8b-dflash", "-p", "x", "--offline"), 3, "not (or not wholly) in the cache")
    refused(main("check", "llama-3.1-8b-dflash", "--offline"), 3, "not (or not wholly) in the cache")


def test_names_that_models_prints_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDSPEC_CACHE", str(tmp_path))
    line = refused(
        main("check", "--target", "smollm2-135m-instruct", "--offline"), 3, "not prepared on this machine yet"
    )
    assert "smollm2-135m-instruct" in line  # it was looked for as an embedded one
    line = refused(main("check", "--target", PAIR / "target", "--drafter", "smollm2-135m-dflash"), 3, "hidden size 576")
    assert "smollm2-135m-dflash" in line
    says = "neither a folder nor a hub id (owner/name) nor a name of `foldspec models`"
    refused(main("check", "--target", "smollm2-135m-instrct"), 3, says)
