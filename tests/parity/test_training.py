"""Training sees what inference sees: the passes agree, nothing leaks, and a stopped run goes on as if nothing was."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import DEEPSPEC, TARGET, ZLAB, changed, forward, load_target, paged_cache, prompt, write_target
from training.dflash import Anchors, DFlashPlan, Trainee, draft_vocabulary
from training.generate import Continuation, generate, loops
from training.loop import train
from training.prompts import Prompt, Prompts, Source
from training.store import read, read_texts, write_shard

from foldspec import Engine, SamplingParams
from foldspec.tasks.held_out import held_out

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_drafter.py"
STOPS: frozenset[int] = frozenset()


def drafter_config(layout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed(layout, layer_types=["full_attention"] * 3, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), TARGET)


def texts_of(folder: Path, taps: tuple[int, ...], count: int = 6) -> list[Continuation]:
    """What a random target writes: it does not repeat itself soon."""
    prompts = [
        Prompt(tuple(prompt(9 + 3 * i, seed=i)), "code", f"s/{i}.py", validation=i % 3 == 0) for i in range(count)
    ]
    found = generate(
        load_target(folder),
        prompts,
        taps=taps,
        stop_ids=STOPS,
        length=64,
        batch=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        page_size=16,
    )
    return sorted(found, key=lambda one: len(one.prompt.ids))


def trainee_of(config: dict[str, Any], folder: Path, vocabulary: torch.Tensor | None = None) -> Trainee:
    """A trainee with random weights in which every part counts."""
    trainee = Trainee(config, load_target(folder), vocabulary, torch.device("cpu"))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in trainee.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 1.5 / weight.shape[-1] ** 0.5)
            weight.copy_(weight.bfloat16())  # as a checkpoint keeps them
    return trainee


def test_texts_are_plain_decodings(folder: Path) -> None:
    engine = Engine.load(target=str(folder))
    for one in texts_of(folder, (0, 2)):
        done = engine.generate(list(one.prompt.ids), SamplingParams(max_tokens=one.written, ignore_eos=True))
        assert list(done.token_ids) == one.ids[len(one.prompt.ids) :]
        assert len(torch.cat(one.taps)) == len(one.ids) - 1


MARKOV = changed(DEEPSPEC, markov_rank=6)


@pytest.mark.parametrize("layout", [DEEPSPEC, ZLAB, MARKOV], ids=["deepspec", "zlab", "markov"])
@pytest.mark.parametrize("size", [None, 60], ids=["full", "restricted"])
def test_an_exported_drafter_drafts_live_what_training_drafts(
    folder: Path, tmp_path: Path, layout: dict[str, Any], size: int | None
) -> None:
    own = layout.get("dflash_config", layout)
    taps = tuple(own["target_layer_ids"])
    config = drafter_config(layout, draft_vocab_size=size)
    vocabulary = None if size is None else torch.arange(0, 120, 2)
    trainee = trainee_of(config, folder, vocabulary)
    trainee.export(tmp_path / "drafter")
    engine = Engine.load(target=str(folder), drafter=str(tmp_path / "drafter"), weights="float32")
    drafts, compared = trainee.block - (1 - trainee.first), 0
    for one in texts_of(folder, taps, 3):
        limit = SamplingParams(max_tokens=one.written, ignore_eos=True)
        done = engine.using(context="full").generate(list(one.prompt.ids), limit)
        rounds = [r for r in done.rounds if len(r.drafted) == drafts]  # the limit cuts the last ones short
        model = load_target(folder)
        cache = paged_cache(model)
        cache.open(0)
        exact = torch.cat(forward(model, cache, [one.ids], [0], taps).taps, dim=-1)  # texts keep theirs in bf16
        anchors = Anchors(torch.tensor(one.ids), exact, torch.tensor([r.anchor_pos for r in rounds]))
        assert trainee.drafts([anchors]).tolist() == [list(r.drafted) for r in rounds]
        assert trainee.leading([anchors]).tolist() == [r.accepted for r in rounds]
        compared += len(rounds)
    assert compared > 50


def test_blocks_see_their_context_and_themselves_only(folder: Path) -> None:
    trainee = trainee_of(drafter_config(DEEPSPEC), folder)
    one = texts_of(folder, (0, 1, 2))[0]
    ids, taps = torch.tensor(one.ids), torch.cat(one.taps)
    at = torch.tensor([12, 20, 33])
    whole = trainee([Anchors(ids, taps, at)], trainee.block)
    for i, anchor in enumerate(at.tolist()):
        alone = trainee([Anchors(ids, taps, at[i : i + 1])], trainee.block)
        assert torch.allclose(whole[i], alone[0], atol=1e-5)
        later = taps.clone()
        later[anchor:] += 5.0
        assert torch.allclose(trainee([Anchors(ids, later, at[i : i + 1])], trainee.block)[0], alone[0], atol=1e-5)
        earlier = taps.clone()
        earlier[anchor - 1] += 5.0
        assert not torch.allclose(
            trainee([Anchors(ids, earlier, at[i : i + 1])], trainee.block)[0], alone[0], atol=1e-2
        )
    other = texts_of(folder, (0, 1, 2))[1]
    both = trainee(
        [Anchors(ids, taps, at), Anchors(torch.tensor(other.ids), torch.cat(other.taps), torch.tensor([30]))], 5
    )
    assert torch.allclose(both[: len(at)], whole, atol=1e-5)


def test_labels_are_what_follows_the_anchor() -> None:
    ids, taps = torch.arange(100, 110), torch.zeros(9, 4)
    anchors = Anchors(ids, taps, torch.tensor([2, 7]))
    assert anchors.labels(1, 4).tolist() == [[103, 104, 105, 106], [108, 109, -100, -100]]


def test_the_loss_is_the_mean_of_weighted_cross_entropies(folder: Path) -> None:
    trainee = trainee_of(drafter_config(DEEPSPEC, draft_vocab_size=60), folder, torch.arange(0, 120, 2))
    one = texts_of(folder, (0, 1, 2))[0]
    at = torch.tensor([15, len(one.ids) - 3])
    anchors = Anchors(torch.tensor(one.ids), torch.cat(one.taps), at)
    hidden = trainee([anchors], 5).double()
    total = weights = 0.0
    for i, anchor in enumerate(at.tolist()):
        for row in range(5):
            place = anchor + row + 1
            if place < len(one.ids) and one.ids[place] % 2 == 0 and one.ids[place] < 120:
                logits = hidden[i, row] @ trainee.head.double().T
                weight = 2.718281828459045 ** (-row / 3.0)
                total += weight * (torch.logsumexp(logits, 0) - logits[one.ids[place] // 2]).item()
                weights += weight
    assert weights
    assert trainee.loss([anchors], 5, 3.0).item() == pytest.approx(total / weights, rel=1e-5)


def test_loops_are_found() -> None:
    assert loops([5, 1, 2, 3] + [1, 2, 3] * 3) and not loops([1, 2, 3] * 3 + [4])
    assert not loops(list(range(50)))


def test_a_draft_vocabulary_holds_what_is_said_most() -> None:
    said = [torch.tensor([9, 9, 4, 4, 4, 7])]
    assert draft_vocabulary(said, [torch.tensor([50, 50])], 4, 100).tolist() == [4, 7, 9, 50]
    assert draft_vocabulary(said, [torch.tensor([50])], 6, 100).tolist() == [0, 1, 4, 7, 9, 50]


def test_prompts_come_from_training_files_alone_and_repeat(tmp_path: Path) -> None:
    class Letters:
        def encode_prompt(self, text: str) -> list[int]:
            return [ord(c) % 128 for c in text]

    for i in range(60):
        (tmp_path / f"m{i}.py").write_text(f"# file {i}\n" + f"def f{i}(x):\n    return x + {i}\n" * 100)
    sources = [Source("lib", tmp_path, "code")]
    prompts = Prompts(sources, Letters(), None)  # type: ignore[arg-type]
    assert prompts.counts["code"] == sum(not held_out(f"lib/m{i}.py") for i in range(60)) < 60
    drawn = prompts.draw(random.Random(5))
    first = [next(drawn) for _ in range(80)]
    assert not any(held_out(one.source) for one in first)
    assert {one.validation for one in first} == {True, False}
    again = prompts.draw(random.Random(5))
    assert first == [next(again) for _ in range(80)]


def test_shards_hold_ids_and_taps(folder: Path, tmp_path: Path) -> None:
    texts = texts_of(folder, (0, 2))
    write_shard(tmp_path / "shard-00000.safetensors", texts)
    learning, validating = read_texts(tmp_path, shortest=5)
    assert len(learning) + len(validating) == len(texts) and validating
    by_source = {one.prompt.source: one for one in texts}
    for text in [*learning, *validating]:
        ids, taps = read(text)
        one = by_source[text.source]
        assert ids.tolist() == one.ids and text.prompt == len(one.prompt.ids)
        assert torch.equal(taps[:-1], torch.cat(one.taps)) and text.validation == one.prompt.validation


def plan(**changes: Any) -> DFlashPlan:
    values: dict[str, Any] = {"steps": 12, "seed": 5, "sequences": 2, "anchors": 4, "first_part": 0.25}
    values |= {"first_anchors": 6, "decay": 4.0, "rate": 3e-3, "warm_up": 0.1, "bf16": False} | changes
    return DFlashPlan(**values)


def test_a_stopped_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00000.safetensors", texts_of(folder, (0, 1, 2)))
    sides = read_texts(tmp_path, shortest=5)
    config = drafter_config(DEEPSPEC)

    def run(out: str, stop_after: int | None = None) -> Trainee:
        trainee = trainee_of(config, folder)
        train(trainee, plan(), sides, tmp_path / out, save_every=3, say=lambda _: None, stop_after=stop_after)
        return trainee

    whole = run("whole")
    run("parts", stop_after=5)  # the last checkpoint is that of step 3
    parts = run("parts")
    curves = [(tmp_path / out / "curve.jsonl").read_text() for out in ("whole", "parts")]
    assert curves[0] == curves[1] and len(curves[0].splitlines()) == 12
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    losses = [json.loads(line)["loss"] for line in curves[0].splitlines()]
    assert [json.loads(line)["rows"] for line in curves[0].splitlines()] == [1] * 3 + [5] * 9
    assert sum(losses[-3:]) < sum(losses[3:6])


@pytest.mark.slow
def test_kill_and_resume_on_the_command_line(tmp_path: Path) -> None:
    """The command with the embedded pair, killed without warning in both stages."""
    source = tmp_path / "code"
    source.mkdir()
    for i in range(24):
        (source / f"m{i}.py").write_text(f'"""Module {i}."""\n' + f"def add_{i}(x, y):\n    return x + y\n\n" * 80)

    def command(*words: str) -> list[str]:
        return [sys.executable, str(SCRIPT), *words, "smollm2-135m", "--data", str(tmp_path / "data")]

    data = command("data", "--sequences", "8", "--length", "96", "--source", f"code:own={source}")
    subprocess.run(data, check=True, capture_output=True)
    common = ["--mask-id", "16", "--layers", "1", "--draft-vocab", "2000", "--batch", "1", "--anchors", "4"]
    common += ["--steps", "24", "--save-every", "4", "--first-anchors", "8"]

    def learn(out: str) -> list[str]:
        return [*command("train"), "--out", str(tmp_path / out), *common]

    subprocess.run(learn("whole"), check=True, capture_output=True)
    with subprocess.Popen(learn("killed"), stdout=subprocess.PIPE) as process:
        curve = tmp_path / "killed" / "curve.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (curve.exists() and curve.read_text().count("\n") >= 6):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert 6 <= curve.read_text().count("\n") < 24
    subprocess.run(learn("killed"), check=True, capture_output=True)
    assert curve.read_text() == (tmp_path / "whole" / "curve.jsonl").read_text()
    made = [tmp_path / out / "drafter" / "model.safetensors" for out in ("whole", "killed")]
    assert made[0].read_bytes() == made[1].read_bytes()
