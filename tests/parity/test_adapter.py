"""An adapter on the target's own weights: its drafts against dense sums with merged matrices, the target untouched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cli.command import main, refused
from safetensors.torch import load_file, save_file

from foldspec import Engine, SamplingParams
from foldspec.bench.offline import leading_drafts
from foldspec.cache.rows import Rows
from foldspec.drafters.adapter import Adapter
from foldspec.models.base import ForwardPlan
from foldspec.noise import Noise

MASK, RANK, ALPHA, COUNT = 127, 3, 5, 4
TARGET: dict[str, Any] = {**tiny.TARGET, "architectures": ["Qwen3ForCausalLM"], "head_dim": 12}
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somebody/tiny",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": [name.rpartition(".")[2] for name in MODULES],
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "mask_token_id": MASK,
    "shifted": True,
}


def write(folder: Path, target: Path, modules: Sequence[str] = MODULES, **changes: Any) -> Path:
    """A random adapter on the target in a folder, as PEFT would write it."""
    tensors, draw = {}, torch.Generator().manual_seed(8)
    for name, weight in load_file(target / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            out, inner = weight.shape
            for side, shape in (("A", (RANK, inner)), ("B", (out, RANK))):
                x = torch.randn(*shape, generator=draw) * 0.8 / shape[1] ** 0.5
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = x
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(tiny.changed(CONFIG, **changes)))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapter")
    target = tiny.write_target(root / "target", TARGET)
    return {
        "target": target,
        "shifted": write(root / "shifted", target),
        "in place": write(root / "in place", target, shifted=False, use_rslora=True),
    }


def load(folders: dict[str, Path], adapter: str = "shifted", **options: Any) -> Engine:
    sizes = {"threads": 1, "max_context": 256, "page_size": 16, "max_batch": 3, "debug": True, "draft_tokens": COUNT}
    return Engine.load(target=str(folders["target"]), drafter=str(folders[adapter]), **{**sizes, **options})


# -------------------------------------------------------------------------------------------- the network, by hand


def dense_logits(target: Path, adapter: Path, prefix: Sequence[int], canvas: Sequence[int]) -> torch.Tensor:
    """All rows of prefix and canvas in float64, each canvas row with merged matrices W + s B A: [rows, ids]."""
    w = {name: x.double() for name, x in load_file(target / "model.safetensors").items()}
    lora = {name: x.double() for name, x in load_file(adapter / "adapter_model.safetensors").items()}
    given = json.loads((adapter / "adapter_config.json").read_text())
    scale = given["lora_alpha"] / (given["r"] ** 0.5 if given["use_rslora"] else given["r"])
    n, total = len(prefix), len(prefix) + len(canvas)
    x = w["model.embed_tokens.weight"][[*prefix, *canvas]]
    seen = torch.ones(total, total).tril().bool()
    seen[n:, n:] = True  # drafts read one another

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        own = merged = w[f"{name}.weight"]
        key = f"base_model.model.{name}.lora_"
        if f"{key}A.weight" in lora:
            merged = own + scale * lora[f"{key}B.weight"] @ lora[f"{key}A.weight"]
        return torch.cat((x[:n] @ own.T, x[n:] @ merged.T))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return w[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + TARGET["rms_norm_eps"]).sqrt()

    d, heads, kv = TARGET["head_dim"], TARGET["num_attention_heads"], TARGET["num_key_value_heads"]
    angles = torch.arange(total).double()[:, None] * TARGET["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for i in range(TARGET["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(f"{layer}.input_layernorm", x)
        q = rotated(norm(f"{layer}.self_attn.q_norm", linear(f"{layer}.self_attn.q_proj", h).view(total, heads, d)))
        k = rotated(norm(f"{layer}.self_attn.k_norm", linear(f"{layer}.self_attn.k_proj", h).view(total, kv, d)))
        v = linear(f"{layer}.self_attn.v_proj", h).view(total, kv, d)
        k, v = (y.repeat_interleave(heads // kv, dim=1) for y in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * d**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + linear(f"{layer}.self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        h = norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (linear(f"{layer}.mlp.{side}_proj", h) for side in ("gate", "up"))
        x = x + linear(f"{layer}.mlp.down_proj", gate * gate.sigmoid() * up)
    return norm("model.norm", x) @ w["lm_head.weight"].T


def bound(engine: Engine, **method: Any) -> Adapter:
    drafter = engine.using(**method)._drafter
    assert isinstance(drafter, Adapter)
    return drafter


def watched(drafter: Adapter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], torch.Tensor]]:
    """The ids and the logits of each pass that follows, before the mask is barred."""
    seen: list[tuple[list[int], torch.Tensor]] = []
    forward = drafter._forward

    def wrapped(rows: Rows, ids: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        logits = forward(rows, ids, places)
        seen.append((list(ids), logits.clone()))
        return logits

    monkeypatch.setattr(drafter, "_forward", wrapped)
    return seen


@pytest.mark.parametrize("adapter", ["shifted", "in place"])
@pytest.mark.parametrize("steps", [1, 2])
def test_every_pass_is_the_dense_one(
    folders: dict[str, Path], adapter: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests at once, in every step, on what the target's own weights have made of the prefix."""
    prompts, anchors = [tiny.prompt(19, 126, seed=2), tiny.prompt(6, 126, seed=3)], [5, 9]
    with load(folders, adapter) as engine, torch.inference_mode():
        drafter, resources = bound(engine, steps=steps), engine.resources
        model, cache = resources.found.model, resources.cache
        for request, prompt in enumerate(prompts):
            cache.open(request)
            model(torch.tensor(prompt), ForwardPlan(Rows.of([request], [0], [len(prompt)])), cache)
        seen = watched(drafter, monkeypatch)
        starts = [len(prompt) for prompt in prompts]
        proposals = drafter.propose(Rows.of([0, 1], starts, [1, 1]), anchors, [COUNT, 3], [Noise(0), Noise(1)])
        assert [len(each.tokens) for each in proposals] == [COUNT, 3] and len(seen) == steps
        drafts = [drafted for each in proposals for drafted in each.tokens]
        assert MASK not in drafts
        for ids, logits in seen:
            found = iter(logits)
            pieces = [(0, ids[: COUNT + 1]), (1, ids[COUNT + 1 :])]
            for request, (anchor, *canvas) in pieces:
                assert anchor == anchors[request]
                given = [*prompts[request], anchor]
                wanted = dense_logits(folders["target"], folders[adapter], given, canvas)[len(given) :]
                before = dense_logits(folders["target"], folders[adapter], given, canvas)[len(given) - 1 :]
                for place, token in enumerate(canvas):
                    if token == MASK:
                        row = before[place] if adapter == "shifted" else wanted[place]
                        torch.testing.assert_close(next(found).double(), row, atol=2e-4, rtol=0)
            assert next(found, None) is None
        first = seen[0][1][:COUNT].clone()
        first[:, MASK] = -torch.inf
        if steps == 1:
            assert list(proposals[0].tokens) == first.argmax(-1).tolist()


def test_the_mask_is_never_drafted(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folders) as engine, torch.inference_mode():
        drafter = bound(engine)
        engine.resources.cache.open(0)
        forward = drafter._forward
        wish = torch.zeros(128)
        wish[MASK] = 1e4
        monkeypatch.setattr(drafter, "_forward", lambda *arguments: forward(*arguments) + wish)
        (proposal,) = drafter.propose(Rows.of([0], [0], [1]), [7], [COUNT], [Noise(0)])
        assert len(proposal.tokens) == COUNT and MASK not in proposal.tokens
        engine.resources.cache.close(0)


def test_the_target_is_not_touched(folders: dict[str, Path]) -> None:
    """Not a bit of its cache or of its logits."""
    with load(folders) as engine, torch.inference_mode():
        drafter, resources = bound(engine), engine.resources
        model, cache, prompt = resources.found.model, resources.cache, tiny.prompt(33, 126, seed=4)
        plan = ForwardPlan(Rows.of([0], [0], [33]))
        cache.open(0)
        logits = model(torch.tensor(prompt), plan, cache).logits
        held = [tiny.dense(entries).clone() for layer in range(4) for entries in cache.entries(layer, 0)]
        pages = cache.tables.allocator.free_pages
        drafter.propose(Rows.of([0], [33], [1]), [7], [COUNT], [Noise(0)])
        assert cache.tables.length(0) == 33 and cache.tables.allocator.free_pages == pages
        after = [tiny.dense(entries) for layer in range(4) for entries in cache.entries(layer, 0)]
        assert all(torch.equal(a, b) for a, b in zip(held, after, strict=True))
        cache.open(1)
        again = model(torch.tensor(prompt), ForwardPlan(Rows.of([1], [0], [33])), cache).logits
        assert torch.equal(logits, again)
        cache.close(0)
        cache.close(1)


def test_an_error_in_a_pass_leaves_no_adapter_behind(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folders) as engine, torch.inference_mode():
        drafter, model = bound(engine), engine.resources.found.model
        engine.resources.cache.open(0)
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                drafter.propose(Rows.of([0], [0], [1]), [7], [COUNT], [Noise(0)])
        assert all(getattr(module, "more", None) is None for module in model.modules())


@pytest.mark.parametrize("adapter", ["shifted", "in place"])
def test_no_token_changes(folders: dict[str, Path], adapter: str) -> None:
    """Whatever the effort, alone and together, from a prefix, with pages that run out."""
    prompts, params = [tiny.prompt(length, 126, seed=length) for length in (1, 10, 16)], SamplingParams(max_tokens=16)
    with load(folders, adapter, cache_tokens=80) as engine:
        plain = [done.token_ids for done in engine.using(draft_tokens=0).generate(list(prompts), params)]
        ways: list[dict[str, Any]] = [{}, {"steps": 2, "accept": "match"}, {"steps": 4, "draft_temperature": 1.0}]
        for way in ways:
            assert [done.token_ids for done in engine.using(**way).generate(list(prompts), params)] == plain
        with engine.prefill(prompts[2]) as prefix:
            assert engine.generate(prefix, params).token_ids == plain[2]
            (leading,) = leading_drafts(engine, prefix, plain[2], [engine.method])
            assert len(leading) == len(plain[2]) - COUNT
            if adapter == "shifted":  # the anchor's row is the target's own
                assert min(leading) >= 1
        done = engine.generate(prompts[1], params)
        if adapter == "shifted":
            assert all(round_.accepted >= 1 for round_ in done.rounds if round_.drafted)
        assert engine.lossless and not engine.using(steps=2, draft_temperature=1.0, q_mode="reveal_step").lossless


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["shifted", "in place"])
def test_twenty_prompts(folders: dict[str, Path], adapter: str) -> None:
    prompts, params = [tiny.prompt(1 + 7 * i % 61, 126, seed=100 + i) for i in range(20)], SamplingParams(max_tokens=14)
    with load(folders, adapter, max_batch=8) as engine:
        plain = [done.token_ids for done in engine.using(draft_tokens=0).generate(list(prompts), params)]
        efforts: list[dict[str, Any]] = [{"steps": steps} for steps in (1, 2, 4)]
        efforts += [{"confidence": 0.02}, {"confidence": 0.05, "order": "dynamic"}, {"entropy_bound": 4.0}]
        for effort in efforts:
            for rule in ("exact", "match"):
                for heat in (0.0, 0.8):
                    way = engine.using(**effort, accept=rule, draft_temperature=heat)
                    assert [done.token_ids for done in way.generate(list(prompts), params)] == plain


def test_the_registry_does_not_claim_to_know_the_format() -> None:
    words = ("--target", "Qwen/Qwen3-8B", "--drafter", "s-sahoo/uno-qwen3-8B", "-p", "x")
    refused(main("generate", *words), 3, "kind adapter", "format unverified", "adapter_config.json")


# ------------------------------------------------------------------------------------------------------------ refused

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"mask_token_id": None}, "mask_token_id is missing: PEFT's format does not say how an adapter drafts"),
    "no shift": ({"shifted": None}, "shifted is missing"),
    "mask outside": ({"mask_token_id": 128}, "its mask id 128 is outside the target's 128 ids"),
    "dora": ({"use_dora": True}, "use_dora = True is not supported"),
    "biases": ({"bias": "all"}, "bias = 'all' is not supported"),
    "ranks": ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    "another rank": ({"r": 4}, "wrong shape"),
    "no rank": ({"r": None}, "r is missing"),
    "another type": ({"peft_type": "IA3"}, "unknown drafter architecture 'PEFT IA3'"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
}


@pytest.mark.parametrize("name", BAD)
def test_adapters_that_cannot_be_used(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    changes, says = BAD[name]
    adapter = write(tmp_path / "adapter", folders["target"], **changes)
    words = ("--target", folders["target"], "--drafter", adapter)
    line = refused(main("generate", *words, "--prompt-ids", "1,2"), 3, says)
    assert refused(main("check", *words), 3) == line


def test_targets_that_it_does_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    others = {
        "it changes model.layers.0.mlp.down_proj": {**TARGET, "intermediate_size": 56},
        "the target has nothing of that name": {**TARGET, "num_hidden_layers": 3},
        "recurrent states cannot read a block both ways": tiny.QWEN3_5,
    }
    for says, config in others.items():
        target = tiny.write_target(tmp_path / says.replace(" ", "_"), config)
        words = ("--target", target, "--drafter", folders["shifted"], "--prompt-ids", "1,2")
        refused(main("generate", *words), 3, "does not fit the target", says)


def test_a_file_with_half_an_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    adapter = write(tmp_path / "adapter", folders["target"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    words = ("--target", folders["target"], "--drafter", adapter, "--prompt-ids", "1,2")
    refused(main("generate", *words), 3, "model.layers.1.self_attn.q_proj has one half of a LoRA")


def test_what_check_says(folders: dict[str, Path]) -> None:
    said = main("check", "--target", folders["target"], "--drafter", folders["shifted"], "--json").json
    assert said["pair"]["made for"] == "somebody/tiny" and said["pair"]["mask id"] == MASK
    assert said["pair"]["adapter on"] == f"{4 * len(MODULES)} matrices" and said["memory"]["draft cache"] == "0 MB"
