"""Options and prompts that cannot be used as given: one line and exit code 2, or 4 for what the machine lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from cli.command import (
    PAIR,
    TEMPLATE,
    Result,
    copied,
    everything,
    generate,
    main,
    pair_words,
    refused,
    swap_ids,
    with_text,
)

IDS = ("--prompt-ids", "5,6,7")
# Before a model is loaded: these are refused for a pair that is nowhere, too.
EARLY: dict[str, tuple[str, ...]] = {
    "--max-tokens -1": ("max_tokens", "at least 0"),
    "--max-tokens 1.5": ("--max-tokens", "1.5"),
    "--max-tokens many": ("--max-tokens", "many"),
    "--temperature -0.1": ("temperature", "at least 0"),
    "--temperature nan": ("temperature", "finite", "nan"),
    "--temperature inf": ("temperature", "finite", "inf"),
    "--temperature warm": ("--temperature", "warm"),
    "--top-k -1": ("top_k", "at least 0"),
    "--top-p 0": ("top_p", "above 0 and at most 1"),
    "--top-p 1.01": ("top_p", "above 0 and at most 1"),
    "--min-p 2": ("min_p", "at least 0 and at most 1"),
    "--repetition-penalty 0": ("repetition_penalty", "above 0"),
    "--presence-penalty nan": ("presence_penalty", "finite"),
    "--frequency-penalty inf": ("frequency_penalty", "finite"),
    "--logit-bias 5": ("--logit-bias 5", "ID=X"),
    "--logit-bias x=1": ("--logit-bias x=1", "ID=X"),
    "--logit-bias 5=1 --logit-bias 5=1": ("--logit-bias 5", "given twice"),
    "--logit-bias=-1=1": ("logit_bias", "at least 0"),
    "--logit-bias 5=inf": ("logit_bias", "finite"),
    "--seed -1": ("seed", "at least 0"),
    "--seed 18446744073709551616": ("seed", "64 bits"),
    "--draft-temperature -1": ("draft_temperature", "at least 0"),
    "--draft-top-k 5": ("draft_top_k", "drafts that are drawn", "draft temperature above 0"),
    "--draft-top-p 0.5": ("draft_top_p", "drafts that are drawn"),
    "--draft-noise shared --draft-temperature 1": ("draft_noise", "match alone"),
    "--draft-noise shared --accept match": ("draft_noise", "drafts that are drawn"),
    "--draft-noise mine": ("--draft-noise", "mine"),
    "--alpha 0.5": ("alpha", "at least 1", "0.5"),
    "--alpha 0": ("alpha", "at least 1"),
    "--alpha -2": ("alpha", "at least 1"),
    "--alpha nan": ("alpha", "at least 1", "nan"),
    "--alpha inf": ("alpha", "at least 1", "inf"),
    "--alpha sharp": ("--alpha", "sharp"),
    "--window 0": ("window", "at least 1"),
    "--window -1": ("window", "at least 1"),
    "--window 2.5": ("--window", "2.5"),
    "--window wide": ("--window", "wide"),
    "--draft-tokens -1": ("draft_tokens", "at least 0"),
    "--context-opt window": ("--context-opt window", "KEY=VALUE"),
    "--context-opt =3": ("--context-opt", "unknown key ''"),
    "--context-opt sunk=4": ("--context-opt", "unknown key 'sunk'", "window, alpha"),
    "--context-opt window=x": ("--context-opt window", "'x' is not a number"),
    "--context-opt window=0": ("window", "at least 1"),
    "--context-opt window=": ("--context-opt window", "not a number"),
    "--context-opt alpha=0.5": ("alpha", "at least 1"),
    "--context-opt alpha=nan": ("alpha", "at least 1"),
    "--context-opt coverage=some": ("coverage", "all, full"),
    "--context-opt far_boundary=E": ("far_boundary", "D, complement"),
    "--context-opt window=9 --context-opt window=9": ("--context-opt window=9", "each key once"),
    "--window 9 --context-opt window=9": ("--window", "given twice"),
    "--alpha 2 --context-opt alpha=2": ("--alpha", "given twice"),
    "--confidence-stop -0.1": ("confidence_stop", "at least 0 and at most 1"),
    "--confidence-stop 1.5": ("confidence_stop", "at least 0 and at most 1"),
    "--confidence-stop nan": ("confidence_stop", "finite"),
    "--confidence-stop sure": ("--confidence-stop", "sure"),
    "--steps 0": ("steps", "at least 1"),
    "--steps few": ("--steps", "few"),
    "--confidence 1.5": ("confidence", "at least 0 and at most 1"),
    "--confidence -0.1": ("confidence", "at least 0 and at most 1"),
    "--confidence nan": ("confidence", "finite"),
    "--confidence 0.9 --order entropy": ("confidence", "not for the order entropy", "dynamic or dynamic_top1"),
    "--confidence 0.9 --entropy-bound 1": ("entropy_bound", "goes without a confidence"),
    "--entropy-bound -1": ("entropy_bound", "at least 0"),
    "--entropy-bound 1 --order static": ("entropy_bound", "not for the order static", "entropy, topk_margin"),
    "--order dynamic": ("confidence", "the order dynamic needs it"),
    "--order best": ("order", "origin, maskgit_plus", "'best'"),
    "--q-mode last": ("q_mode", "exact, reveal_step, point_mass", "'last'"),
    "--accept linear --leniency -0.1": ("leniency", "at least 0 and at most 1", "-0.1"),
    "--accept linear --leniency 1.01": ("leniency", "at most 1", "1.01"),
    "--accept linear --leniency nan": ("leniency", "finite", "nan"),
    "--accept linear --leniency 0.2/1.5": ("leniency", "at most 1", "1.5"),
    "--accept linear --leniency much": ("--leniency", "much"),
    "--accept linear --leniency 0.2/": ("--leniency", "0.2/"),
    "--accept lenience --leniency 0": ("leniency", "above 0 and at most 1"),
    "--accept lenience --leniency 2": ("leniency", "above 0 and at most 1"),
    "--accept lenience --leniency 0.5/0.5": ("leniency", "one a position", "linear alone"),
    "--accept cactus --leniency -1": ("leniency", "at least 0", "-1"),
    "--accept cactus --leniency inf": ("leniency", "finite"),
    "--accept cactus --leniency 1 --accept-opt divergence=js": ("divergence", "taylor, exact_kl", "'js'"),
    "--accept cactus --leniency 1 --accept-opt residual=p": ("residual", "verifier, relaxed"),
    "--accept linear --leniency 1 --accept-opt at_zero=argmax": ("at_zero", "onehot, mixture_argmax"),
    "--accept typical --accept-opt epsilon=-1": ("epsilon", "at least 0 and at most 1"),
    "--accept typical --accept-opt factor=-1": ("factor", "at least 0"),
    "--accept typical --accept-opt factor=some": ("--accept-opt factor", "'some' is not a number"),
    "--accept typical --accept-opt factor": ("--accept-opt factor", "KEY=VALUE"),
    "--accept typical --accept-opt lambda=1": ("--accept-opt", "unknown key 'lambda'", "leniency, divergence"),
    "--accept linear --leniency 1 --accept-opt leniency=1": ("--leniency", "given twice"),
    "--trace": ("--trace", "needs --json"),
    "--stop-ids x": ("--stop-ids", "cannot read x"),
    "--stop-ids -1": ("stop_ids", "at least 0"),
    "--stop-ids 1,,--2": ("--stop-ids", "whole numbers"),
    "--stop": ("--stop", "expected one argument"),
    "--min-tokens -1": ("min_tokens", "at least 0"),
    "--min-tokens 257": ("min_tokens", "above max_tokens, which is 256"),
    "--min-tokens few": ("--min-tokens", "few"),
    "--logprobs 0": ("--logprobs", "needs --json"),
    "--logprobs -1 --json": ("logprobs", "at least 0"),
    "--logprobs all --json": ("--logprobs", "all"),
    "--maximum 5": ("--maximum", "foldspec"),
    "--max-context 10G": ("--max-context", "10G"),
    "--cache-tokens k": ("--cache-tokens", "'k'"),
    "--max-token 5": ("--max-token",),  # abbreviations are a trap for scripts
    "-p two": ("exactly one of",),
    "--prompt-file also": ("exactly one of",),
    "--chat": ("--prompt-ids", "without a chat template"),
    "--system x": ("--prompt-ids", "without a chat template"),
    "--thinking on": ("--prompt-ids", "without a chat template"),
    "--thinking maybe": ("--thinking", "maybe"),
    "one two": ("unrecognized arguments: ",),
}
# By the engine, from the pair that is there.
LATE: dict[str, tuple[str, ...]] = {
    "--context yern": ("unknown context method 'yern'", "full, window, fold"),
    "--context FOLD": ("unknown context method 'FOLD'",),
    "--draft-tokens 0 --context yern": ("unknown context method 'yern'",),
    "--confidence-stop 0.5": ("confidence_stop", "the drafter has no confidence head"),
    "--steps 2": ("steps", "the drafter has one step", "features of tokens that are only drafted"),
    "--confidence 0.9": ("confidence", "the drafter has one step"),
    "--entropy-bound 0.1": ("entropy_bound", "the drafter has one step"),
    "--order entropy": ("order", "the drafter has one step"),
    "--drafter lookup --steps 2": ("steps", "is for a drafter with a network"),
    "--drafter none --order static": ("order", "is for a drafter with a network"),
    "--accept lax": ("unknown acceptance rule 'lax'", "exact, match, linear"),
    "--accept linear": ("leniency", "the rule linear needs it", "give --leniency"),
    "--accept lenience": ("leniency", "the rule lenience needs it"),
    "--accept cactus": ("leniency", "the rule cactus needs it"),
    "--leniency 0.5": ("leniency", "changes nothing about the rule exact", "leave it out"),
    "--accept match --leniency 0": ("leniency", "changes nothing about the rule match"),
    "--accept typical --leniency 0.5": ("leniency", "changes nothing about the rule typical", "epsilon, factor"),
    "--accept linear --leniency 1 --accept-opt residual=relaxed": ("residual", "changes nothing about the rule linear"),
    "--accept lenience --leniency 1 --accept-opt at_zero=onehot": ("at_zero", "nothing about the rule lenience"),
    "--accept cactus --leniency 1 --accept-opt epsilon=0.1": ("epsilon", "changes nothing about the rule cactus"),
    "--kernels cuda9": ("--kernels", "unknown kernels 'cuda9'", "reference"),
    "--dtype float8": ("--dtype", "float8"),
    "--device tpu": ("device", "'tpu'"),
    "--device cpu:1": ("device", "'cpu:1'"),
    "--device cuda:x": ("device", "'cuda:x'"),
    "--device cuda:\u00b2": ("device",),
    "--device cuda:1000": ("device", "'cuda:1000'"),
    "--threads 0": ("threads", "at least 1"),
    "--threads 100000000000": ("threads", "at most 1024"),
    "--max-context 0": ("max_context", "at least 1"),
    "--max-context 2049": ("--max-context", "2048 positions, not 2049", "use 2048 at most"),
    "--max-context 10M": ("--max-context", "2048 positions, not 10485760", "use 2048 at most"),
    "--prefill-chunk 0": ("prefill_chunk", "at least 1"),
    "--page-size 8": ("page_size", "at least 16"),
    "--page-size 48": ("page_size", "power of two, not 48"),
    "--logit-bias 512=1": ("logit_bias", "512 is not one of the target's 512 ids"),
    "--drafter lookup --draft-temperature 1": ("draft_temperature", "lookup has no law to draw from"),
    "--stop END": ("stop strings need a tokenizer.json", "use stop ids"),
    "--logprobs 513 --json": ("logprobs", "the target has 512 ids, not 513"),
    "--stop-ids 512": ("stop_ids", "512 is not one of the target's 512 ids"),
}
PROMPTS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("exactly one of -p, --prompt-file, --prompt-ids and --prompts",),
    ("-p", "a", "--prompt-ids", "5"): ("exactly one of",),
    ("--prompt-file", "/nothing/here"): ("--prompt-file", "cannot read /nothing/here", "No such file"),
    ("--prompt-file", "/"): ("--prompt-file", "cannot read /", "Is a directory"),
    ("--prompt-file", "x" * 5000): ("--prompt-file", "File name too long"),
    ("--prompt-file", ""): ("--prompt-file", "cannot read"),
    ("--prompt-ids", "/"): ("--prompt-ids", "Is a directory"),
    ("--prompt-ids", "5,six"): ("--prompt-ids", "cannot read 5,six"),
    ("--prompt-ids", "5.5"): ("--prompt-ids", "cannot read 5.5"),
    ("--prompt-ids", "5-6"): ("--prompt-ids", "whole numbers"),
    ("--prompt-ids", "\u0665"): ("--prompt-ids", "cannot read"),  # a digit, but not one of ours
    ("--prompt-ids", "9" * 5000): ("--prompt-ids", "whole numbers"),
    ("--prompt-ids", ""): ("prompt", "is empty"),
    ("--prompt-ids", "[]"): ("prompt", "is empty"),
    ("--prompt-ids", "5,512"): ("prompt", "512 is not one of the target's 512 ids"),
    ("--prompt-ids", "-1"): ("prompt", "-1 is not one of"),
    ("-p", "words"): ("has no tokenizer.json", "token ids"),
    ("-p", ""): ("has no tokenizer.json",),
}


@pytest.mark.parametrize("words", EARLY)
def test_wrong_options(words: str) -> None:
    for pair in (pair_words(), ["no-such-pair"]):
        refused(main("generate", *pair, *IDS, *words.split()), 2, *EARLY[words])


@pytest.mark.parametrize("words", LATE)
def test_options_that_the_engine_refuses(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not words.startswith(("--stop", "--logprobs", "--logit-bias")):
        monkeypatch.setattr("foldspec.engine.load_pair", None)  # before any weight is read
    refused(generate(*IDS, *words.split()), 2, *LATE[words])


@pytest.mark.parametrize("words", PROMPTS, ids=lambda words: " ".join(words)[:40] or "none")
def test_wrong_prompts(words: tuple[str, ...]) -> None:
    line = refused(generate(*words), 2, *PROMPTS[words])
    assert len(line) < 500


@pytest.mark.parametrize("text", ["", "\ufffd", "a\udcffb"])
def test_stop_strings_that_can_never_be_met(text: str) -> None:
    refused(main("generate", *pair_words(), *IDS, "--stop", "END", "--stop", text), 2, "stop: ")


def test_prompts_that_are_no_text(tmp_path: Path) -> None:
    pair, file = with_text(copied(tmp_path / "pair")), tmp_path / "file"
    file.write_bytes(b"caf\xe9")
    for option in ("--prompt-file", "--prompt-ids"):
        refused(generate(option, file, pair=pair), 2, option, f"{file} is not UTF-8 text")
    file.write_text("5,six")
    refused(generate("--prompt-ids", file, pair=pair), 2, "--prompt-ids", "whole numbers")
    file.write_text("[[5], {}]")
    refused(generate("--prompt-ids", file, pair=pair), 2, "--prompt-ids", "whole numbers")
    # what a shell hands over for bytes that are not UTF-8
    refused(generate("-p", "caf\udce9", pair=pair), 2, "not valid Unicode")


def test_an_empty_prompt_where_nothing_adds_a_bos(tmp_path: Path) -> None:
    pair = with_text(copied(tmp_path / "pair"))
    (tmp_path / "empty").touch()
    for prompt in (("-p", ""), ("--prompt-file", tmp_path / "empty")):
        refused(generate(*prompt, pair=pair), 2, "prompt", "is empty, and this model adds no BOS")
    refused(generate("-p", "   \n", pair=pair), 2, "prompt", "is empty")  # this tokenizer keeps no spaces


def test_a_prompt_that_the_context_cannot_hold() -> None:
    ids = ",".join(["5"] * 2048)
    refused(generate("--prompt-ids", ids), 2, "prompt", "has 2048 tokens", "holds 2048", "shorten it\n")
    refused(generate("--prompt-ids", f"{ids},5"), 2, "has 2049 tokens, the context holds 2048")
    line = refused(generate("--prompt-ids", "5,6,7,8", "--max-context", 4), 2, "has 4 tokens", "holds 4")
    assert "raise --max-context" in line
    line = refused(generate("--prompt-ids", "5,6,7,8,9", "--max-context", 4), 2, "has 5 tokens", "holds 4")
    assert "raise --max-context" in line
    assert generate("--prompt-ids", "5,6,7", "--max-context", 4, "--quiet").code == 0


def test_chat_options_without_a_template_and_switches_without_effect(tmp_path: Path) -> None:
    bare = with_text(copied(tmp_path / "bare"))
    refused(generate("-p", "w5", "--chat", pair=bare), 2, "has no chat template", "--no-chat")
    for words in (("--system", "w8"), ("--system", ""), ("--thinking", "on")):
        refused(generate("-p", "w5", *words, pair=bare), 2, "--system or --thinking", "not in use")
    pair = with_text(copied(tmp_path / "pair"), template=TEMPLATE)
    refused(generate("-p", "w5", "--no-chat", "--system", "w8", pair=pair), 2, "--system or --thinking")
    plain = with_text(copied(tmp_path / "plain"), template=TEMPLATE.split("{% if")[0])
    for switch in ("on", "off"):
        refused(generate("-p", "w5", "--thinking", switch, pair=plain), 2, "no thinking switch", "leave it out")


def test_pairs_that_are_not_named_rightly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases: dict[tuple[str, ...], tuple[int, tuple[str, ...]]] = {
        ("smollm3",): (2, ("no pair is called 'smollm3'", "smollm2-135m", "--target")),
        (): (2, ("no checkpoint named", "--target")),
        ("--drafter", "x"): (2, ("no checkpoint named",)),
        ("--target", "word"): (3, ("neither a folder nor a hub id",)),
        ("--target", "a/b/c"): (3, ("neither a folder nor a hub id",)),
        ("--target", "./nothing"): (3, ("./nothing: no such folder",)),
        ("--target", "~no-such-user/x"): (3, ("no such folder",)),
        ("--target", "x" * 5000): (3, ("neither a folder nor a hub id",)),
        ("--target", "/" + "x" * 5000): (3, ("no such folder",)),
        ("--target", ""): (3, ("no config.json",)),
    }
    for words, (code, says) in cases.items():
        line = refused(main("generate", *words, *IDS), code, *says)
        assert len(line) < 600
        if words:
            assert refused(main("check", *words), code) == line
    refused(main(), 2, "COMMAND")
    refused(main("compute"), 2, "compute")
    refused(main("check", "--json", "--prompt-ids", "5"), 2, "unrecognized")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:0", "cuda:7"):
        line = refused(generate(*IDS, "--device", device), 4, f"--device {device}", "0 GPUs", "--device cpu")
        assert refused(main("check", *pair_words(), "--device", device), 4) == line
    assert generate(*IDS, "--max-tokens", 1, "--device", "auto").code == 0


def test_memory_that_runs_out_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes")):

        def full(*args: object, error: Exception = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("foldspec.schedule.rounds.Rounds.step", full)
        refused(generate(*IDS), 4, "out of memory", "--prefill-chunk")


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("FOLDSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    refused(main("generate", "smollm2-135m", *IDS), 4, "no home folder", "FOLDSPEC_CACHE")


def test_an_unknown_id_in_the_vocabulary_is_text_free_and_harmless(tmp_path: Path) -> None:
    """A model may have more rows than its tokenizer has entries."""
    pair = swap_ids(with_text(copied(tmp_path / "pair")), 78, 300)
    path = pair / "target" / "tokenizer.json"
    path.write_text(path.read_text().replace('"\u00fc300": 300', '"\u00fc300": 700'))
    done = generate(*IDS, "--max-tokens", 4, "--json", pair=pair)
    assert done.code == 0 and done.json["token_ids"][0] == 300 and "300" not in done.json["text"]
    refused(generate("-p", "\u00fc300", pair=pair), 2, "700 is not one of the target's 512 ids")


def test_nothing_is_written_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals leave no folder, no lock, no temporary file; loading a pair leaves compiled kernels alone."""
    home = tmp_path / "home"
    for name, value in {"HOME": home, "TMPDIR": home, "FOLDSPEC_CACHE": home / "cache", "XDG_CACHE_HOME": home}.items():
        monkeypatch.setenv(name, str(value))
    before = everything(tmp_path, PAIR)
    for words in ([*pair_words(), "-p", "x"], ["smollm2-135m", "--offline", "-p", "x"], ["nobody", "-p", "x"]):
        assert main("generate", *words).code in (2, 3)
    assert generate(*IDS, "--max-tokens", 1, "--quiet") == Result(0, "", "")
    assert [path.name for path in home.iterdir()] == ["cache"]
    assert [path.name for path in (home / "cache").iterdir()] == ["kernels"]
    shutil.rmtree(home)
    assert everything(tmp_path, PAIR) == before
