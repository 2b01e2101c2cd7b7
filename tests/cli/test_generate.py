"""``foldspec generate``: what it prints, where it ends, what a prompt may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.command import (
    BOS,
    EOS,
    PAIR,
    TEMPLATE,
    Result,
    command,
    copied,
    edit,
    generate,
    main,
    pair_words,
    start,
    swap_ids,
    tie_ids,
    with_text,
    word,
)

from foldspec import Engine, SamplingParams
from foldspec.schedule.rounds import Rounds

B = 6
GOLDEN = tiny.golden_cases("a_llama_zlab")["len0072"]
PROMPT, ANSWER = GOLDEN["prompts"][0], GOLDEN["ar_output_ids"][0]  # plain decoding, 32 ids
IDS = ",".join(map(str, PROMPT))
SMALL = ["--window", 24, "--prompt-ids", IDS]
KEYS = ["schema", "prompt_ids", "token_ids", "text", "finish_reason", "stopped_by", "usage"]
KEYS += ["tau", "by_position", "tpot_ms", "ttft_ms", "lossless", "law", "outside", "made_up", "settings", "env"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The pair with a tokenizer."""
    return with_text(copied(tmp_path / "words"))


def report(*arguments: object, pair: Path = PAIR, code: int = 0) -> dict[str, Any]:
    done = generate(*arguments, "--json", "--trace", "--quiet", pair=pair)
    assert done.code == code and done.err == "" and done.out.count("\n") == 1, done
    rounds = done.json["rounds"]
    usage = {"prompt_tokens": len(done.json["prompt_ids"]), "completion_tokens": len(done.json["token_ids"])}
    assert done.json["usage"] == usage and (done.json["stopped_by"] is None) == (done.json["finish_reason"] != "stop")
    committed = [token for r in rounds for token in r["committed"]]
    assert committed == done.json["token_ids"][1:]
    assert done.json["tau"] == (pytest.approx(len(committed) / len(rounds)) if rounds else None)
    for r in rounds:
        agreed = min(r["accepted"], len(r["committed"]))
        assert len(r["drafted"]) <= B - 1 and r["committed"][:agreed] == r["drafted"][:agreed]
    return done.json


def test_the_json_object() -> None:
    done = generate(*SMALL, "--max-tokens", 32, "--ignore-eos", "--json")
    assert done.code == 0 and list(done.json) == KEYS
    traced = report(*SMALL, "--max-tokens", 32, "--ignore-eos")
    assert list(traced) == [*KEYS, "rounds", "times_ms"]
    assert len(traced["times_ms"]) == len(traced["rounds"]) + 1
    assert all(
        list(r) == ["anchor_pos", "drafted", "accepted", "committed", "outside", "steps"] for r in traced["rounds"]
    )
    assert traced["schema"] == "foldspec.generate/1" and traced["lossless"] is True and traced["text"] == ""
    assert traced["prompt_ids"] == PROMPT and traced["token_ids"] == ANSWER == done.json["token_ids"]
    assert traced["finish_reason"] == "length" and traced["tau"] > 1 and traced["tpot_ms"] > 0 and traced["ttft_ms"] > 0
    asked = {"context": "fold", "window": 24, "alpha": 2.0, "accept": "exact", "max_tokens": 32, "ignore_eos": True}
    assert asked.items() <= traced["settings"].items()
    assert traced["settings"]["target"] == {"name": str(PAIR / "target"), "revision": None}
    assert {"foldspec", "python", "torch", "device", "threads", "kernels"} <= traced["env"].keys()
    anchors = [r["anchor_pos"] for r in traced["rounds"]]
    assert anchors[0] == len(PROMPT) and anchors == sorted(set(anchors))


def test_prompt_lookup_by_its_name() -> None:
    arguments = [*SMALL, "--max-tokens", 32, "--ignore-eos", "--json", "--trace", "--drafter", "lookup"]
    done = main("generate", "--target", PAIR / "target", *arguments)
    assert done.code == 0 and done.json["token_ids"] == ANSWER
    assert done.json["settings"]["drafter"] == {"name": "lookup", "revision": None}
    assert max(len(r["drafted"]) for r in done.json["rounds"]) > B - 1  # seven, not the pair's five


def test_every_way_to_decode_gives_the_same_ids() -> None:
    ways: list[list[object]] = [[f"--context={name}"] for name in ("full", "window", "fold")]
    ways += [["--alpha", 4], ["--context-opt", "alpha=1"], ["--context-opt", "far_boundary=complement"]]
    ways += [["--draft-tokens", n] for n in (0, 1, 3, 99)] + [["--drafter", "none"], ["--kernels", "reference"]]
    ways += [["--prefill-chunk", n] for n in (1, 7, 10**9)] + [["--page-size", 16], ["--threads", 1]]
    # a window wider than anything, in numbers that no tensor could have, reads as `full` does
    ways += [["--window", 10**9], ["--window", 10**25], ["--temperature", "0"], ["--temperature=-0.0"]]
    seen = {}
    for way in ways:
        done = report(*SMALL, "--max-tokens", 32, "--ignore-eos", *way)
        assert done["token_ids"] == ANSWER, way
        seen[str(way)] = [r["drafted"] for r in done["rounds"]]
    full = seen["['--context=full']"]
    assert seen[f"['--window', {10**9}]"] == seen[f"['--window', {10**25}]"] == full
    fold = seen["['--context=fold']"]
    assert fold != full and all(seen[f"['--prefill-chunk', {n}]"] == fold for n in (1, 7, 10**9))
    assert seen["['--page-size', 16]"] == fold


def test_tau_and_drafts_by_position_are_reported_together() -> None:
    """Longer drafts: the share that stands falls while tau rises, so neither is told without the other."""
    taus, shares = [], []
    for most in (1, 3, 7):  # the pair's block holds five
        long = [*SMALL, "--max-tokens", 64, "--ignore-eos", "--draft-tokens", most]
        done = report(*long)
        rounds, counts = done["rounds"], [tuple(each.values()) for each in done["by_position"]]
        assert list(done["by_position"][0]) == ["accepted", "drafted"] and len(counts) == min(most, B - 1)
        for i, (accepted, drafted) in enumerate(counts):
            assert drafted == sum(len(r["drafted"]) > i for r in rounds)
            assert accepted == sum(r["accepted"] > i for r in rounds)
        total = sum(accepted for accepted, _ in counts)
        assert done["tau"] == pytest.approx(total / len(rounds) + 1)  # nothing was cut
        taus.append(done["tau"])
        shares.append(total / sum(drafted for _, drafted in counts))
    assert taus == sorted(taus) and shares == sorted(shares, reverse=True) and taus[0] < taus[2]
    assert report(*SMALL, "--max-tokens", 8, "--draft-tokens", 0)["by_position"] == []


def test_block_drafts_are_argmax_unless_drawing_is_asked_for() -> None:
    """At temperature 1, with a tau for each. Argmax drafts are the same whatever the seed; drawn ones are not."""
    loose = [*SMALL, "--max-tokens", 32, "--ignore-eos", "--temperature", 1]
    first: dict[str, set[tuple[int, ...]]] = {}
    for way, more in {"argmax": [], "drawn": ["--draft-temperature", 1.5]}.items():
        for seed in range(3):
            done = report(*loose, "--seed", seed, "--logit-bias", f"{ANSWER[0]}=1000", "--max-tokens", 7, *more)
            first.setdefault(way, set()).add(tuple(done["rounds"][0]["drafted"]))  # after one and the same anchor
            whole = report(*loose, "--seed", seed, *more)
            assert whole["tau"] == pytest.approx(31 / len(whole["rounds"])) and 1 <= whole["tau"] <= B
            assert whole["settings"]["draft_temperature"] == (1.5 if more else 0.0) and whole["lossless"] is True
    greedy = report(*SMALL, "--max-tokens", 7, "--ignore-eos")["rounds"][0]["drafted"]
    assert first["argmax"] == {tuple(greedy)} and len(first["drawn"]) > 1


def test_lossy_output_says_so() -> None:
    """On stderr, where text goes out, and in the JSON: the law in words, and tokens that the target's law rules out.
    lambda 0 is plain decoding, at lambda 1 every draft stands; the same holds where tokens are drawn."""
    asked = [*SMALL, "--max-tokens", 32, "--ignore-eos", "--accept", "linear"]
    strict, lossy = (report(*asked, "--leniency", share) for share in (0, 1))
    assert strict["token_ids"] == ANSWER and strict["lossless"] is True and strict["outside"] == 0
    assert strict["settings"]["leniency"] == 0 and "the target's own" in strict["law"]
    assert lossy["token_ids"] != ANSWER and lossy["lossless"] is False
    assert lossy["law"] == lossy["settings"]["law"] and lossy["law"].startswith("not the target's: at drafted")
    assert all(r["accepted"] == len(r["drafted"]) for r in lossy["rounds"])
    counts = [r["outside"] for r in lossy["rounds"]]
    assert lossy["outside"] == sum(counts) > 0 and all(0 <= n <= B - 1 for n in counts)
    done = generate(*asked, "--leniency", 1)
    counted = f"tokens that the target's own law rules out: {lossy['outside']}"
    assert f"lossy (linear): {lossy['law']}; {counted}" in done.err.splitlines()
    assert "lossy" not in generate(*asked, "--leniency", 0).err
    drawn = [*asked[:-2], "--temperature", 1, "--draft-temperature", 1, "--top-k", 2, "--seed", 4]
    exact = report(*drawn, "--accept", "exact")
    mine, open_end = (report(*drawn, "--accept", "linear", "--leniency", share) for share in (0, 1))
    assert mine["rounds"] == exact["rounds"] != open_end["rounds"]
    assert all(r["accepted"] == len(r["drafted"]) for r in open_end["rounds"]) and open_end["outside"] > 0
    some = report(*drawn, "--accept", "linear", "--leniency", "1/0")
    assert some["settings"]["leniency"] == [1.0, 0.0] and all(r["accepted"] >= 1 for r in some["rounds"][:-1])
    for rule, more in {"cactus": ["--leniency", 0.5], "typical": ["--accept-opt", "epsilon=0.01"]}.items():
        assert report(*drawn, "--accept", rule, *more)["lossless"] is False
    assert (
        "an interpretation"
        in report(*drawn, "--accept", "cactus", "--leniency", 1, "--accept-opt", "divergence=modified")["law"]
    )


def test_half_precision_runs() -> None:
    for dtype in ("bfloat16", "float16"):
        assert report(*SMALL, "--max-tokens", 4, "--dtype", dtype)["settings"]["dtype"] == dtype


def test_max_tokens_is_met_exactly() -> None:
    with Engine.load(target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), window=24) as engine:
        for limit in range(1, B + 3):
            pieces = list(engine.stream(PROMPT, SamplingParams(max_tokens=limit, ignore_eos=True)))
            assert [token for piece in pieces for token in piece.token_ids] == ANSWER[:limit]
            done = report(*SMALL, "--max-tokens", limit, "--ignore-eos")
            assert done["token_ids"] == ANSWER[:limit] and done["finish_reason"] == "length"
            assert len(done["rounds"]) == len(pieces) - 1
            # the target's own token takes the last place, so that no draft is verified in vain
            assert all(len(r["drafted"]) <= limit - 1 - (r["anchor_pos"] - len(PROMPT)) for r in done["rounds"])


def test_no_token_at_all_needs_no_forward(monkeypatch: pytest.MonkeyPatch, words: Path) -> None:
    monkeypatch.setattr(Rounds, "round", None)
    monkeypatch.setattr("foldspec.schedule.rounds.Rounds.step", None)
    monkeypatch.setattr("foldspec.models.llama.Llama.forward", None)
    monkeypatch.setattr("foldspec.drafters.dflash.DFlash.absorb", None)
    done = report(*SMALL, "--max-tokens", 0)
    assert done["token_ids"] == [] and done["finish_reason"] == "length" and done["rounds"] == []
    assert done["tau"] is done["tpot_ms"] is done["ttft_ms"] is None
    assert generate("-p", "w5", "--max-tokens", 0, "--quiet", pair=words) == Result(0, "", "")


@pytest.mark.parametrize("room", [1, 3, B, B + 1])
def test_the_context_ends_the_output(room: int) -> None:
    done = report(*SMALL, "--ignore-eos", "--max-context", len(PROMPT) + room)
    assert done["token_ids"] == ANSWER[:room] and done["finish_reason"] == "length"


def test_the_models_own_limit_ends_the_output() -> None:
    long = ",".join(str(5 + i % 400) for i in range(2048 - 3))
    done = report("--prompt-ids", long, "--window", 24, "--ignore-eos")
    plain = report("--prompt-ids", long, "--drafter", "none", "--ignore-eos")
    assert len(done["token_ids"]) == 3 and done["token_ids"] == plain["token_ids"]


def test_the_second_of_two_declared_stop_ids(tmp_path: Path) -> None:
    first = next(i for i in range(8, 32) if ANSWER[i] not in ANSWER[:i] and ANSWER[i] not in PROMPT)
    pair = swap_ids(copied(tmp_path / "pair"), ANSWER[first], 3)  # generation_config.json declares 2 and 3
    done = report(*SMALL, pair=pair)
    assert done["token_ids"] == [*ANSWER[:first], 3] and (done["finish_reason"], done["stopped_by"]) == ("stop", 3)
    on = report(*SMALL, "--ignore-eos", "--max-tokens", 32, pair=pair)
    assert len(on["token_ids"]) == 32 and on["token_ids"][: first + 1] == done["token_ids"]
    again = report(*SMALL, "--ignore-eos", "--stop-ids", "3", pair=pair)
    assert again["token_ids"] == done["token_ids"] and again["finish_reason"] == "stop"


def test_of_two_tied_ids_the_lower_one_is_said_whatever_is_drafted(tmp_path: Path) -> None:
    """Two rows of the head are equal, so two logits tie at every position: fp32 on a CPU needs no excuse for it."""
    high = ANSWER[5]
    low = next(i for i in range(4, high) if i not in (*ANSWER, *PROMPT))
    pair = tie_ids(copied(tmp_path / "pair"), high, low)
    wanted = [low if token == high else token for token in ANSWER]
    drawn = ["--draft-temperature", 0.5]
    ways: list[list[object]] = [[], ["--draft-tokens", 0], ["--accept", "match"], ["--context", "full"]]
    ways += [[*drawn, "--seed", seed, "--accept", rule] for seed in range(6) for rule in ("exact", "match")]
    drafted = []
    for way in ways:
        done = report(*SMALL, "--max-tokens", 32, "--ignore-eos", *way, pair=pair)
        assert done["token_ids"] == wanted, way
        drafted += [token for r in done["rounds"] for token in r["drafted"]]
        (place,) = (i for i, token in enumerate(done["token_ids"]) if token == low)
        for r in done["rounds"]:
            at = place - (r["anchor_pos"] - len(PROMPT)) - 1  # where in the block the tied token stands
            if 0 <= at < len(r["drafted"]) and r["drafted"][at] == high:
                assert r["accepted"] <= at
    assert low in drafted and high in drafted  # the wrong one of the two was proposed, and refused


def test_a_stop_id_inside_an_accepted_run() -> None:
    whole = report(*SMALL, "--ignore-eos", "--max-tokens", 32)
    cut = 0
    for at in range(1, 32):
        if ANSWER[at] in ANSWER[:at]:
            continue
        done = report(*SMALL, "--stop-ids", f"510,{ANSWER[at]}", "--max-tokens", 32)
        assert done["token_ids"] == ANSWER[: at + 1] and done["finish_reason"] == "stop"
        same = next(r for r in whole["rounds"] if r["anchor_pos"] == done["rounds"][-1]["anchor_pos"])
        assert done["rounds"][-1]["accepted"] == same["accepted"]
        cut += len(done["rounds"][-1]["committed"]) < len(same["committed"])
    assert cut > 5
    # on the last token that the limit allows, stopping is the reason
    assert report(*SMALL, "--stop-ids", ANSWER[0], "--max-tokens", 1)["finish_reason"] == "stop"


def test_the_drafters_mask_id_is_an_id_like_any_other(tmp_path: Path) -> None:
    mask = 511
    plain = report(*SMALL, "--stop-ids", mask, "--ignore-eos", "--max-tokens", 32)
    assert plain["token_ids"] == ANSWER  # a block is full of masks, of which none is committed
    at = next(i for i in range(5, 32) if ANSWER[i] not in ANSWER[:i] and ANSWER[i] not in PROMPT)
    pair = swap_ids(with_text(copied(tmp_path / "pair")), ANSWER[at], mask)
    wanted = [mask if token == ANSWER[at] else token for token in ANSWER]
    whole = report(*SMALL, "--ignore-eos", "--max-tokens", 32, pair=pair)
    assert whole["token_ids"] == wanted and whole["text"] == " ".join(word(i) for i in wanted)
    done = report(*SMALL, "--ignore-eos", "--stop-ids", mask, pair=pair)
    assert done["token_ids"] == wanted[: at + 1] and done["finish_reason"] == "stop"


def test_text_goes_to_stdout_and_the_rest_to_stderr(words: Path) -> None:
    text = generate(*SMALL, "--max-tokens", 32, "--ignore-eos", pair=words)
    done = report(*SMALL, "--max-tokens", 32, "--ignore-eos", pair=words)
    assert done["text"] == " ".join(word(i) for i in ANSWER) and "\u00fc" in done["text"]
    assert text.code == 0 and text.out == done["text"] + "\n"
    assert text.err.startswith("32 tokens, tau ") and text.err.endswith(", length\n") and text.err.count("\n") == 1
    quiet = generate(*SMALL, "--max-tokens", 32, "--ignore-eos", "--quiet", pair=words)
    assert quiet == Result(0, text.out, "")
    ends = report(*SMALL, "--max-tokens", 32, "--stop-ids", ANSWER[4], pair=words)
    assert ends["text"].split() == [word(i).strip() for i in ANSWER[:5]]


def test_special_tokens_are_ids_without_text(words: Path) -> None:
    pair = swap_ids(words, ANSWER[3], EOS)
    done = report(*SMALL, "--max-tokens", 32, pair=pair)
    assert done["token_ids"] == [*ANSWER[:3], EOS] and done["finish_reason"] == "stop"
    assert done["text"] == " ".join(word(i) for i in ANSWER[:3])


def test_without_a_tokenizer_there_is_no_text() -> None:
    done = generate(*SMALL, "--max-tokens", 4)
    assert done.code == 0 and done.out == "" and "has no tokenizer.json" in done.err.splitlines()[-1]
    assert generate(*SMALL, "--max-tokens", 4, "--quiet") == Result(0, "", "")


def test_a_prompt_in_every_form(words: Path, tmp_path: Path) -> None:
    wanted = [5, 8, 10, 11]
    text = " ".join(word(i) for i in wanted)
    forms: list[list[object]] = [["-p", text], ["--prompt", f"  {text}\n"], ["--prompt-ids", "5,8,10,11"]]
    forms += [["--prompt-ids", " 5 8, 10 ,11 "], ["--prompt-ids", "[5, 8, 10, 11]"]]
    for name, content in {
        "text": text.encode(),
        "mark": b"\xef\xbb\xbf" + text.encode(),  # as some editors write UTF-8
        "lines": text.replace(" ", "\r\n").encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        forms.append(["--prompt-file", tmp_path / name])
    for name, content in {
        "ids": b"5,8,10,11\n",
        "json": b"[5,\n 8, 10, 11]",
        "column": b"\xef\xbb\xbf5\n8\n10\n11",
    }.items():
        (tmp_path / name).write_bytes(content)
        forms.append(["--prompt-ids", tmp_path / name])
    for form in forms:
        assert report(*form, "--max-tokens", 1, pair=words)["prompt_ids"] == wanted, form


def test_bos_stands_once(tmp_path: Path) -> None:
    pair = with_text(copied(tmp_path / "pair"), bos=True)
    for text, wanted in {"": [BOS], "w5 w8": [BOS, 5, 8], "<bos> w5": [BOS, 5]}.items():
        done = report("-p", text, "--max-tokens", 3, pair=pair)
        assert done["prompt_ids"] == wanted and len(done["token_ids"]) == 3
    assert report("--prompt-ids", "5", "--max-tokens", 1, pair=pair)["prompt_ids"] == [5]  # ids go in as they are


def test_the_chat_template(tmp_path: Path) -> None:
    pair = with_text(copied(tmp_path / "pair"), bos=True, template=TEMPLATE)
    user, system, think = 400, 401, 402
    cases: dict[tuple[str, ...], list[int]] = {
        (): [BOS, user, 5],  # a template that is there is used, and has written BOS itself
        ("--chat",): [BOS, user, 5],
        ("--no-chat",): [BOS, 5],
        ("--system", "w8"): [BOS, system, 8, user, 5],
        ("--system", ""): [BOS, system, user, 5],
        ("--thinking", "on"): [BOS, user, 5, think],
        ("--thinking", "off"): [BOS, user, 5],
    }
    for words, wanted in cases.items():
        done = report("-p", "w5", "--max-tokens", 1, *words, pair=pair)
        assert done["prompt_ids"] == wanted, words
        settings = done["settings"]
        given = dict(zip(words[::2], words[1::2], strict=False))
        assert settings["chat"] is ("--no-chat" not in words)
        assert (settings["system"], settings["thinking"]) == (given.get("--system"), given.get("--thinking"))
    assert report("--prompt-ids", "5", "--max-tokens", 1, pair=pair)["settings"]["chat"] is False


def test_nothing_of_a_request_reaches_the_next() -> None:
    with Engine.load(target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), window=24) as engine:
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        other = tiny.prompt(150, 512)
        runs = [engine.generate(ids, params) for ids in (PROMPT, other, PROMPT)]
        assert runs[0].token_ids == runs[2].token_ids and runs[0].rounds == runs[2].rounds
        cancelled = engine.stream(other, params)
        next(cancelled)
        cancelled.close()
        assert cancelled.completion.finish_reason == "cancelled" and len(cancelled.completion.token_ids) == 1
        again = engine.generate(PROMPT, params)
        assert again.token_ids == runs[0].token_ids and again.rounds == runs[0].rounds
    one, two, three = (report("--prompt-ids", ids, "--max-tokens", 8) for ids in (IDS, "7,8,9", IDS))
    assert one["rounds"] == three["rounds"] != two["rounds"]


def test_a_process_of_its_own_reads_stdin_and_writes_what_this_one_does(words: Path, tmp_path: Path) -> None:
    text = " ".join(word(i).strip() for i in PROMPT)
    arguments = [*pair_words(words), "--window", 24, "--max-tokens", 32, "--ignore-eos"]
    plain, narrow = (
        start(tmp_path, command("generate", *arguments, "--prompt-file", "-"), env, stdin=-1, encoding="utf-8")
        for env in ({"PYTHONIOENCODING": "utf-8"}, {"PYTHONIOENCODING": "ascii"})
    )
    outputs = [process.communicate(text, timeout=120) for process in (plain, narrow)]
    wanted = generate("--window", 24, "--max-tokens", 32, "--ignore-eos", "-p", text, pair=words).out
    assert plain.returncode == narrow.returncode == 0, outputs
    assert outputs[0][0] == wanted
    assert outputs[1][0] == wanted.encode("ascii", "backslashreplace").decode()  # and no traceback


def test_settings_of_the_pair_are_told_from_given_ones(tmp_path: Path) -> None:
    assert report(*SMALL[2:], "--max-tokens", 1)["settings"]["window"] == 2048  # of a pair that the registry lacks
    pair = copied(tmp_path / "pair")
    edit(pair / "target" / "config.json", max_position_embeddings=128)
    assert report(*SMALL, "--max-tokens", 1, pair=pair)["settings"]["max_context"] == 128
    assert json.loads(generate(*SMALL, "--max-tokens", 1, "--json").out)["settings"]["max_context"] == 2048


def test_sampled_output_and_its_seed() -> None:
    """``match`` gives the ids of seeded plain decoding; a fresh seed is told, and gives the same text once more."""
    loose = [*SMALL, "--max-tokens", 32, "--ignore-eos", "--temperature", 3, "--top-p", 0.95]
    plain = report(*loose, "--seed", 7, "--draft-tokens", 0)
    drawn = ["--accept", "match", "--draft-temperature", 0.7, "--draft-noise", "shared"]
    done = report(*loose, "--seed", 7, *drawn)
    assert done["token_ids"] == plain["token_ids"] != ANSWER and done["lossless"] is True
    settings = done["settings"]
    assert (settings["temperature"], settings["top_p"], settings["seed"]) == (3.0, 0.95, 7)
    assert (settings["draft_temperature"], settings["draft_noise"], settings["accept"]) == (0.7, "shared", "match")
    fresh = [report(*loose, "--logit-bias", "5=1.5", "--min-p", 0.01, "--top-k", 50) for _ in range(2)]
    first, second = (one["settings"]["seed"] for one in fresh)
    assert first != second and fresh[0]["settings"]["logit_bias"] == [[5, 1.5]]
    again = report(*loose, "--logit-bias", "5=1.5", "--min-p", 0.01, "--top-k", 50, "--seed", first)
    assert again["token_ids"] == fresh[0]["token_ids"] != fresh[1]["token_ids"]


def test_penalties_and_biases_reach_the_output() -> None:
    """Negative ones make the text repeat itself; this answer has no token twice, so that others would not be seen."""
    for option in ("--frequency-penalty=-1000", "--presence-penalty=-1000"):
        assert report(*SMALL, "--max-tokens", 5, "--ignore-eos", option)["token_ids"] == ANSWER[:1] * 5
    assert report(*SMALL, "--max-tokens", 5, "--logit-bias", "9=1000", "--ignore-eos")["token_ids"] == [9] * 5
    loved = report(*SMALL, "--max-tokens", 8, "--ignore-eos", "--repetition-penalty", 0.001)["token_ids"]
    assert loved != ANSWER[:8]
