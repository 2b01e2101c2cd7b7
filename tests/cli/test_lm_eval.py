"""``foldspec lm-eval``: what it hands over, how it ends, and a task from end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import lm_eval.__main__
import pytest
from cli.command import command, main, refused, result, start

from foldspec import Engine, SamplingParams
from foldspec.engine import cache_folder
from foldspec.errors import ResourceError

WORDS = ["--tasks", "gsm8k,kv", "--help", "-h", "--model_args", "pair=x", "--", "-1"]


def test_all_words_are_lm_evals(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str]] = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: heard.append(list(sys.argv)))
    before = list(sys.argv)
    assert main("lm-eval", *WORDS) == (0, "", "")
    assert heard == [["lm-eval", "run", "--model", "foldspec", *WORDS]] and sys.argv == before


def test_an_error_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ResourceError("no page is free", do="lower --max-batch")

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", fail)
    before = list(sys.argv)
    refused(main("lm-eval", "--tasks", "gsm8k"), 4, "no page is free; lower --max-batch")
    assert sys.argv == before


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(main("lm-eval", "--tasks", "gsm8k"), 2, "lm-eval: is not installed; pip install 'foldspec[eval]'")


def test_an_lm_eval_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that it needs is missing."""
    monkeypatch.delattr(lm_eval.__main__, "cli_evaluate")
    refused(main("lm-eval", "--tasks", "gsm8k"), 2, "lm-eval: is installed, but cannot be imported (cannot import name")


ROWS: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome"], "answer": "Paris"},
    {"question": "Which is larger, the sun or the moon?", "choices": ["The sun", "The moon"], "answer": "The sun"},
]
KINDS = {
    "choice": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "text": """
output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
}


@pytest.mark.slow
def test_tasks_of_ones_own_on_the_embedded_pair(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    head = 'dataset_path: json\ntest_split: test\ndoc_to_text: "{{question}}"\n'
    head += f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
    for name, text in KINDS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{head}{text}")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "FOLDSPEC_CACHE": str(cache_folder())}
    words = ["lm-eval", "--include_path", tmp_path, "--tasks", "choice,text", "--batch_size", 2, "--log_samples"]
    words.append("--apply_chat_template")
    arguments = ["--model_args", "pair=smollm2-135m,max_context=512", "--output_path", tmp_path / "out"]
    done = result(start(tmp_path / "home", command(*words, *arguments), offline), 300)
    assert done.code == 0, done.err
    assert "|choice|" in done.out and "|text" in done.out

    def read(kind: str) -> list[dict[str, Any]]:
        (path,) = (tmp_path / "out").rglob(f"{kind}_*.json*")
        return [json.loads(line) for line in path.read_text().splitlines()]

    (path,) = (tmp_path / "out").rglob("results_*.json")
    report = json.loads(path.read_text())
    made = report["config"]["foldspec"]
    assert made["settings"]["lossless"] and made["tau"] > 1
    assert (made["texts_generated"], made["texts_scored"], made["cut_to_fit"]) == (2, 4, 0)

    params = SamplingParams(max_tokens=24, stop=("\n\n",))
    with Engine.load("smollm2-135m", max_context=512, draft_tokens=0) as plain:
        for row in read("samples_text"):
            asked = [{"role": "user", "content": ROWS[row["doc_id"]]["question"]}]
            text = plain.generate(asked, params).text
            assert row["resps"] == [[text]]
        for row in read("samples_choice"):
            for i, (logprob, _) in enumerate(each[0] for each in row["resps"]):
                context, choice = row["arguments"][f"gen_args_{i}"].values()
                first, whole = (plain.encode(text) for text in (context, context + choice))
                with plain.prefill(first) as prefix:
                    expected = sum(prefix.score(whole[len(first) :]).logprobs)
                assert float(logprob) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_a_pair_that_there_is_not_ends_in_one_line(tmp_path: Path) -> None:
    words = ["lm-eval", "--model_args", "pair=no-such", "--tasks", "arc_easy"]
    done = result(start(tmp_path, command(*words), {"HF_DATASETS_OFFLINE": "1"}), 300)
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert done.err.splitlines()[-1].startswith("foldspec: ") and "no-such" in done.err.splitlines()[-1]
