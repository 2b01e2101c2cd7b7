"""``foldspec generate --prompts``: what a file may say, what is refused before weights are read, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.command import BOS, MESSAGES, PAIR, TEMPLATE, Result, copied, generate, main, pair_words, refused, with_text

from foldspec.cli_prompts import parse
from foldspec.errors import UsageError
from foldspec.options import SamplingParams

IDS = [5, 6, 7, 8]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def lines(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


def test_each_answer_is_that_of_the_prompt_alone(tmp_path: Path) -> None:
    asked = [
        {"prompt_ids": IDS, "max_tokens": 12, "ignore_eos": True},
        {"prompt_ids": [*IDS, 9], "id": "short", "max_tokens": 1},
        "",
        {"prompt_ids": IDS * 20, "id": 7},
    ]
    done = generate("--prompts", written(tmp_path, *asked), "--max-tokens", 5, "--json", "--trace", "--max-batch", 2)
    assert done.code == 0
    found = {line["id"]: line for line in lines(done)}
    assert set(found) == {1, "short", 7} and next(line["id"] for line in lines(done)) == "short"
    ways = {
        1: (IDS, ("--max-tokens", 12, "--ignore-eos")),
        "short": ([*IDS, 9], ("--max-tokens", 1)),
        7: (IDS * 20, ("--max-tokens", 5)),
    }
    for name, (ids, words) in ways.items():
        alone = generate("--prompt-ids", ",".join(map(str, ids)), *words, "--json", "--trace").json
        for key in ("prompt_ids", "token_ids", "text", "finish_reason", "tau", "rounds", "schema"):
            assert found[name][key] == alone[key], key
        assert found[name]["error"] is None and found[name]["settings"]["max_tokens"] == words[1]
        assert len(found[name]["times_ms"]) == len(found[name]["rounds"]) + 1
    assert done.err.startswith("foldspec: memory on cpu: cache tokens ") and done.err.count("\n") == 1
    for part in ("weights", "target cache", "draft cache", "rings", "workspace", "in all", "free"):
        assert f"{part} " in done.err


def test_lossy_answers_are_announced(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt_ids": IDS, "max_tokens": 8, "ignore_eos": True})
    lossy = ("--accept", "linear", "--leniency", 1)
    done = generate("--prompts", file, *lossy, "--json")
    assert done.err.splitlines()[-1].startswith("foldspec: lossy (linear): not the target's")
    (line,) = lines(done)
    assert line["lossless"] is False and line["outside"] > 0 and line["law"].startswith("not the target's")


def test_the_switches_of_a_template_hold_for_every_line(tmp_path: Path) -> None:
    """A system message of a line's own comes before the command line's; ids are what they are."""
    pair = with_text(copied(tmp_path / "pair"), bos=True, template=TEMPLATE)
    user, system, think = 400, 401, 402
    file = written(
        tmp_path,
        {"prompt": "w5"},
        {"messages": [{"role": "user", "content": "w5"}]},
        {"messages": [{"role": "system", "content": "w7"}, {"role": "user", "content": "w5"}]},
        {"prompt_ids": [5]},
    )
    words = ("--prompts", file, "--max-tokens", 1, "--json", "--system", "w8")
    for switch, end in (("on", [think]), ("off", [])):
        found = sorted(lines(generate(*words, "--thinking", switch, pair=pair)), key=lambda line: line["id"])
        wanted = [[BOS, system, 8, user, 5, *end]] * 2 + [[BOS, system, 0, user, 5, *end], [5]]
        assert [line["prompt_ids"] for line in found] == wanted
        assert {(line["settings"]["thinking"], line["settings"]["system"]) for line in found} == {(switch, "w8")}
        assert [line["settings"]["chat"] for line in found] == [True, True, True, False]


def test_a_switch_that_changes_nothing_is_an_error_of_its_lines(tmp_path: Path) -> None:
    pair = with_text(copied(tmp_path / "pair"), template=MESSAGES)
    file = written(tmp_path, {"prompt_ids": [5]}, {"messages": [{"role": "user", "content": "w5"}]}, {"prompt": "w5"})
    done = generate("--prompts", file, "--max-tokens", 1, "--json", "--thinking", "off", pair=pair)
    errors = {line["id"]: line["error"] for line in lines(done)}
    assert done.code == 2 and errors[1] is None
    assert "no thinking switch" in errors[2] and "no thinking switch" in errors[3]


def test_text_and_messages(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    pair = with_text(copied(tmp_path / "pair"), template=template)
    words = ("--max-tokens", 8, "--ignore-eos")
    file = written(
        tmp_path,
        {"prompt": "w5 w6"},
        {"messages": [{"role": "user", "content": "w5"}, {"role": "user", "content": "w6"}]},
    )
    done = generate("--prompts", file, *words, "--quiet", pair=pair)
    alone = generate("-p", "w5 w6", *words, "--quiet", pair=pair).out
    assert done.code == 0 and done.err == "" and f"== 1 (length)\n{alone}" in done.out and "== 2 (length)\n" in done.out
    chats = {
        line["id"]: line["settings"]["chat"] for line in lines(generate("--prompts", file, *words, "--json", pair=pair))
    }
    assert chats == {1: True, 2: True}


def test_a_request_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    file = written(
        tmp_path, {"prompt_ids": [5, 10**6]}, {"prompt_ids": IDS}, {"prompt_ids": [5] * 300}, {"prompt": "a"}
    )
    done = generate("--prompts", file, "--json", "--max-tokens", 3, "--max-context", 200, "--cache-tokens", 200)
    assert done.code == 2
    found = {line["id"]: line for line in lines(done)}
    assert [found[i]["finish_reason"] for i in (1, 2, 3, 4)] == ["error", "length", "error", "error"]
    assert "is not one of the target's" in found[1]["error"] and "300 tokens" in found[3]["error"]
    assert "no tokenizer.json" in found[4]["error"] and found[2]["error"] is None
    assert len([line for line in done.err.splitlines() if line.startswith(("foldspec: 1:", "foldspec: 3:"))]) == 2


BAD = {
    "{": "--prompts line 2: is no request (Expecting property name",
    "[]": "--prompts line 2: must be a JSON object",
    "{}": "--prompts line 2: must have exactly one of prompt, messages, prompt_ids",
    '{"prompt": "a", "prompt_ids": [1]}': "line 2: must have exactly one of",
    '{"prompt": 5}': "--prompts line 2, prompt: must be text",
    '{"messages": []}': "--prompts line 2, messages: must be a list that is not empty",
    '{"messages": [{"role": "user"}]}': "--prompts line 2, messages: must be objects with role and content",
    '{"prompt_ids": [1, true]}': "--prompts line 2, prompt_ids: must be whole numbers",
    '{"prompt": "a", "id": [1]}': "--prompts line 2, id: must be text or a number",
    '{"prompt": "a", "max_token": 5}': "--prompts line 2: has an unknown field 'max_token'",
    '{"prompt": "a", "max_tokens": -1}': "--prompts line 2, max_tokens: must be a whole number of at least 0, not -1",
    '{"prompt": "a", "stop_ids": 5}': "--prompts line 2, stop_ids: must be a list or a tuple, not 5",
    '{"prompt": "a", "logit_bias": {"x": 1}}': "--prompts line 2, logit_bias: must be a whole number of at least 0",
    '{"prompt": "a", "ignore_eos": "false"}': "--prompts line 2, ignore_eos: must be true or false",
    "[" * 100_000: "--prompts line 2: is no request",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_before_any_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr("foldspec.engine.Engine.load", None)
    file = written(tmp_path, {"prompt_ids": IDS}, line)
    refused(main("generate", *pair_words(PAIR), "--prompts", file), 2, BAD[line])


def test_a_file_that_is_no_file_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foldspec.engine.Engine.load", None)
    refused(generate("--prompts", tmp_path / "none"), 2, "--prompts: cannot read")
    refused(generate("--prompts", written(tmp_path, "", " ")), 2, "--prompts: has no requests")
    file = written(tmp_path, {"prompt_ids": IDS})
    refused(generate("--prompts", file, "-p", "a"), 2, "exactly one of")
    for flag in ("--max-batch", "--prefill-budget", "--cache-tokens"):
        refused(main("check", flag, 0), 2, f"{flag[2:].replace('-', '_')}: must be a whole number of at least 1")


def test_fields_of_a_line_stand_before_the_command_lines() -> None:
    (one, two) = parse(
        '{"prompt": "a", "max_tokens": 3}\n{"prompt": "a", "stop_ids": [4]}',
        SamplingParams(max_tokens=7, stop_ids=(9,), ignore_eos=True),
    )
    assert (one.params.max_tokens, one.params.stop_ids, one.params.ignore_eos) == (3, (9,), True)
    assert (two.params.max_tokens, two.params.stop_ids, two.params.ignore_eos) == (7, (4,), True)
    (biased,) = parse('{"prompt": "a", "logit_bias": {"5": 1.5, "3": -1}}', SamplingParams())
    assert biased.params.logit_bias == ((3, -1), (5, 1.5))
    with pytest.raises(UsageError, match="line 1"):
        parse('{"prompt_ids": "1,2"}', SamplingParams())


def test_a_line_ends_with_a_newline_alone() -> None:
    """Other ends of lines may stand in JSON's strings as they are."""
    (one, two) = parse('{"prompt": "a\u2028b\x85c"}\r\n\r\n{"prompt": "d"}\r\n', SamplingParams())
    assert (one.id, one.prompt, two.id, two.prompt) == (1, "a\u2028b\x85c", 3, "d")
