"""A DFlash network in training: blocks at many anchors of a sequence in one pass, and what its loss is.

The network is the one that foldspec runs (:class:`DFlashNetwork`); only its attention is written anew here, because a
training pass has no cache: every block reads the sequence's context rows before its anchor, and itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foldspec.drafters.dflash import DFlashConfig, DFlashNetwork
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.rotate_append.reference import rotate
from foldspec.models.base import LanguageModel
from foldspec.models.config import ModelConfig
from training.loop import Learner, Plan, export
from training.shape import target_shape
from training.store import Text, Texts, read

__all__ = ["Anchors", "DFlashPlan", "Trainee", "config_of", "draft_vocabulary"]

IGNORED = -100


def config_of(
    target: ModelConfig,
    *,
    layout: str,
    layers: int,
    block: int,
    taps: Sequence[int],
    mask_id: int,
    draft_ids: int | None,
    markov_rank: int,
) -> dict[str, Any]:
    """The config.json of a drafter shaped like its target; ``layout`` is ``deepspec`` or ``zlab``."""
    values, config = target.values, target_shape(target)
    rope = values.get("rope_parameters") or {}
    config |= {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_target_layers": values["num_hidden_layers"],
        "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": values.get("rope_theta", rope.get("rope_theta")),
        "rope_scaling": None,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "block_size": block,
    }
    own = {"mask_token_id": mask_id, "target_layer_ids": list(taps)}
    if draft_ids is not None:
        config["draft_vocab_size"] = draft_ids
    if layout == "zlab":
        return {"architectures": ["DFlashDraftModel"], **config, "dflash_config": own}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **config,
        **own,
        "markov_rank": markov_rank,
        "enable_confidence_head": False,
    }


@dataclass(frozen=True)
class DFlashPlan(Plan):
    """``anchors``: blocks a sequence. ``first_part``: share of the steps that train the first drafted row alone, at
    ``first_anchors`` a sequence."""

    anchors: int = 48
    first_part: float = 0.25
    first_anchors: int = 224


@dataclass(frozen=True)
class Anchors:
    """One sequence of a step: ``ids`` [n], ``taps`` [n, M * width] bf16 of which only rows before the last anchor are
    read, ``at`` [a] positions of the anchors, in order."""

    ids: torch.Tensor
    taps: torch.Tensor
    at: torch.Tensor

    def labels(self, first: int, count: int) -> torch.Tensor:
        """[a, count] the ids ``first``, ``first + 1``, .. places after each anchor; IGNORED past the end."""
        index = self.at[:, None] + torch.arange(first, first + count)
        return self.ids[index.clamp(max=len(self.ids) - 1)].masked_fill(index >= len(self.ids), IGNORED)


class Trainee(Learner[DFlashPlan]):
    """A DFlash network with fp32 weights that learn, the target's frozen embedding and head, perhaps a Markov head.

    ``first`` is how many places after the anchor row 0 predicts: 0 for z-lab's layout, 1 for DeepSpec's.
    """

    def __init__(
        self,
        config: dict[str, Any],
        target: LanguageModel,
        vocabulary: torch.Tensor | None,
        device: torch.device,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        rank = int(config.get("markov_rank", 0))
        plain = {**config, "markov_rank": 0}
        names = () if vocabulary is None else ("d2t",)
        self.config, self.device = config, device
        read = DFlashConfig.from_config(ModelConfig(plain, "drafter"), names)
        self.net = DFlashNetwork(read, Kernels("reference"))
        self.first = 1 - read.first_row
        self.block = read.block
        for name, weight in list(self.net.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            empty = torch.empty(weight.shape, device=device)
            setattr(self.net.get_submodule(owner), leaf, nn.Parameter(empty))
        ids = torch.arange(target.vocabulary) if vocabulary is None else vocabulary
        self.vocabulary = ids.to(device)
        if vocabulary is not None:
            self.net.d2t = (self.vocabulary - torch.arange(len(ids), device=device)).long()
        self.embedding = target.embed(torch.arange(target.vocabulary, device=device)).float()
        self.head = target.head_matrix.rows(self.vocabulary).detach().clone().to(device, head_dtype)
        self.draft_id = torch.full((target.vocabulary,), IGNORED, device=device)  # target id -> draft id
        self.draft_id[self.vocabulary] = torch.arange(len(ids), device=device)
        self.markov = nn.ParameterDict()
        if rank:
            self.markov["w1"] = nn.Parameter(torch.empty(target.vocabulary, rank, device=device))
            self.markov["w2"] = nn.Parameter(torch.empty(len(ids), rank, device=device))

    def start(self, tensors: Mapping[str, torch.Tensor], layers: Sequence[int], rms: Mapping[str, float]) -> None:
        """Begin as the target's own ``layers``: a context row then is, at first, what the last of them would have read
        of the last tap. ``rms`` measures the target: ``tap/M`` of each tap, ``q/L`` and ``k/L`` of a layer's heads."""
        net, width = self.net, self.net.norm.weight.shape[0]
        with torch.no_grad():
            for block, layer in zip(net.blocks, layers, strict=True):
                for name, weight in block.named_parameters():
                    if f"model.layers.{layer}.{name}" in tensors:  # the target has no norms over q and k
                        weight.copy_(tensors[f"model.layers.{layer}.{name}"])
                heads: Any = block.self_attn
                heads.q_norm.weight.fill_(rms[f"q/{layer}"])
                heads.k_norm.weight.fill_(rms[f"k/{layer}"])
            net.norm.weight.copy_(tensors["model.norm.weight"])
            net.hidden_norm.weight.copy_(tensors[f"model.layers.{layers[-1]}.input_layernorm.weight"])
            net.fc.weight.normal_(std=0.2 / net.fc.weight.shape[1] ** 0.5)
            taps = net.config.taps
            shares = [0.1] * (len(taps) - 3) + [0.2, 0.3, 1.0]
            for i, (tap, share) in enumerate(zip(taps, shares[-len(taps) :], strict=True)):
                net.fc.weight[:, i * width : (i + 1) * width] += torch.eye(width) * share / rms[f"tap/{tap}"]
            for name, weight in self.markov.items():
                weight.normal_(std=0.02) if name == "w1" else weight.zero_()

    def forward(self, batch: Sequence[Anchors], rows: int) -> torch.Tensor:
        """Final rows [anchors of all sequences, ``rows``, width] of blocks cut to their first ``rows`` rows."""
        net, config = self.net, self.net.config
        counts = [len(one.at) for one in batch]
        at = torch.cat([one.at for one in batch])
        anchor = self.embedding[torch.cat([one.ids[one.at] for one in batch])]
        mask = self.embedding[config.mask_id].expand(len(at), rows - 1, -1)
        x = torch.cat([anchor[:, None], mask], dim=1).flatten(0, 1)
        lengths = [int(one.at[-1]) for one in batch]
        used = [one.taps[:length] for one, length in zip(batch, lengths, strict=True)]
        total = sum(lengths)
        # rows in steps of 256: torch keeps what it prepares for each shape, and shapes without end fill the memory
        taps = F.pad(torch.cat(used).to(x.dtype), (0, 0, 0, -total % 256))
        context = net.hidden_norm(net.fc(taps).float())
        cos_sin = config.rope.at((at[:, None] + torch.arange(rows)).flatten())
        context_cos_sin = config.rope.at(torch.cat([torch.arange(length) for length in lengths]))
        masks = [_mask(one.at, length, rows) for one, length in zip(batch, lengths, strict=True)]
        for block in net.blocks:
            attention = block.self_attn
            own = attention.inputs(block.input_layernorm(x))
            q, k = (rotate(t, *cos_sin).split([n * rows for n in counts]) for t in own[:2])
            v = own[2].split([n * rows for n in counts])
            keys, values = (t[:total] for t in attention.context(context))
            ck, cv = rotate(keys, *context_cos_sin).split(lengths), values.split(lengths)
            o = [
                _attend(q[i], torch.cat([ck[i], k[i]]), torch.cat([cv[i], v[i]]), masks[i], net.scale)
                for i in range(len(batch))
            ]
            x = attention.output(torch.cat(o), x)
            x = block.mlp(block.post_attention_layernorm(x), x)
        return net.norm(x.float()).view(len(at), rows, -1)

    def logits(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """[.., draft ids] of final rows; ``previous`` [..] are the ids before each, which a Markov head reads."""
        logits = F.linear(hidden.to(self.head.dtype), self.head)
        if self.markov and previous is not None:
            logits = logits + F.linear(F.embedding(previous, self.markov["w1"]), self.markov["w2"])
        return logits.float()

    def loss(self, batch: Sequence[Anchors], rows: int, decay: float) -> torch.Tensor:
        """Cross-entropy of the labels, row ``k`` weighted by ``exp(-k / decay)``; ids that cannot be drafted do not
        count. Row 0 of z-lab's layout predicts nothing."""
        labels = torch.cat([one.labels(self.first, rows) for one in batch])
        before = torch.cat([one.labels(self.first - 1, rows) for one in batch]).clamp(min=0)
        logits = self.logits(self(batch, rows), before)
        wanted = torch.where(labels >= 0, self.draft_id[labels.clamp(min=0)], IGNORED)
        weight = torch.exp(-(torch.arange(rows) - (1 - self.first)) / decay).expand(wanted.shape).clone()
        weight[:, : 1 - self.first] = 0.0
        weight = weight * (wanted >= 0)
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
        total: torch.Tensor = (each * weight.flatten()).sum() / weight.sum().clamp(min=1e-6)
        return total

    def step_loss(self, plan: DFlashPlan, texts: Texts, step: int, rank: int) -> tuple[torch.Tensor, dict[str, Any]]:
        rng = random.Random(f"{plan.seed}/{step}/{rank}")
        first = step < plan.first_part * plan.steps
        rows = 2 - self.first if first else self.block
        count = plan.first_anchors if first else plan.anchors
        batch: list[Anchors] = []
        while len(batch) < plan.sequences:
            anchors = _anchors(rng.choice(texts), count, rng, drafts=0)
            if anchors is not None:
                batch.append(anchors)
        return self.loss(batch, rows, plan.decay), {"rows": rows}

    def validate(self, plan: DFlashPlan, texts: Texts) -> Iterator[tuple[str, int, list[int]]]:
        rng = random.Random(f"validation/{plan.seed}")
        drafts = self.block - (1 - self.first)
        for text in rng.sample(texts, min(plan.validation, len(texts))):
            anchors = _anchors(text, 24, rng, drafts=drafts)
            if anchors is not None:
                yield text.kind, drafts, self.leading([anchors]).tolist()

    @torch.no_grad()
    def drafts(self, batch: Sequence[Anchors]) -> torch.Tensor:
        """[anchors, drafts] ids that a greedy round drafts after each anchor."""
        hidden = self(batch, self.block)[:, 1 - self.first :]
        token = torch.cat([one.ids[one.at] for one in batch])
        drafted = []
        for row in range(hidden.shape[1]):
            token = self.vocabulary[self.logits(hidden[:, row], token).argmax(-1)]
            drafted.append(token)
        return torch.stack(drafted, dim=1)

    def leading(self, batch: Sequence[Anchors]) -> torch.Tensor:
        """[anchors] drafts that equal the target's text before the first that does not."""
        drafts = self.drafts(batch)
        labels = torch.cat([one.labels(1, drafts.shape[1]) for one in batch])
        return (drafts == labels).int().cumprod(1).sum(1)

    def export(self, folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = dict(self.net.named_parameters())
        if len(self.vocabulary) < len(self.draft_id):
            tensors["d2t"] = self.net.d2t
        for name, weight in self.markov.items():
            tensors[f"markov_head.markov_{name}.weight"] = weight
        export(folder, self.config, tensors)


def _anchors(text: Text, count: int, rng: random.Random, *, drafts: int) -> Anchors | None:
    """Anchors of a text; with ``drafts``, only such as have so many tokens after them."""
    ids, taps = read(text)
    able = range(max(1, text.prompt - 1), len(ids) - max(1, drafts))
    if not able:
        return None
    return Anchors(ids, taps, torch.tensor(sorted(rng.sample(able, min(count, len(able))))))


def _mask(at: torch.Tensor, length: int, rows: int) -> torch.Tensor:
    """[a * rows, length + a * rows] what each row sees: the context before its anchor, and its own block."""
    context = torch.arange(length) < at.repeat_interleave(rows)[:, None]
    block = torch.arange(len(at)).repeat_interleave(rows)
    return torch.cat([context, block[:, None] == block], dim=1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, heads, d], k and v [m, kv heads, d], mask [n, m] -> [n, heads, d]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return F.scaled_dot_product_attention(q, k, v.to(q.dtype), mask.to(q.device), scale=scale)[0].transpose(0, 1)


def draft_vocabulary(
    texts: Sequence[torch.Tensor], prompts: Sequence[torch.Tensor], size: int, total: int
) -> torch.Tensor:
    """The ``size`` ids that a drafter can say, in order: those the target wrote most, then those its prompts hold, then
    the lowest, which a byte-pair vocabulary gives to what is common."""
    said = torch.zeros(total, dtype=torch.float64)
    for ids, weight in ((texts, 1e6), (prompts, 1.0)):
        for one in ids:
            said.index_add_(0, one, torch.full((len(one),), weight, dtype=torch.float64))
    said -= torch.arange(total, dtype=torch.float64) / total
    return said.topk(size).indices.sort().values
