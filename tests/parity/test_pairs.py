"""Traces of tiny trained pairs, made in float64 by code that shares nothing with foldspec, met round by round."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from foldspec import Completion, Engine, SamplingParams, cli
from foldspec.context import METHODS as CONTEXTS
from foldspec.drafters.dspark import ConfidenceHead

METHODS = ("full", "window", "fold", "shared_window", "streaming", "yarn", "rerope", "infllm", "cmr")
# cases of each pair: a new pair is a folder of tests/golden/pairs and a line here
COUNTS = {
    "a_llama_zlab": 69,
    "b_qwen3_zlab_mixed": 76,
    "c_qwen3_deepspec_dflash": 69,
    "d_qwen3_dspark": 80,
    "e_gemma4_dspark": 80,
    "f_qwen3_5_zlab_mixed": 76,
    "g_llama_oracle": 69,
}
NAMES = tuple(COUNTS)
CASES = [
    (pair, file, name)
    for pair in NAMES
    for file, golden in tiny.golden_cases(pair).items()
    for name, case in golden["cases"].items()
]
Rounds = list[tuple[int, list[int], int, list[int]]]


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    with tiny.load_pair(request.param) as engine:
        yield request.param, engine


def options(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"context": case["method"], **case["params"], "confidence_stop": case.get("confidence_threshold", 0.0)}


def rounds(completion: Completion) -> Rounds:
    return [(r.anchor_pos, list(r.drafted), r.accepted, list(r.committed)) for r in completion.rounds]


def golden_rounds(case: Mapping[str, Any]) -> Rounds:
    """The rounds before the token budget clips a block: the ones to compare."""
    comparable = case["rounds"][: case["n_comparable_rounds"]]
    verified = [r["drafted"][: r.get("verified_drafts")] for r in comparable]  # those that the confidence head lets by
    return [(r["anchor_pos"], v, r["accepted"], r["committed"]) for r, v in zip(comparable, verified, strict=True)]


def check(case: Mapping[str, Any], output: Sequence[int], traced: Rounds) -> None:
    wanted = golden_rounds(case)
    assert list(output) == case["output_ids"]
    assert wanted and traced[: len(wanted)] == wanted


def test_no_case_was_lost() -> None:
    assert {path.name for path in tiny.PAIRS.iterdir()} == set(NAMES)
    for pair, count in COUNTS.items():
        files = tiny.golden_cases(pair).values()
        assert len(files) == 7 and sum(len(golden["cases"]) for golden in files) == count
        assert {case["method"] for golden in files for case in golden["cases"].values()} == set(METHODS)
    assert set(METHODS) <= set(CONTEXTS)


@pytest.mark.parametrize("place", range(7))
def test_every_comparable_round_of_every_case(pair: tuple[str, Engine], place: int) -> None:
    """All methods of one golden file, from a prefill of their own each."""
    name, engine = pair
    file, golden = list(tiny.golden_cases(name).items())[place]
    for case_name, case in golden["cases"].items():
        params = SamplingParams(max_tokens=golden["max_new"], ignore_eos=True, stop_ids=tuple(case.get("stop_ids", ())))
        done = engine.using(**options(case)).generate(golden["prompts"][case["prompt"]], params)
        try:
            check(case, done.token_ids, rounds(done))
        except AssertionError as error:
            raise AssertionError(f"{name} {file} {case_name}: {error}") from None
        assert done.finish_reason == ("stop" if case.get("stop_ids") else "length")


@pytest.mark.parametrize("file", ["len0029", "len0072", "len0200", "len0400"])
def test_the_confidence_of_every_draft_is_the_recorded_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = tiny.golden_cases("d_qwen3_dspark")[file]
    case = golden["cases"]["full_conf"]
    found: list[float] = []
    original = ConfidenceHead.forward

    def watched(head: ConfidenceHead, x: torch.Tensor) -> torch.Tensor:
        sure = original(head, x)
        found.extend(torch.logit(sure.double()).tolist())
        return sure

    monkeypatch.setattr(ConfidenceHead, "forward", watched)
    with tiny.load_pair("d_qwen3_dspark") as engine:
        params = SamplingParams(max_tokens=golden["max_new"] + 8, ignore_eos=True)  # the last blocks are whole too
        engine.using(**options(case)).generate(golden["prompts"][case["prompt"]], params)
    wanted = [each for r in case["rounds"][: case["n_comparable_rounds"]] for each in r["confidence_logits"]]
    assert len(wanted) >= 5 and found[: len(wanted)] == pytest.approx(wanted, abs=1e-4)
    assert any(r.get("verified_drafts", 99) < len(r["drafted"]) for r in case["rounds"])


@pytest.mark.parametrize("file", ["len0025", "len0200"])
def test_plain_decoding_gives_the_same_ids(pair: tuple[str, Engine], file: str) -> None:
    name, engine = pair
    golden = tiny.golden_cases(name)[file]
    plain = engine.using(draft_tokens=0)
    params = SamplingParams(max_tokens=golden["max_new"], ignore_eos=True)
    done = plain.generate(golden["prompts"], params)
    assert [list(d.token_ids) for d in done] == golden["ar_output_ids"]
    assert all(r.drafted == () and r.accepted == 0 and len(r.committed) == 1 for d in done for r in d.rounds)


@pytest.mark.parametrize("drafts", [1, 3])
def test_fewer_drafts_a_round_are_the_first_of_the_block(pair: tuple[str, Engine], drafts: int) -> None:
    """The block is drafted whole, as trained; only the first drafts are verified. The first round is the golden one."""
    name, engine = pair
    golden = tiny.golden_cases(name)["len0072"]
    case = golden["cases"]["fold_a2"]
    params = SamplingParams(max_tokens=golden["max_new"], ignore_eos=True)
    done = engine.using(**options(case), draft_tokens=drafts).generate(golden["prompts"][case["prompt"]], params)
    assert list(done.token_ids) == case["output_ids"]
    assert list(done.rounds[0].drafted) == case["rounds"][0]["drafted"][:drafts]
    assert max(len(r.drafted) for r in done.rounds) == drafts


def arguments(pair: str, golden: Mapping[str, Any], case: Mapping[str, Any], ids: str) -> list[str]:
    """The command line of a case."""
    folder = tiny.PAIRS / pair
    words = ["generate", "--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    words += ["--prompt-ids", ids, "--max-tokens", str(golden["max_new"]), "--ignore-eos", "--json", "--trace"]
    words += ["--context", case["method"], *(f"--context-opt={key}={value}" for key, value in case["params"].items())]
    if case.get("confidence_threshold"):
        words += ["--confidence-stop", str(case["confidence_threshold"])]
    if case.get("stop_ids"):
        words += ["--stop-ids", ",".join(map(str, case["stop_ids"]))]
    return words


def check_json(case: Mapping[str, Any], prompt: Sequence[int], stdout: str) -> None:
    report = json.loads(stdout.splitlines()[-1])
    assert report["schema"] == "foldspec.generate/1" and report["prompt_ids"] == list(prompt)
    assert report["text"] == "" and report["lossless"] is True
    traced = [(r["anchor_pos"], r["drafted"], r["accepted"], r["committed"]) for r in report["rounds"]]
    check(case, report["token_ids"], traced)


@pytest.mark.parametrize(("pair_name", "file", "name"), [case for case in CASES if case[1] in ("len0025", "len0200")])
def test_the_command_line_gives_the_same_rounds(
    pair_name: str, file: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    golden = tiny.golden_cases(pair_name)[file]
    case = golden["cases"][name]
    prompt = golden["prompts"][case["prompt"]]
    assert cli.main(arguments(pair_name, golden, case, ",".join(map(str, prompt)))) == 0
    check_json(case, prompt, capfd.readouterr().out)


def test_ids_may_come_from_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    golden = tiny.golden_cases(NAMES[0])["len0072"]
    case = golden["cases"]["fold_a2"]
    prompt = golden["prompts"][case["prompt"]]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(prompt))
    assert cli.main(arguments(NAMES[0], golden, case, str(file))) == 0
    check_json(case, prompt, capfd.readouterr().out)


def test_the_command_line_in_a_process_of_its_own() -> None:
    golden = tiny.golden_cases(NAMES[0])["len0200"]
    case = golden["cases"]["fold_a2"]
    prompt = golden["prompts"][case["prompt"]]
    words = arguments(NAMES[0], golden, case, ",".join(map(str, prompt)))
    done = subprocess.run(
        [sys.executable, "-m", "foldspec.cli", *words], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    check_json(case, prompt, done.stdout)
