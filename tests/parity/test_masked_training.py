"""A masked drafter's training pass against transformers' Llama with its mask written out, and what its loss is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import TARGET, forward, load_target, paged_cache, prompt, write_target
from training.generate import Continuation, generate
from training.loop import train
from training.masked import MaskedPlan, MaskedTrainee, Noised, masked_config, noise
from training.prompts import Prompt
from training.store import read, read_texts, write_shard

from foldspec import Engine, SamplingParams
from foldspec.errors import UsageError
from foldspec.models.config import ModelConfig
from foldspec.models.llama import Llama

BLOCK, MASK = 4, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), TARGET)


def target_of(folder: Path) -> Llama:
    model = load_target(folder)
    assert isinstance(model, Llama)
    return model


def trainee_of(folder: Path, tap: int = 2, layers: int = 3) -> MaskedTrainee:
    """A trainee with random weights in which every part counts."""
    config = masked_config(ModelConfig(TARGET, "target"), layers=layers, block=BLOCK, mask_id=MASK)
    trainee = MaskedTrainee(config, target_of(folder), tap, torch.device("cpu"))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in trainee.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 1.5 / weight.shape[-1] ** 0.5)
            weight.copy_(weight.bfloat16())  # as a checkpoint keeps them
            weight.requires_grad_(True)
    return trainee


def text_of(blocks: int, seed: int) -> Noised:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 128, (blocks * BLOCK,), generator=rng)
    tap = torch.randn(len(ids), 32, generator=rng).bfloat16()
    return Noised(ids, noise(blocks, BLOCK, random.Random(seed)), tap)


def oracle(folder: Path, drafter: Path, ids: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Final rows [masked places, width] of transformers' Llama, one block after another: the clean places before it and
    its own noised ones, each seeing what lies in no later block of the grid than itself."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((drafter / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(drafter / "model.safetensors").items()}
    mask_row = tensors.pop("model.mask_embedding")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
    tensors["model.embed_tokens.weight"] = table
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings")
    read = transformers.LlamaConfig(**{name: config[name] for name in names}, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(read).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    rows = []
    for begin in range(0, len(ids), BLOCK):
        end = begin + BLOCK
        x = table[ids[:end]]
        own = torch.zeros(end, dtype=torch.bool)
        own[begin:] = masked[begin:end]
        x = torch.where(own[:, None], mask_row, x)
        grid = torch.arange(end) // BLOCK
        bias = torch.zeros(end, end).masked_fill(grid[None] > grid[:, None], torch.finfo(torch.float32).min)
        with torch.no_grad():
            out = model.model(inputs_embeds=x[None], attention_mask=bias[None, None], use_cache=False)
        rows.append(out.last_hidden_state[0][own])
    return torch.cat(rows)


def test_the_pass_is_that_of_each_block_after_its_clean_prefix(folder: Path, tmp_path: Path) -> None:
    trainee = trainee_of(folder)
    trainee.export(tmp_path)
    batch = [text_of(9, 1), text_of(1, 2), text_of(4, 3)]
    wanted = torch.cat([oracle(folder, tmp_path, one.ids, one.masked) for one in batch])
    for chunk in (BLOCK, 3 * BLOCK, 128):
        trainee.chunk = chunk
        assert torch.allclose(trainee(batch), wanted, atol=2e-5)


def test_what_a_row_cannot_know_does_not_move_it(folder: Path) -> None:
    trainee, one = trainee_of(folder), text_of(6, 4)
    begin = 3 * BLOCK
    rows = one.masked.nonzero()[:, 0]
    here = (rows >= begin) & (rows < begin + BLOCK)
    before = trainee([one])[here]

    def after(place: int) -> torch.Tensor:
        ids = one.ids.clone()
        ids[place] = (ids[place] + 1) % 128
        return trainee([Noised(ids, one.masked, one.tap)])[here]

    for place in range(len(one.ids)):
        known = place < begin or (place < begin + BLOCK and not one.masked[place])
        assert torch.allclose(after(place), before, atol=1e-6) != known, place


def test_the_taught_law_is_the_targets(folder: Path) -> None:
    trainee, model = trainee_of(folder, tap=1), target_of(folder)
    ids = [prompt(2 * BLOCK, seed=1), prompt(5 * BLOCK, seed=2)]
    batch, laws = [], []
    for one in ids:
        cache = paged_cache(model)
        cache.open(0)
        output = forward(model, cache, [one], [0], (1,))
        batch.append(Noised(torch.tensor(one), torch.ones(len(one), dtype=torch.bool), output.taps[0]))
        laws.append(output.logits)
    assert torch.allclose(F.linear(trainee.teach(batch), trainee.head), torch.cat(laws), atol=1e-4)


def test_the_loss_is_the_mean_cross_entropy_of_what_is_picked(folder: Path) -> None:
    trainee, batch = trainee_of(folder), [text_of(8, 5), text_of(5, 6)]
    hidden, taught = trainee(batch).double(), trainee.teach(batch).double()
    head = trainee.head.double()
    rows = [(i, place) for i, one in enumerate(batch) for place in one.masked.nonzero()[:, 0].tolist()]
    picked = [j for j, (_, place) in enumerate(rows) if place and j % 3]
    total, laws = 0.0, 0
    for j in picked:
        i, place = rows[j]
        one = batch[i]
        logits = (hidden[j] @ head.T).log_softmax(-1)
        end = place // BLOCK * BLOCK + BLOCK
        if one.masked[place:end].all():
            law = (taught[place - 1 + (len(batch[0].ids) if i else 0)] @ head.T).softmax(-1)
            total, laws = total - (law * logits).sum().item(), laws + 1
        else:
            total -= logits[one.ids[place]].item()
    assert 0 < laws < len(picked)
    loss = trainee.loss(batch, torch.tensor(picked))
    assert loss.item() == pytest.approx(total / len(picked), rel=1e-5)
    loss.backward()
    weight = trainee.model.mask_embedding
    slope, step = weight.grad, 1e-2
    assert slope is not None
    direction = slope / slope.norm()
    with torch.no_grad():
        values = []
        for sign in (1.0, -1.0):
            weight += sign * step * direction
            values.append(trainee.loss(batch, torch.tensor(picked)).item())
            weight -= sign * step * direction
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope.norm().item(), rel=1e-2)


def test_noise_is_what_a_round_meets() -> None:
    """Every block has a masked place, c clean tokens begin it for every c alike, and half have no more."""
    blocks = noise(8000, BLOCK, random.Random(0)).view(-1, BLOCK)
    assert blocks.any(1).all()
    plain = sum(1 for block in blocks.tolist() if block == sorted(block))
    suffix = [(blocks == (torch.arange(BLOCK) >= c)).all(1).float().mean().item() for c in range(BLOCK)]
    assert plain > 4000 and all(share > 0.12 for share in suffix)
    # a place is masked with probability P(c <= place) * 3/4, or a little more where a block would have none
    shares = blocks.float().mean(0)
    for place in range(BLOCK):
        least = (place + 1) / BLOCK * 0.75
        assert least - 0.02 < shares[place].item() < least + 0.2


def test_an_exported_drafter_drafts_live_what_training_drafts(folder: Path, tmp_path: Path) -> None:
    """Up to the end of the anchor's block, which is as far as training looks."""
    trainee = trainee_of(folder)
    trainee.export(tmp_path / "drafter")
    engine = Engine.load(target=str(folder), drafter=str(tmp_path / "drafter"), weights="float32", draft_tokens=6)
    compared = 0
    for seed in range(3):
        start = prompt(9 + seed, seed=seed)
        done = engine.generate(start, SamplingParams(max_tokens=40, ignore_eos=True))
        ids = [*start, *done.token_ids]
        ids += [0] * (-len(ids) % BLOCK)  # the last block may be cut; what is in it after the anchor is not read
        for one in done.rounds[:-3]:  # the limit cuts the last ones short
            begin = (one.anchor_pos + 1) % BLOCK
            drafts = trainee.drafts(torch.tensor(ids), begin)[(one.anchor_pos + 1) // BLOCK].tolist()
            assert list(one.drafted[: BLOCK - begin]) == drafts
            compared += len(drafts)
    assert compared > 60


def texts_of(folder: Path, taps: tuple[int, ...], count: int = 6) -> list[Continuation]:
    prompts = [Prompt(tuple(prompt(9 + i, seed=i)), "code", f"s/{i}.py", validation=i % 3 == 0) for i in range(count)]
    device = torch.device("cpu")
    model = load_target(folder)
    found = generate(
        model, prompts, taps=taps, stop_ids=frozenset(), length=40, batch=3, dtype=torch.float32, device=device
    )
    return sorted(found, key=lambda one: len(one.prompt.ids))


def plan(**changes: Any) -> MaskedPlan:
    values: dict[str, Any] = {"steps": 12, "seed": 5, "sequences": 2, "labels": 30, "decay": 3.0}
    return MaskedPlan(**values | {"rate": 3e-3, "warm_up": 2, "bf16": False} | changes)


def test_a_run_learns_and_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00000.safetensors", texts_of(folder, (0, 2)))
    sides = read_texts(tmp_path, shortest=BLOCK)

    def run(out: str, stop_after: int | None = None, steps: int = 12) -> MaskedTrainee:
        trainee, wanted = trainee_of(folder), plan(steps=steps)
        train(trainee, wanted, sides, tmp_path / out, save_every=3, say=lambda _: None, stop_after=stop_after)
        return trainee

    whole = run("whole")
    run("parts", stop_after=5)  # the last checkpoint is that of step 3
    parts = run("parts")
    curves = [(tmp_path / out / "curve.jsonl").read_text() for out in ("whole", "parts")]
    assert curves[0] == curves[1] and len(curves[0].splitlines()) == 12
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    losses = [json.loads(line)["loss"] for line in curves[0].splitlines()]
    assert sum(losses[-3:]) < sum(losses[:3])
    # a run is made shorter before its rate falls, and no more after it
    shorter = run("shorter", steps=8)
    run("cut", stop_after=5)
    cut = run("cut", steps=8)
    assert all(torch.equal(a, b) for a, b in zip(shorter.parameters(), cut.parameters(), strict=True))
    with pytest.raises(UsageError, match="another plan: steps"):
        run("whole", steps=16)


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [plan(steps=40).rate_at(step) / 3e-3 for step in range(40)]
    assert rates[:2] == [0.5, 1.0] and rates[2:31] == [1.0] * 29
    assert rates[31:] == pytest.approx([i / 10 for i in range(9, 0, -1)])


def test_validation_counts_drafts_up_to_the_end_of_a_block(folder: Path, tmp_path: Path) -> None:
    """Against drafts of one block at a time, with the masks written out."""
    write_shard(tmp_path / "shard-00000.safetensors", texts_of(folder, (0, 2)))
    _, texts = read_texts(tmp_path, shortest=BLOCK)
    trainee = trainee_of(folder)
    found = list(trainee.validate(plan(), texts))
    assert sorted(kind for kind, _, _ in found) == ["code"] * len(texts)
    for begin in range(BLOCK):
        ids, _ = read(texts[0])
        ids = ids[: len(ids) // BLOCK * BLOCK]
        drafts = trainee.drafts(ids, begin)
        for block in range(len(ids) // BLOCK):
            cut = ids[: (block + 1) * BLOCK].clone()
            masked = torch.zeros(len(cut), dtype=torch.bool)
            masked[block * BLOCK + begin :] = True
            cut[masked] = 0
            with torch.no_grad():
                logits = F.linear(trainee([Noised(cut, masked, cut)]), trainee.head)
            logits[:, MASK] = -torch.inf
            assert drafts[block].tolist() == logits.argmax(-1).tolist()
