"""DFlash networks of both formats against the same network written from its specification: float64, no cache, no pages,
attention by loops over entries.

The tiny trained pairs have z-lab drafters with full layers; here is the rest: DeepSpec's rows, sliding layers,
causality, biases, own embeddings and heads, restricted vocabularies, and each of them under every context method.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import brute
import gemma
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

from foldspec.cache.rows import Rows
from foldspec.drafters.dflash import DFlash
from foldspec.models.llama import Llama
from foldspec.noise import Noise

WINDOW, BLOCK = 8, 5
D = WINDOW + BLOCK
LENGTHS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, D, D + 1, 3 * WINDOW, 37)

MIXED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4}
WIDE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 21}
OWN = ("embed_tokens.weight", "lm_head.weight")


def with_drafter(**changes: float) -> dict[str, Any]:
    """z-lab's config with more in its own part."""
    return {**tiny.ZLAB, "dflash_config": {**tiny.ZLAB["dflash_config"], **changes}}


NETWORKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "z-lab": (tiny.ZLAB, ()),
    "z-lab, sliding, biases": ({**tiny.ZLAB, **MIXED, "attention_bias": True}, ()),
    "z-lab, wide sliding, causal": ({**tiny.ZLAB, **WIDE, "is_causal": True}, ()),
    "z-lab, sliding, not causal": ({**tiny.ZLAB, **MIXED, "is_causal": False}, ()),
    "z-lab on Gemma": (tiny.ZLAB, ()),
    "z-lab on Gemma, scale and softcap, restricted": (
        {**with_drafter(input_embedding_scale=3.0, final_logit_softcapping=2.0), "draft_vocab_size": 40},
        ("d2t",),
    ),
    "DeepSpec": (tiny.DEEPSPEC, OWN),
    "DeepSpec, target's embedding and head": (tiny.DEEPSPEC, ()),
    "DeepSpec, target's head, sliding": ({**tiny.DEEPSPEC, **MIXED}, OWN[:1]),
    "DeepSpec, restricted": ({**tiny.DEEPSPEC, "draft_vocab_size": 40}, ("d2t",)),
    "DeepSpec on Gemma, its backbone": (gemma.DRAFTER, OWN),
    "DeepSpec on Gemma, its backbone, values of their own, restricted": (
        {**gemma.DRAFTER, "attention_k_eq_v": False, "draft_vocab_size": 40, "final_logit_softcapping": 2.0},
        ("d2t", *OWN[:1]),
    ),
    "DeepSpec on Gemma, its backbone, target's embedding and head": (gemma.DRAFTER, ()),
    "DeepSpec, restricted, own head": ({**tiny.DEEPSPEC, "draft_vocab_size": 40}, ("d2t", *OWN)),
}
# the other methods' attention is in tests/properties/test_context_methods.py
READS: list[tuple[str, dict[str, str]]] = [(name, {}) for name in ("full", "window", "fold")]
READS += [("fold", {"far_boundary": "complement"}), ("fold", {"coverage": "full"})]


class Naive:
    """The network, from the tensors of its file and of its target."""

    def __init__(self, config: dict[str, Any], file: Path, target: Path) -> None:
        self.c, self.own = config, {**config, **config.get("dflash_config", {})}
        gemma4 = json.loads((target.parent / "config.json").read_text())["architectures"] == ["Gemma4ForCausalLM"]
        self.scale = self.own.get("input_embedding_scale", 32**0.5 if gemma4 else 1.0)
        self.cap = self.own.get("final_logit_softcapping", gemma.TARGET["final_logit_softcapping"] if gemma4 else None)
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in load_file(file).items()}
        weights = {name: t.double() for name, t in load_file(target).items()}
        self.embedding = self.w.get("embed_tokens.weight", weights["model.embed_tokens.weight"])
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self.ids = torch.arange(len(head))
        if "d2t" in self.w:
            self.ids = torch.arange(len(self.w["d2t"])) + self.w["d2t"]
        self.head = self.w.get("lm_head.weight", head[self.ids])
        self.inverse = brute.frequencies(config["head_dim"], config["rope_theta"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.w[name] * x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def heads(self, x: torch.Tensor, layer: int, kind: str) -> torch.Tensor:
        y = self.linear(x, f"layers.{layer}.self_attn.{kind}_proj").unflatten(-1, (-1, self.c["head_dim"]))
        return y if kind == "v" else self.norm(y, f"layers.{layer}.self_attn.{kind}_norm.weight")

    def layer_kind(self, layer: int) -> tuple[int | None, bool]:
        """Native window and causality."""
        sliding = self.c.get("layer_types", ["full_attention"] * 3)[layer] == "sliding_attention"
        return self.c["sliding_window"] if sliding else None, self.c.get("is_causal", sliding)

    def logits(self, taps: torch.Tensor, anchor: int, context: str, options: dict[str, str]) -> torch.Tensor:
        """taps [n, taps * width] of the context; the logits of every block row."""
        c = self.norm(self.linear(taps.double(), "fc"), "hidden_norm.weight")
        x = self.scale * self.embedding[[anchor] + [self.own["mask_token_id"]] * (BLOCK - 1)]
        for i in range(self.c["num_hidden_layers"]):
            h = self.norm(x, f"layers.{i}.input_layernorm.weight")
            k, v = (torch.cat([self.heads(c, i, kind), self.heads(h, i, kind)]) for kind in "kv")
            q = self.heads(h, i, "q")
            o = brute.layer(q, k, v, self.inverse, *self.layer_kind(i), context, WINDOW, **options).out
            x = x + self.linear(o.flatten(1), f"layers.{i}.self_attn.o_proj")
            h = self.norm(x, f"layers.{i}.post_attention_layernorm.weight")
            gate, up = (self.linear(h, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self.linear(gate * torch.sigmoid(gate) * up, f"layers.{i}.mlp.down_proj")
        logits = self.norm(x, "norm.weight") @ self.head.T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class NaiveGemma(Naive):
    """The same on Gemma 4's backbone."""

    def __init__(self, config: dict[str, Any], file: Path, target: Path) -> None:
        super().__init__({**config, "head_dim": config["global_head_dim"], "rope_theta": 1e6}, file, target)
        self.scale, self.cap = 32**0.5, config["final_logit_softcapping"]
        self.inverse[2:] = 0.0  # a quarter of the 8 pairs turns

    def heads(self, x: torch.Tensor, layer: int, kind: str) -> torch.Tensor:
        own = "k" if kind == "v" and self.c["attention_k_eq_v"] else kind
        y = self.linear(x, f"layers.{layer}.self_attn.{own}_proj").unflatten(-1, (-1, self.c["head_dim"]))
        if kind == "v":
            return y / (y.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()
        y = self.norm(y, f"layers.{layer}.self_attn.{kind}_norm.weight")
        return y * self.c["head_dim"] ** 0.5 if kind == "q" else y  # attention below divides by it

    def logits(self, taps: torch.Tensor, anchor: int, context: str, options: dict[str, str]) -> torch.Tensor:
        c = self.norm(self.linear(taps.double(), "fc"), "hidden_norm.weight")
        x = self.scale * self.embedding[[anchor] + [self.own["mask_token_id"]] * (BLOCK - 1)]
        for i in range(self.c["num_hidden_layers"]):
            at = f"layers.{i}"
            h = self.norm(x, f"{at}.input_layernorm.weight")
            k, v = (torch.cat([self.heads(c, i, kind), self.heads(h, i, kind)]) for kind in "kv")
            o = brute.layer(self.heads(h, i, "q"), k, v, self.inverse, None, False, context, WINDOW, **options).out
            o = self.linear(o.flatten(1), f"{at}.self_attn.o_proj")
            x = x + self.norm(o, f"{at}.post_attention_layernorm.weight")
            h = self.norm(x, f"{at}.pre_feedforward_layernorm.weight")
            gate, up = (self.linear(h, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
            inner = gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
            x = x + self.norm(self.linear(inner, f"{at}.mlp.down_proj"), f"{at}.post_feedforward_layernorm.weight")
            x = x * self.w[f"{at}.layer_scalar"]
        return self.cap * torch.tanh(self.norm(x, "norm.weight") @ self.head.T / self.cap)


class Pair:
    def __init__(self, name: str, folder: Path) -> None:
        self.config, extra = NETWORKS[name]
        tied = "biases" in name  # one of the targets ties its head
        config = gemma.TARGET if "Gemma" in name else {**tiny.TARGET, "tie_word_embeddings": tied}
        target = tiny.write_target(folder / "target", config)
        drafter = tiny.write_drafter(folder / "drafter", self.config, extra=extra)
        self.model, self.network = tiny.load_target(target), tiny.load_drafter(drafter)
        naive = NaiveGemma if "its backbone" in name else Naive
        self.naive = naive(self.config, drafter / "model.safetensors", target / "model.safetensors")
        self.first_row = 1 if self.config["architectures"] == ["DFlashDraftModel"] else 0


@pytest.fixture(scope="module", params=NETWORKS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("dflash"))


def drawn_taps(count: int, network: Any) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(11)
    return [torch.randn(count, 32, generator=source) for _ in network.facts.taps]


def absorb(drafter: DFlash, request: int, taps: Sequence[torch.Tensor], first: int, last: int) -> None:
    drafter.absorb(Rows.of([request], [first], [last - first]), [], [tap[first:last] for tap in taps])


@pytest.mark.parametrize(("context", "options"), READS, ids=str)
def test_drafts_are_those_of_the_network_as_specified(
    pair: Pair, context: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block after block over one growing context: logits of the rows that draft, and the drafts."""
    seen: list[torch.Tensor] = []

    def watched(logits: torch.Tensor) -> list[int]:
        seen.append(logits)
        return logits.argmax(-1).tolist()

    monkeypatch.setattr("foldspec.drafters.dflash.greedy", watched)
    cache = tiny.draft_cache(pair.network)
    drafter = tiny.bind(pair.network, pair.model, cache, context=context, window=WINDOW, alpha=2.0, **options)
    drafter.open(0)
    taps, n = drawn_taps(max(LENGTHS), pair.network), 0
    with torch.inference_mode():
        for length in LENGTHS:
            middle = (n + length) // 2
            for first, last in ((n, middle), (middle, length)):
                if first < last:
                    absorb(drafter, 0, taps, first, last)
            n, anchor = length, 3 + length
            (proposal,) = drafter.propose(Rows.of([0], [n], [1]), [anchor], [99], [Noise(0)])
            wanted = pair.naive.logits(torch.cat([tap[:n] for tap in taps], -1), anchor, context, options)
            wanted = wanted[pair.first_row :]
            torch.testing.assert_close(seen.pop().double(), wanted, atol=2e-4, rtol=0)
            assert list(proposal.tokens) == pair.naive.ids[wanted.argmax(-1)].tolist()
            assert len(proposal.tokens) == drafter.max_drafts == BLOCK - pair.first_row


def test_requests_draft_together_as_alone(pair: Pair) -> None:
    """Three contexts of different lengths in one call, one with no budget; budgets cut what whole blocks drafted."""
    taps = drawn_taps(40, pair.network)
    lengths, anchors, budgets = (3, 40, 0, 17), (1, 2, 3, 4), (4, 0, 2, 9)
    with torch.inference_mode():
        alone = []
        for n, anchor in zip(lengths, anchors, strict=True):
            drafter = tiny.bind(
                pair.network, pair.model, tiny.draft_cache(pair.network), context="fold", window=WINDOW, alpha=2.0
            )
            drafter.open(0)
            absorb(drafter, 0, taps, 0, n) if n else None
            alone.append(drafter.propose(Rows.of([0], [n], [1]), [anchor], [99], [Noise(0)])[0].tokens)
        drafter = tiny.bind(
            pair.network, pair.model, tiny.draft_cache(pair.network), context="fold", window=WINDOW, alpha=2.0
        )
        for request in range(4):
            drafter.open(request)
        rows = Rows.of([0, 1, 3], [0, 0, 0], [3, 40, 17])
        drafter.absorb(rows, [], [torch.cat([tap[:count] for count in rows.counts]) for tap in taps])
        together = drafter.propose(Rows.of(range(4), lengths, [1] * 4), anchors, budgets, [Noise(0)] * 4)
    assert [p.tokens for p in together] == [tokens[:most] for tokens, most in zip(alone, budgets, strict=True)]


def test_the_networks_differ_where_they_should(tmp_path: Path) -> None:
    """The oracle itself: every variation changes the logits, or comparing with it would show nothing."""
    base = Pair("z-lab, sliding, biases", tmp_path)
    taps = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    plain = base.naive.logits(taps, 3, "full", {})
    variations = [base.naive.logits(taps, 3, "window", {}), base.naive.logits(taps, 3, "fold", {})]
    variations.append(base.naive.logits(taps, 3, "fold", {"coverage": "full"}))
    for change in (
        {"sliding_window": 3},
        {"is_causal": True},
        {"is_causal": False},
        {"layer_types": ["full_attention"] * 3},
    ):
        base.naive.c = {**base.config, **change}
        variations.append(base.naive.logits(taps, 3, "full", {}))
    seen = [plain]
    for other in variations:
        assert min(float((other - x).abs().max()) for x in seen) > 1e-2
        seen.append(other)
    assert isinstance(base.model, Llama) and np.isfinite(plain.numpy()).all()
