"""The lm-eval adapter beside lm-eval's own model of transformers, on the same tiny checkpoint: the same answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.command import PAIR, TEMPLATE, copied, edit
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import processors
from vocabularies import byte_level

from foldspec import Engine
from foldspec.errors import FoldspecError, UsageError
from foldspec.lm_eval import FoldspecLM, log

CONTEXT = 96  # tokens that either model holds
TEXT = "Don't you know it's  2 spaces\n\nand lines, hello world. "
PAIRS = [
    (TEXT, "hello"),
    (TEXT, " tokens"),  # the space before it moves over
    (TEXT, "two words"),
    (TEXT.strip(), " hello world"),
    ("hello", "\n"),
    ("a", "é"),
    ("", "hello world"),
    ("", "<s>hello"),
    ("<s>hello", " world"),
    ("日本語の", "テキスト"),
]


def pair(folder: Path, bos: bool) -> Path:
    """The golden llama with a tokenizer of some 330 ids, which may put BOS in front."""
    core = byte_level()
    config = {"eos_token": "</s>"}
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        config["bos_token"] = "<s>"
    target = copied(folder) / "target"
    core.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("config.json", "generation_config.json"):
        edit(target / name, bos_token_id=0, eos_token_id=1)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no bos"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FoldspecLM, HFLM]]:
    folder = pair(tmp_path_factory.mktemp("pair"), request.param)
    target = str(folder / "target")
    with Engine.load(
        target=target, drafter=str(folder / "drafter"), window=24, max_context=CONTEXT, max_batch=3, page_size=16
    ) as engine:
        # its cache of logits (0.4.13) mistakes one cut of a text into context and continuation for another
        theirs = HFLM(
            pretrained=target, device="cpu", dtype="float32", max_length=CONTEXT - 1, logits_cache=False, batch_size=1
        )
        yield FoldspecLM(engine), theirs


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each if isinstance(each, tuple) else (each,), i) for i, each in enumerate(arguments)]


def same(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    assert [x for x, _ in ours] == pytest.approx([x for x, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_log_likelihoods_are_transformers(both: tuple[FoldspecLM, HFLM]) -> None:
    ours, theirs = both
    asked = list(PAIRS)
    for context in (TEXT, "hello", "naïve café"):  # what greedy decoding says, as far as its text has the same ids
        ids = theirs.tok_encode(context)
        best = ours._engine.generate(ids).token_ids[0]
        asked += [(context, ours._tokenizer.decode([best])), (context, "z")]
    answers = theirs.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    assert {greedy for _, greedy in answers} == {True, False}
    same(ours.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True), answers)


def test_a_context_of_spaces_is_none(both: tuple[FoldspecLM, HFLM]) -> None:
    """They belong to what follows. lm-eval's own model has no answer where no BOS is added."""
    ours, theirs = both
    spaces, none = ours.loglikelihood(requests("loglikelihood", [("  ", "x"), ("", "  x")]), disable_tqdm=True)
    assert spaces == none
    same([none], theirs.loglikelihood(requests("loglikelihood", [("", "  x")]), disable_tqdm=True))


def test_rolling_log_likelihoods_are_transformers(both: tuple[FoldspecLM, HFLM]) -> None:
    """One to three windows; a text of one window exactly, and of one token more."""
    ours, theirs = both
    texts = ["hello", TEXT * 3, TEXT * 9, *("é" * n for n in (CONTEXT - 2, CONTEXT - 1, CONTEXT))]
    asked = requests("loglikelihood_rolling", texts)
    found = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), abs=1e-3)


def test_greedy_texts_are_transformers(both: tuple[FoldspecLM, HFLM]) -> None:
    """Of several lengths and ends, in the order that they were asked for."""
    ours, theirs = both
    contexts = ["hello", TEXT, "naïve café", "日本語の", "x" * 40, "<s>hello", " leading"]
    asked: list[Any] = [(context, {"until": [], "max_gen_toks": 24}) for context in contexts]
    texts = theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    for (context, _), text in zip(list(asked), texts, strict=True):
        if len(text) > 6 and "\ufffd" not in text[4:6]:
            asked.append((context, {"until": [text[4:6], "never"], "max_gen_toks": 24, "do_sample": False}))
    assert len(asked) > len(contexts) + 2
    texts = theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", asked), disable_tqdm=True) == texts


def test_what_is_too_long_is_cut_as_there_if_so_asked(both: tuple[FoldspecLM, HFLM]) -> None:
    ours, theirs = both
    scored = requests("loglikelihood", [(TEXT * 4, "hello"), ("hello", " world")])
    with pytest.raises(UsageError, match=r"a task's context: has \d+ tokens, of which \d+ fit .* truncate=True"):
        ours.loglikelihood(scored, disable_tqdm=True)
    written = requests("generate_until", [(TEXT * 4, {"max_gen_toks": 20})])
    with pytest.raises(UsageError, match="of which 76 fit"):
        ours.generate_until(written, disable_tqdm=True)
    cut = FoldspecLM(ours._engine, truncate=True)
    same(cut.loglikelihood(scored, disable_tqdm=True), theirs.loglikelihood(scored, disable_tqdm=True))
    assert cut.get_model_info()["foldspec"]["cut_to_fit"] == 1
    theirs._max_length = CONTEXT  # of which it leaves room for the text alone
    try:
        assert cut.generate_until(written, disable_tqdm=True) == theirs.generate_until(written, disable_tqdm=True)
    finally:
        theirs._max_length = CONTEXT - 1
    assert cut.get_model_info()["foldspec"]["cut_to_fit"] == 2
    with pytest.raises(UsageError, match=r"0 fit beside what follows it; raise max_context$"):
        cut.generate_until(requests("generate_until", [("hello", {"max_gen_toks": CONTEXT})]), disable_tqdm=True)


def test_a_context_is_prefilled_once(both: tuple[FoldspecLM, HFLM], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both
    contexts: list[tuple[int, ...]] = []
    prefill = ours._engine.prefill
    monkeypatch.setattr(ours._engine, "prefill", lambda ids: contexts.append(tuple(ids)) or prefill(ids))
    asked = [(context, answer) for answer in (" a", " b", " c") for context in ("hello", TEXT.strip())]
    ours.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    assert len(contexts) == len(set(contexts)) == 2


TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: 1
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "text": """
output_type: generate_until
doc_to_text: "{{question}} "
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
}


def test_whole_tasks_give_the_same_results(both: tuple[FoldspecLM, HFLM], tmp_path: Path) -> None:
    """Tasks of lm-eval's three kinds, from YAML over a local file, offline."""
    rows = [{"question": TEXT[i:], "choices": ["hello", "world", "two spaces"]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {json.dumps(source)}\n"
        (tmp_path / f"{name}.yaml").write_text(head + text)
    found = []
    for model in both:
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        results = evaluate(lm=model, task_dict=manager.load(list(TASKS)), bootstrap_iters=0, log_samples=True)
        found.append({name: [each["filtered_resps"] for each in results["samples"][name]] for name in TASKS})
    ours, theirs = found
    assert ours["text"] == theirs["text"]
    for mine, yours in zip(ours["choice"], theirs["choice"], strict=True):
        same(mine, yours)
    assert ours["rolling"] == [pytest.approx(each, abs=1e-3) for each in theirs["rolling"]]


# by itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = pair(tmp_path_factory.mktemp("own"), True)
    (found / "target" / "chat_template.jinja").write_text(TEMPLATE.replace("<bos>", "<s>") + " end")
    return found


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[FoldspecLM]:
    words = f"target={folder / 'target'},drafter={folder / 'drafter'},window=24,max_context=1k,page_size=16,seed=5"
    model = FoldspecLM.create_from_arg_string(words, {"batch_size": "2", "device": "cuda:0", "max_batch_size": None})
    with model._engine:
        yield model


def test_its_arguments_are_the_engines(ours: FoldspecLM) -> None:
    settings = ours._engine.settings()
    assert (settings["max_context"], settings["window"], settings["max_batch"]) == (1024, 24, 2)
    assert settings["device"] == ("cuda" if tiny.torch.cuda.is_available() else "cpu")  # what lm-eval calls cuda:0


def test_the_results_say_how_they_were_made(ours: FoldspecLM, folder: Path) -> None:
    fresh = FoldspecLM(ours._engine, seed=5)
    asked = [("hello", {"max_gen_toks": 9}), (TEXT, {"max_gen_toks": 17})]
    fresh.generate_until(requests("generate_until", asked), disable_tqdm=True)
    fresh.loglikelihood(requests("loglikelihood", PAIRS[:3]), disable_tqdm=True)
    done = [fresh._engine.generate(text, fresh._params(kwargs, 0)) for text, kwargs in asked]
    rounds = [each for one in done for each in one.rounds]
    said = json.loads(json.dumps(fresh.get_model_info()))["foldspec"]
    assert said["tau"] == sum(len(each.committed) for each in rounds) / len(rounds)
    assert (said["rounds"], said["texts_generated"], said["texts_scored"]) == (len(rounds), 2, 3)
    assert said["settings"]["lossless"] and said["settings"]["window"] == 24 and said["seed"] == 5
    assert said["settings"]["drafter"]["name"] == str(folder / "drafter")


def test_each_sampled_request_draws_for_itself_and_again_the_same(ours: FoldspecLM) -> None:
    asked = requests("generate_until", [("hello", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 16})] * 3)
    first, again = (ours.generate_until(asked, disable_tqdm=True) for _ in range(2))
    assert first == again and len(set(first)) == 3
    assert FoldspecLM(ours._engine, seed=6).generate_until(asked, disable_tqdm=True)[0] == first[1]


def test_answers_reach_the_cache_as_they_come(ours: FoldspecLM) -> None:
    heard: list[tuple[str, Any, Any]] = []
    fresh = FoldspecLM(ours._engine)
    fresh.cache_hook.add_partial = lambda *each: heard.append(each)
    written = requests("generate_until", [("hello", {"max_gen_toks": 3})])
    (text,) = fresh.generate_until(written, disable_tqdm=True)
    (score,) = fresh.loglikelihood(requests("loglikelihood", [("hello", " you")]), disable_tqdm=True)
    (rolling,) = fresh.loglikelihood_rolling(requests("loglikelihood_rolling", ["hello"]), disable_tqdm=True)
    assert heard == [
        ("generate_until", ("hello", {"max_gen_toks": 3}), text),
        ("loglikelihood", ("hello", " you"), score),
        ("loglikelihood_rolling", ("hello",), rolling),
    ]


def test_what_a_reader_should_know_is_said(ours: FoldspecLM, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", lambda line, *values: said.append(line % values))
    FoldspecLM(ours._engine)
    assert said == []
    lossy = FoldspecLM(ours._engine.using(accept="linear", leniency=0.5), truncate=True)
    assert said == [f"output follows another law than the target's: {lossy._engine.law}"]
    lossy.loglikelihood(requests("loglikelihood", [("a" * 2000, "b"), ("a", "b")]), disable_tqdm=True)
    lossy.generate_until(requests("generate_until", [("a" * 2000, {"max_gen_toks": 1})]), disable_tqdm=True)
    assert said[1:] == [f"{n} contexts so far were cut from the left to fit 1024 tokens" for n in (1, 2)]
    monkeypatch.setattr(Engine, "notices", ("mind the gap",))
    FoldspecLM(ours._engine)
    assert said[3:] == ["mind the gap"]


def test_a_special_token_ends_a_text_by_its_id(ours: FoldspecLM) -> None:
    params = ours._params({"until": ["</s>", "", "stop", "stop"]}, 0)
    assert params.stop_ids == (1,) and params.stop == ("</s>", "stop") and params.max_tokens == 256


def test_chats(ours: FoldspecLM) -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The answer is "}]
    assert ours.apply_chat_template(chat[:1]) == "<s> user hello end"
    assert ours.apply_chat_template(chat, add_generation_prompt=False) == "<s> user hello assistant The answer is "
    assert ours.tok_encode(ours.apply_chat_template(chat)).count(0) == 1  # BOS, which the template wrote
    assert ours.chat_template(True) == ours._engine.template.source and ours.chat_template(False) is None
    assert ours.tok_encode("hello") == [0, *ours.tok_encode("hello", add_special_tokens=False)]
    with pytest.raises(UsageError, match="only the template named default"):
        ours.chat_template("rag")


REFUSED: list[tuple[Callable[[FoldspecLM], object], str]] = [
    (lambda m: m._params({"penalty_alpha": 0.6}, 0), "unknown generation_kwargs penalty_alpha=0.6"),
    (lambda m: m._params({"until": ["\ufffd"]}, 0), "not valid Unicode"),
    (lambda m: m._params({"temperature": 1.0, "do_sample": True, "top_p": 2.0}, 0), "top_p"),
    (lambda m: m._loglikelihood_tokens([(("a", "b"), [5], [])]), "'b' adds no token to its context"),
    (lambda m: FoldspecLM(m._engine, truncate="left"), "truncate: must be true or false"),  # type: ignore[arg-type]
    (lambda m: FoldspecLM(m._engine, seed=-1), "seed: must be a whole number"),
    (lambda m: FoldspecLM.create_from_arg_obj({"pair": "no such"}), "no such"),
    (lambda m: FoldspecLM.create_from_arg_obj({"pretrained": "gpt2"}), "unknown option 'pretrained'"),
    (
        lambda m: FoldspecLM.create_from_arg_obj({"max_context": "long"}),
        "--model_args max_context: 'long' is not a number",
    ),
    (lambda m: FoldspecLM.create_from_arg_obj({}, {"batch_size": "many"}), "--batch_size: must be auto or"),
    (lambda m: FoldspecLM(m._engine.using(force_accept="2")), "nothing to score: forced acceptance 2"),
]


@pytest.mark.parametrize(("act", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_be_is_refused(ours: FoldspecLM, act: Callable[[FoldspecLM], object], says: str) -> None:
    with pytest.raises(FoldspecError, match=says.replace("(", "\\(")):
        act(ours)


def test_no_drafter_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval reads drafter=none as no value, which would be the pair's own."""

    def load(**options: object) -> None:
        raise UsageError(repr(options))

    monkeypatch.setattr(Engine, "load", load)
    with pytest.raises(UsageError, match="'drafter': 'none'"):
        FoldspecLM.create_from_arg_string("pair=smollm2-135m,drafter=none")


def test_a_target_without_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(PAIR / "target", tmp_path / "target")
    with (
        Engine.load(target=str(tmp_path / "target"), drafter="none") as engine,
        pytest.raises(UsageError, match="text"),
    ):
        FoldspecLM(engine)
