"""checkpoints.yaml: the file that ships, and what is said of a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from foldspec.checkpoints.registry import KINDS, Effort, Pair, Source, find, load_registry, named, registry_path
from foldspec.errors import CheckpointError, UsageError

# Table 6 of the FOLD paper, and the pairs of the second paper: target, drafter
FOLD = {
    ("NousResearch/Meta-Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"): (10, 2048, 3072),
    ("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"): (16, 4096, 40000),
    ("google/gemma-4-12B-it", "deepseek-ai/dflash_gemma4_12b_block7"): (7, 4096, 4096),
    ("google/gemma-4-12B-it", "deepseek-ai/dspark_gemma4_12b_block7"): (7, 4096, 4096),
    ("Qwen/Qwen3-8B", "deepseek-ai/dflash_qwen3_8b_block7"): (7, 2048, 4096),
    ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7"): (7, 2048, 4096),
}
DIFFUSION = {
    ("Qwen/Qwen2.5-32B-Instruct", "Dream-org/Dream-v0-Instruct-7B"): "masked diffusion",
    ("Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"): "autoregressive",
    ("google/gemma-4-31B-it", "google/diffusiongemma-26B-A4B-it"): "uniform diffusion",
    ("Qwen/Qwen3-8B", "JetLM/SDAR-1.7B-Chat"): "block diffusion",
    ("Qwen/Qwen3-8B", "JetLM/SDAR-8B-Chat"): "block diffusion",
    ("Qwen/Qwen3-8B", "s-sahoo/uno-qwen3-8B"): "adapter",
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"): "dflash",
    ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7"): "dspark",
}
PAIRS = load_registry().pairs


def test_the_pair_that_needs_no_hub() -> None:
    pair = PAIRS["smollm2-135m"]
    assert (pair.target.embedded, pair.target.repo) == ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert pair.drafter == Source(embedded="smollm2-135m-dflash", kind="dflash", licence="Apache-2.0")
    assert (pair.window, pair.alpha, pair.coverage, pair.chat) == (256, 2.0, "all", True)
    assert find("smollm2-135m") == pair
    assert (pair.source("window"), pair.source("alpha")) == ("ours", "ours")


def test_the_masked_drafter_that_needs_no_hub() -> None:
    pair = PAIRS["smollm2-135m-masked"]
    assert pair.target == PAIRS["smollm2-135m"].target
    assert pair.drafter == Source(embedded="smollm2-135m-masked", kind="block diffusion", licence="Apache-2.0")
    assert pair.block == 4 and pair.effort.steps == 1


def test_every_pair_of_both_papers() -> None:
    pairs = {(p.target.name, p.drafter.name): p for p in PAIRS.values() if p.drafter}
    assert len(pairs) == len(PAIRS) and set(FOLD) | set(DIFFUSION) < set(pairs)
    for names, (block, window, reference) in FOLD.items():
        pair = pairs[names]
        assert (pair.window, pair.yarn_reference, pair.alpha, pair.coverage) == (window, reference, 2.0, "all")
        assert {pair.source(key) for key in ("target", "drafter", "window", "yarn_reference", "alpha")} == {"paper"}
        assert pair.drafter is not None
        assert [v for key, v, _ in pair.drafter.values() if key.endswith("block_size")] == [block]
    for names, kind in DIFFUSION.items():
        drafter = pairs[names].drafter
        assert drafter is not None and drafter.kind == kind and kind in KINDS
        if kind not in ("dflash", "dspark"):
            assert pairs[names].block and pairs[names].source("drafter") == "ours"


def test_revisions_are_whole_commits() -> None:
    for name, source in load_registry().checkpoints.items():
        assert source.revision is None or re.fullmatch(r"[0-9a-f]{40}", source.revision), name
        assert source.embedded or source.repo == name


def test_what_nobody_saw_is_marked() -> None:
    marks = {
        name: {key.rpartition(".")[2] for key, _, mark in source.values() if mark == "unverified"}
        for name, source in load_registry().checkpoints.items()
    }
    llama = marks["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"]
    assert {"rope_theta", "rms_norm_eps", "mask_token_id", "target_layer_ids"} <= llama  # of no file that we saw
    assert "block_size" not in llama and "intermediate_size" not in llama  # of the paper; of the file's size
    assert "mask_token_id" not in marks["deepseek-ai/dspark_gemma4_12b_block7"]  # its config is public
    assert "mask_token_id" in marks["deepseek-ai/dflash_gemma4_12b_block7"]  # its sibling's is not
    assert "tie_word_embeddings" in marks["JetLM/SDAR-1.7B-Chat"]


def test_no_pair_claims_to_be_fast() -> None:
    """Speed is measured here, never copied: neither words for it nor figures of the papers may stand in the file."""
    text = registry_path().read_text()
    _, _, entries = text.partition("\npairs:\n")
    for word in (
        "fast",
        "speed",
        "slow",
        "tau",
        "accept",
        "tokens/s",
        "throughput",
        "latency",
        "gain",
        "best",
        "times",
    ):
        assert word not in entries.lower(), word
    assert not re.search(r"\d(\.\d+)?\s?[x×]\b", re.sub(r"\d+x\d+", "", entries))  # 2.5x, 3 ×
    assert not {"tau", "speedup"} & {f for pair in PAIRS.values() for f in vars(pair)}


def test_an_unknown_pair_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError,
        match=r"no pair is called 'smollm3' \(known: smollm2-135m, smollm2-135m-masked, llama-3.1-8b-dflash, ",
    ):
        find("smollm3")
    with pytest.raises(UsageError, match=r"did you mean 'qwen3-8b-dflash'\? If not, give a folder or a hub id"):
        find("qwen3-8b-dflsh")


def test_a_name_a_folder_and_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("smollm2-135m-instruct").embedded == "smollm2-135m-instruct"
    assert named("Qwen/Qwen3-8B") == Source(repo="Qwen/Qwen3-8B")  # whatever its main branch is
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert named("smollm2-135m-instruct") == Source(repo="smollm2-135m-instruct")


DRAFTER = "checkpoints: {a/b: {}, c/d: {kind: dflash, config: {block_size: 7, x: {y: 1}}}}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "checkpoints.yaml"
    path.write_text(text)
    return path


def test_a_hub_pair_and_an_empty_file(tmp_path: Path) -> None:
    text = DRAFTER + "pairs:\n  big: {target: a/b, drafter: c/d, alpha: 1, effort: {steps: 2}, paper: [alpha]}\n"
    registry = load_registry(written(tmp_path, text))
    target = Source(repo="a/b")
    drafter = Source(repo="c/d", kind="dflash", config={"block_size": 7, "x": {"y": 1}})
    effort = Effort(steps=2)
    assert registry.pairs == {"big": Pair("big", target, drafter, alpha=1, effort=effort, paper=("alpha",))}
    assert registry.checkpoints == {"a/b": target, "c/d": drafter}
    assert load_registry(written(tmp_path, "# nothing yet\n")).pairs == {}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{target: a/b, windw: 3}", "unknown key 'windw'; did you mean 'window'?"),
        ("{target: a/b, zzz: 3}", "unknown key 'zzz'; known keys: name, target"),
        ("{target: a/c}", "target must be a key of checkpoints, not 'a/c'; did you mean 'a/b'?"),
        ("{target: {repo: a/b}}", "target must be a key of checkpoints"),
        ("{window: 3}", "has no target"),
        ("{target: c/d, drafter: a/b}", "its drafter has no kind; known kinds: dflash, dspark"),
        ("{target: a/b, window: wide}", "window must be of type int, not 'wide'"),
        ("{target: a/b, window: true}", "window must be of type int, not True"),
        ("{target: a/b, alpha: soft}", "alpha must be of type float, not 'soft'"),
        ("{target: a/b, chat: 1}", "chat must be of type bool, not 1"),
        ("{target: a/b, effort: {step: 1}}", "p.effort: unknown key 'step'; did you mean 'steps'?"),
        ("{target: a/b, effort: 3}", "p.effort: expected 'key: value' lines"),
        ("{target: a/b, paper: window}", "paper must be of type list, not 'window'"),
        ("{target: a/b, paper: [3]}", "paper must be a list of names, not [3]"),
        ("{target: a/b, paper: [window]}", "paper names 'window', which the entry does not give"),
        ("{target: a/b, name: q}", "is not given again"),
        ("3", "expected 'key: value' lines"),
    ],
)
def test_mistakes_in_a_pair_are_named(tmp_path: Path, entry: str, says: str) -> None:
    refused(written(tmp_path, f"{DRAFTER}pairs: {{p: {entry}}}"), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpoints: {a/b: {rep: a/b}}", "a/b: unknown key 'rep'; did you mean 'repo'?"),
        ("checkpoints: {a/b: {repo: a/c}}", "a hub id is its key; 'repo' is for embedded ones"),
        ("checkpoints: {ab: {}}", "ab: is neither a hub id (owner/name) nor 'embedded'"),
        ("checkpoints: {a/b: {kind: dflsh}}", "unknown kind 'dflsh'; known: dflash"),
        ("checkpoints: {a/b: {config: [1]}}", "config must be of type dict, not [1]"),
        (
            "checkpoints: {a/b: {config: {x: 1}, unverified: [y]}}",
            "unverified names 'y', which the entry does not give",
        ),
        ("checkpoints: {a/b: {unverified: [licence]}}", "unverified names 'licence', which the entry does not give"),
        ("checkpoints: {a/b: {config: {x: 1}, unverified: [x], paper: [x]}}", "x is both of a paper and unverified"),
        ("checkpoints: {a/b: 3}", "expected 'key: value' lines"),
        ("checkpoints: [a]", "checkpoints: expected 'key: value' lines"),
        ("pairs: 3", "pairs: expected 'key: value' lines"),
        ("smollm: {target: a/b}", "unknown key 'smollm'; known keys: pairs, checkpoints"),
        ("- p", "expected 'key: value' lines"),
        ("p: [", "is not YAML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    refused(written(tmp_path, text), says)


def refused(path: Path, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_registry(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_registry(tmp_path / "none.yaml")


def test_what_a_file_contradicts() -> None:
    source = load_registry().checkpoints["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"]
    assert source.contradictions(source.config) == [] == source.contradictions({"unheard_of": 1})
    # an older and a newer place of the same key
    moved = {"dflash_config": {"block_size": 16, "mask_token_id": 5}, "rope_parameters": {"rope_theta": 500000.0}}
    assert source.contradictions(moved) == [
        f"{source.name}: dflash_config.block_size is 16 in its file, which counts; the registry says 10",
        f"{source.name}: dflash_config.mask_token_id is 5 in its file, which counts; the registry says 128002",
    ]


def test_finding_checkpoints_imports_no_torch() -> None:
    code = (
        "import foldspec.checkpoints.registry, foldspec.checkpoints.resolve, foldspec.checkpoints.embedded, sys;"
        "import foldspec.checkpoints.headers, foldspec.checkpoints.shapes; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
