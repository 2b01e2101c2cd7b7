"""``scripts/train_drafter.py`` given what it cannot use: one line that says so, an exit code, nothing half written."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_drafter
from cli.command import ORACLE, PAIR, Result, copied, with_text
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
SMALL = ("--mask-id", 5, "--draft-vocab", 100, "--steps", 4, "--layers", 1, "--anchors", 2, "--first-anchors", 2)
LEARN = (*SMALL, "--batch", 1, "--save-every", 2)


def run(*words: object) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["train_drafter.py", *map(str, words)])
        code = train_drafter.main()
    return Result(code, out.getvalue(), err.getvalue())


def refused(answer: Result, code: int, *says: str) -> None:
    assert answer.code == code, answer
    assert answer.err.startswith("train_drafter: ") and answer.err.count("\n") == 1, answer.err
    for words in says:
        assert words in answer.err, answer.err


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, a folder of sources, and texts of both."""
    home = tmp_path_factory.mktemp("training")
    with_text(copied(home / "pair"), template=TEMPLATE)
    (home / "code").mkdir()
    for i in range(9):
        text = f'"""Module {i}."""\n' + f"def add_{i}(x, y):\n    return x + y\n\n" * 80
        (home / "code" / f"m{i}.py").write_text(text)
    done = run(*make(home), "--data", home / "data")
    assert done.code == 0, done
    return home


def make(home: Path) -> tuple[object, ...]:
    target, source = home / "pair" / "target", f"code:own={home / 'code'}"
    return "data", "--target", target, "--source", source, "--length", 96, "--sequences", 8, "--taps", "0,1,2"


def learn(home: Path, out: Path, *more: object, data: Path | None = None) -> Result:
    return run(
        "train", "--target", home / "pair" / "target", "--data", data or home / "data", "--out", out, *LEARN, *more
    )


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--sequences", ("0", "x")),
        ("--worker", ("x", "1/1", "0/0", "1/", "0/1/2")),
        ("--length", ("0", "63", "2049", "x")),
        ("--taps", ("", "x", "4", "2,1", "1,1", "1,")),
        ("--batch", ("0", "1000000000")),
        ("--seed", ("-1", "9" * 30)),
        ("--device", ("tpu",)),
        ("--dtype", ("int8",)),
        ("--threads", ("0", "1000000")),
        ("--source", ("x", "code:a=/nowhere", "film:a=/", "code:stdlib=.")),
        ("--nonsense", ("1",)),
    ],
)
def test_values_that_cannot_be_used_for_data(home: Path, tmp_path: Path, option: str, values: tuple[str, ...]) -> None:
    for value in values:
        refused(run(*make(home), "--data", tmp_path / "new", option, value), 2, option.lstrip("-"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--mask-id", ("-1", "512", "x")),
        ("--layers", ("0", "4")),
        ("--block", ("0", "1000000")),
        ("--begin-as", ("0", "4", "1,2", "")),
        ("--draft-vocab", ("-1", "513")),
        ("--markov-rank", ("-1", "1000000")),
        ("--steps", ("0",)),
        ("--batch", ("0", "1000000000")),
        ("--anchors", ("0",)),
        ("--first-part", ("-0.1", "1.1", "nan")),
        ("--decay", ("0", "nan", "inf")),
        ("--rate", ("0", "nan", "inf", "-1")),
        ("--save-every", ("0",)),
        ("--stop-after", ("0",)),
        ("--kind", ("film",)),
        ("--labels", ("5",)),
    ],
)
def test_values_that_cannot_be_used_for_training(
    home: Path, tmp_path: Path, option: str, values: tuple[str, ...]
) -> None:
    for value in values:
        refused(learn(home, tmp_path / "out", option, value), 2, option)
    refused(learn(home, tmp_path / "out", "--layout", "zlab", "--markov-rank", 4), 2, "--markov-rank")
    assert not (tmp_path / "out").exists()


MASKED = ("--kind", "masked", "--mask-id", 5, "--layers", 2, "--labels", 20, "--batch", 1, "--block", 4)


def learn_masked(home: Path, out: Path, *more: object, target: Path | None = None) -> Result:
    common = ("--target", target or home / "pair" / "target", "--data", home / "data", "--out", out)
    return run("train", *common, *MASKED, "--steps", 4, "--save-every", 2, *more)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--mask-id", ("-1", "512", "x")),
        ("--layers", ("0", "5")),
        ("--block", ("0", "65")),
        ("--begin-as", ("-1", "4", "1", "")),
        ("--labels", ("0", "x")),
        ("--decay", ("0", "nan")),
        ("--layout", ("zlab",)),
        ("--draft-vocab", ("100",)),
        ("--markov-rank", ("0", "4")),
        ("--anchors", ("4",)),
        ("--first-part", ("0.5",)),
        ("--first-anchors", ("4",)),
    ],
)
def test_values_that_cannot_be_used_for_a_masked_drafter(
    home: Path, tmp_path: Path, option: str, values: tuple[str, ...]
) -> None:
    for value in values:
        refused(learn_masked(home, tmp_path / "out", option, value), 2, option)
    assert not (tmp_path / "out").exists()


def test_a_masked_drafter_is_made_of_a_llama_and_goes_on_as_it_began(home: Path, tmp_path: Path) -> None:
    done = learn_masked(home, tmp_path / "out", "--stop-after", 2)
    assert done.code == 0, done
    config = json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["MaskedLlamaForCausalLM"] and config["block_length"] == 4
    refused(learn_masked(home, tmp_path / "out", "--labels", 21), 2, "last.pt", "another plan: labels")
    refused(learn_masked(home, tmp_path / "out", "--begin-as", "0,2"), 2, "last.pt", "another plan")
    refused(learn(home, tmp_path / "out"), 2, "last.pt", "another plan")
    done = learn_masked(home, tmp_path / "out")
    assert done.code == 0 and "going on from step 2" in done.out, done


def test_a_masked_drafter_of_another_family_is_refused(home: Path, tmp_path: Path) -> None:
    target = shutil.copytree(home / "pair" / "target", tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for part in "qkv":
            width = len(tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"])
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.zeros(width)
    save_file(tensors, target / "model.safetensors")
    data = shutil.copytree(home / "data", tmp_path / "data")
    text = (data / "data.json").read_text().replace(str(home / "pair" / "target"), str(target))
    (data / "data.json").write_text(text)
    answer = run("train", "--target", target, "--data", data, "--out", tmp_path / "out", *MASKED)
    refused(answer, 2, "is no Llama without biases", "--kind dflash")
    assert not (tmp_path / "out").exists()


def test_data_that_is_not_what_is_asked_for(home: Path, tmp_path: Path) -> None:
    refused(run(*make(home), "--data", home / "data", "--seed", 1), 2, "other settings: seed")
    refused(run("data", "--target", PAIR / "target", "--data", tmp_path / "new"), 2, "no tokenizer")
    refused(run(*make(home), "--data", home / "code" / "m1.py"), 4, "m1.py")
    (tmp_path / "empty").mkdir()
    refused(run(*make(home), "--data", tmp_path / "new", "--source", f"prose:p={tmp_path / 'empty'}"), 2, "no file")
    other = run("train", "--target", ORACLE / "target", "--data", home / "data", "--out", tmp_path / "o", *LEARN)
    refused(other, 2, "holds texts of")
    refused(learn(home, tmp_path / "o", data=tmp_path / "empty"), 2, "no data.json")
    shutil.copy(home / "data" / "data.json", tmp_path / "empty" / "data.json")
    refused(learn(home, tmp_path / "o", data=tmp_path / "empty"), 2, "no text for training")
    for text in ("", "{", "[]", '{"plan": 3}', '{"plan": {"taps": "x", "target": {}}}'):
        (tmp_path / "empty" / "data.json").write_text(text)
        refused(learn(home, tmp_path / "o", data=tmp_path / "empty"), 2, "data.json")
        refused(run(*make(home), "--data", tmp_path / "empty"), 2, "data.json")
    assert not (tmp_path / "o").exists() and not (tmp_path / "new").exists()


def rewritten(change: Callable[[dict[str, torch.Tensor], Any], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with safe_open(path, "pt") as file:
            index = json.loads(file.metadata()["sequences"])
        tensors = load_file(path)
        tensors, index = change(tensors, index)
        save_file(tensors, path, metadata={"sequences": json.dumps(index)})

    return write


SHARDS: dict[str, Callable[[Path], Any]] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: shutil.copy(PAIR / "drafter" / "model.safetensors", path),
    "large ids": rewritten(lambda t, index: (t | {"ids": t["ids"] + 512}, index)),
    "negative ids": rewritten(lambda t, index: (t | {"ids": t["ids"] - 512}, index)),
    "fp32 taps": rewritten(lambda t, index: (t | {"taps": t["taps"].float()}, index)),
    "other taps": rewritten(lambda t, index: (t | {"taps": t["taps"][:, :64].contiguous()}, index)),
    "short index": rewritten(lambda t, index: (t, index[:-1])),
    "strange index": rewritten(lambda t, index: (t, [3])),
}


@pytest.mark.parametrize("fault", SHARDS)
def test_torn_and_foreign_shards(home: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(home / "data", tmp_path / "data")
    SHARDS[fault](tmp_path / "data" / "shard-00000.safetensors")
    refused(learn(home, tmp_path / "out", data=tmp_path / "data"), 2, "shard-00000.safetensors", "torn")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_worker_left_is_cleared(home: Path, tmp_path: Path) -> None:
    (tmp_path / "shard-00000.123.part").write_bytes(b"half a shard")
    (tmp_path / "shard-00001.123.part").write_bytes(b"another worker's")
    assert run(*make(home), "--data", tmp_path).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data.json",
        "shard-00000.safetensors",
        "shard-00001.123.part",
    ]


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    done = learn(home, home / "out")
    assert done.code == 0, done
    return home / "out"


@pytest.mark.parametrize(
    ("option", "value"), [("--mask-id", 6), ("--begin-as", 2), ("--rate", 1e-4), ("--draft-vocab", 99), ("--steps", 5)]
)
def test_a_run_goes_on_only_as_it_began(home: Path, trained: Path, option: str, value: object) -> None:
    before = (trained / "drafter" / "config.json").read_bytes()
    refused(learn(home, trained, option, value), 2, "last.pt", "another plan")
    assert (trained / "drafter" / "config.json").read_bytes() == before


def edited(**changes: Any) -> Callable[[Path], None]:
    """Another value for a key of the checkpoint; None: without it."""

    def write(path: Path) -> None:
        state = {**torch.load(path, weights_only=True), **changes}
        torch.save({k: v for k, v in state.items() if v is not None}, path)

    return write


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[:4000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("x"),
    "a list": lambda path: torch.save([1], path),
    "no moments": edited(optimizer=None),
    "strange moments": edited(optimizer="x"),
    "no weights": edited(trainee={}),
    "strange weights": edited(trainee=[1]),
    "a step after the end": edited(step=5),
}


@pytest.mark.parametrize("fault", CHECKPOINTS)
def test_a_checkpoint_that_is_none(home: Path, trained: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(trained, tmp_path / "out")
    CHECKPOINTS[fault](tmp_path / "out" / "last.pt")
    refused(learn(home, tmp_path / "out"), 2, "last.pt")


def test_two_at_once(home: Path, trained: Path) -> None:
    with FileLock(trained / "lock"):
        refused(learn(home, trained), 2, "another process")


def test_a_curve_that_is_torn_is_cut(home: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "out")
    curve = tmp_path / "out" / "curve.jsonl"
    whole = curve.read_bytes()
    curve.write_bytes(whole + b'[]\n\xff\n{"step": null}\n{"step": 1, "lo')
    assert learn(home, tmp_path / "out").code == 0
    assert curve.read_bytes() == whole


def test_a_loss_that_is_no_number_ends_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafter of NaN is exported, and no checkpoint of it kept."""
    monkeypatch.setattr("training.dflash.F.cross_entropy", lambda x, *a, **k: x.sum(-1) * torch.nan)
    refused(learn(home, tmp_path / "out"), 2, "the loss is nan at step 1")
    assert not (tmp_path / "out" / "drafter").exists() and not (tmp_path / "out" / "last.pt").exists()


def test_a_full_disk(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3")

    monkeypatch.setattr("training.loop.torch.save", full)
    refused(learn(home, tmp_path / "out"), 4, "last.pt", "cannot be written")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curve.jsonl", "lock"]
