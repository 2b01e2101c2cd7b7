"""A masked-diffusion drafter in training: a Llama that fills in the masked places of a block.

SDAR's form: places lie in blocks of b on the absolute grid, a row sees every block before its own and all of its own,
and the row of a masked place predicts that place. A training pass runs a text twice at once: a clean copy, which later
blocks read, and a noised copy, each block of which reads the clean blocks before it and itself. The blocks are those
that foldspec runs (:class:`foldspec.models.llama.Block`); only their attention is written anew, because a training pass
has no cache.

What is learnt: where nothing clean stands to the right of a masked place in its block, the target's law of what comes
next (the taps of the data are run to their end); elsewhere, where that law does not know as much as the row does, the
text itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.rotate_append.reference import rotate
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Geometry, RMSNorm
from foldspec.models.llama import Block, Extras, Llama
from foldspec.models.rope import Rope
from training.head_loss import HeadLoss
from training.loop import Learner, Plan, export
from training.shape import target_shape
from training.store import Text, Texts, read

__all__ = ["MaskedPlan", "MaskedTrainee", "Noised", "masked_config", "noise"]


def masked_config(target: ModelConfig, *, layers: int, block: int, mask_id: int) -> dict[str, Any]:
    """The config.json of a drafter shaped like its target, which must be a Llama."""
    values, shape = target.values, target_shape(target)
    ropes = {str(name): values[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in values}
    return {
        "architectures": ["MaskedLlamaForCausalLM"],
        **shape,
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_target_layers": values["num_hidden_layers"],
        "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": values["rms_norm_eps"],
        "attention_bias": False,
        "mlp_bias": False,
        **ropes,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "block_length": block,
        "mask_token_id": mask_id,
    }


@dataclass(frozen=True)
class MaskedPlan(Plan):
    """``labels``: masked places a step (and worker) whose prediction counts. ``warm_up`` is a number of steps here;
    then the rate stays, and in the last ``cool_down`` of the steps, a share, it falls in a line to 2%. Until then the
    steps of a run do not depend on how many there will be."""

    labels: int = 384
    cool_down: float = 0.25

    def rate_at(self, step: int) -> float:
        left = (self.steps - step) / max(1.0, self.cool_down * self.steps)
        return self.rate * min(1.0, (step + 1) / self.warm_up, max(0.02, left))

    def begins_as(self, other: dict[str, Any], steps: int) -> bool:
        plan = MaskedPlan(**other)
        return all(plan.rate_at(step) == self.rate_at(step) for step in range(steps))


@dataclass(frozen=True)
class Noised:
    """A text in training: ``ids`` [n] int64, whole blocks of it; ``masked`` [n] bool, the places to be predicted;
    ``tap`` [n, width] bf16, the target's last tap."""

    ids: torch.Tensor
    masked: torch.Tensor
    tap: torch.Tensor

    def before(self, block: int) -> torch.Tensor:
        """[n] masked places before each in its block."""
        masked = self.masked.view(-1, block).int()
        return (masked.cumsum(1) - masked).flatten()

    def open(self, block: int) -> torch.Tensor:
        """[n] whether nothing clean stands to the right of each in its block."""
        clean = (~self.masked).view(-1, block).int()
        return (clean.flip(1).cumsum(1).flip(1) == 0).flatten()


def noise(blocks: int, length: int, rng: random.Random) -> torch.Tensor:
    """Which places of ``blocks`` blocks are masked, [blocks * length] bool, at least one of each block.

    Of a block the first c tokens stand, as committed ones do when a round begins, with c uniform in 0 .. length - 1.
    Of the others all are masked in half of the blocks, else each by itself with a probability uniform in 0 .. 1.
    """
    masked: list[bool] = []
    for _ in range(blocks):
        begin = rng.randrange(length)
        ratio = 1.0 if rng.random() < 0.5 else rng.random()
        block = [place >= begin and rng.random() < ratio for place in range(length)]
        if not any(block):
            block[rng.randrange(begin, length)] = True
        masked += block
    return torch.tensor(masked)


class Network(nn.Module):
    """The tensors of the checkpoint, by their names in it."""

    def __init__(self, g: Geometry, kernels: Kernels) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(g, kernels, Extras()) for _ in range(g.layers))
        self.norm = RMSNorm(g.width, g.eps, kernels)
        self.mask_embedding = nn.Parameter(torch.empty(g.width, device="meta"), requires_grad=False)


class MaskedTrainee(Learner[MaskedPlan]):
    """The drafter with fp32 weights that learn, and of the target its frozen embedding and head and the layers after
    ``tap``, which teach.

    ``chunk``  places whose attention is taken at once, whole blocks: what none of them sees is left out
    """

    def __init__(
        self,
        config: dict[str, Any],
        target: Llama,
        tap: int,
        device: torch.device,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        read = ModelConfig(config, "drafter")
        g = Geometry.from_config(read)
        self.config, self.block, self.device = config, int(config["block_length"]), device
        self.model = Network(g, Kernels("reference")).to_empty(device=device)
        self.chunk = self.block * max(1, 128 // self.block)
        self.rope, self.scale = Rope.from_config(read, g.head_dim), g.head_dim**-0.5
        every = torch.arange(target.vocabulary, device=device)
        self.embedding = target.embed(every).float()
        self.head = target.head_matrix.rows(every).to(head_dtype)
        # in a tuple, so that they are none of this module's own
        self.teacher = (target, [cast(Block, block) for block in target.model.layers[tap + 1 :]])

    def start(self, tensors: Mapping[str, torch.Tensor], layers: Sequence[int]) -> None:
        """Begin as ``layers`` of the target, with the mean of all embeddings as the mask's row."""
        with torch.no_grad():
            for i, layer in enumerate(layers):
                for name, weight in self.model.layers[i].named_parameters():
                    weight.copy_(tensors[f"model.layers.{layer}.{name}"])
            self.model.norm.weight.copy_(tensors["model.norm.weight"])
            self.model.mask_embedding.copy_(self.embedding.mean(0))

    def forward(self, batch: Sequence[Noised]) -> torch.Tensor:
        """Final rows [masked places of all texts, width], in order."""
        ids, masked = (torch.cat(t).to(self.device) for t in zip(*((b.ids, b.masked) for b in batch), strict=True))
        lengths = [len(one.ids) for one in batch]
        clean = self.embedding[ids]
        noised = torch.where(masked[:, None], self.model.mask_embedding, clean)
        cos_sin = self.rope.at(torch.cat([torch.arange(length, device=self.device) for length in lengths] * 2))
        for i, layer in enumerate(self.model.layers):
            last = i == len(self.model.layers) - 1
            block = cast(Block, layer)
            rows = torch.cat([clean, noised])
            q, k, v = block.self_attn.inputs(block.input_layernorm(rows))
            q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
            copies = list(zip(*(t.split(lengths * 2) for t in (q, k, v)), strict=True))
            pairs = zip(copies[: len(batch)], copies[len(batch) :], strict=True)
            outs = [self._attend(clean_text, noised_text, last) for clean_text, noised_text in pairs]
            if last:  # nothing reads the clean copy any further, and only masked places are wanted
                o, x = torch.cat([out for _, out in outs])[masked], noised[masked]
            else:
                o, x = torch.cat([out for out, _ in outs] + [out for _, out in outs]), rows
            x = block.self_attn.output(o, x)
            x = block.mlp(block.post_attention_layernorm(x), x)
            if not last:
                clean, noised = x.split(len(ids))
        return self.model.norm(x.float())

    def _attend(
        self, clean: Sequence[torch.Tensor], noised: Sequence[torch.Tensor], last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated q, k and v [n, heads, d] of the two copies of a text -> what each reads; in the last layer the clean
        copy reads nothing."""
        outs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for begin in range(0, len(clean[0]), self.chunk):
            part = slice(begin, begin + self.chunk)
            k, v = (torch.cat([clean[i][: part.stop], noised[i][part]]) for i in (1, 2))
            own = noised[0][part]
            q = own if last else torch.cat([clean[0][part], own])
            o = attend(q, k, v, self._bias(begin, len(own), last), self.scale)
            outs.append((o[: len(o) - len(own)], o[len(o) - len(own) :]))
        first, second = zip(*outs, strict=True)
        return torch.cat(first), torch.cat(second)

    def _bias(self, begin: int, count: int, last: bool) -> torch.Tensor:
        """What is added to the scores of ``count`` places from ``begin`` on, first of the clean copy (unless ``last``),
        then of the noised one, against clean places up to their end and these places of the noised copy."""
        place = torch.arange(begin + count, device=self.device) // self.block
        rows, columns = place[begin:, None], place[None]
        noised = torch.cat([columns < rows, rows == place[begin:]], dim=1)
        clean = torch.cat([columns <= rows, torch.zeros_like(noised[:, columns.shape[1] :])], dim=1)
        seen = noised if last else torch.cat([clean, noised])
        return torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, -torch.inf)

    @torch.no_grad()
    def teach(self, batch: Sequence[Noised]) -> torch.Tensor:
        """The target's final rows [n, width] of whole texts: row i is of what follows place i."""
        target, blocks = self.teacher
        lengths = [len(one.ids) for one in batch]
        x = torch.cat([one.tap for one in batch]).to(self.device).float()
        cos_sin = target.rope.at(torch.cat([torch.arange(length, device=self.device) for length in lengths]))
        causal = [torch.full((n, n), -torch.inf, device=self.device).triu_(1) for n in lengths]
        scale = target.geometry.head_dim**-0.5
        for block in blocks:
            q, k, v = block.self_attn.inputs(block.input_layernorm(x))
            q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
            texts = zip(q.split(lengths), k.split(lengths), v.split(lengths), causal, strict=True)
            o = [attend(q, k, v, bias, scale) for q, k, v, bias in texts]
            x = block.self_attn.output(torch.cat(o), x)
            x = block.mlp(block.post_attention_layernorm(x), x)
        return cast(torch.Tensor, target.model.norm(x.float()))

    def loss(self, batch: Sequence[Noised], picked: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``picked``, numbers of masked places among those of the batch: against the target's law
        where nothing clean stands to their right in the block, else against the text. No text's first place may be
        among them."""
        hidden, rows = self(batch), torch.cat([one.masked for one in batch]).nonzero()[:, 0]
        is_open = torch.cat([one.open(self.block) for one in batch])
        soft = is_open[rows[picked]]
        picked = torch.cat([picked[soft], picked[~soft]]).to(self.device)
        rows = rows.to(self.device)[picked]
        law = self.teach(batch)[rows[: int(soft.sum())] - 1]
        ids = torch.cat([one.ids for one in batch]).to(self.device)[rows]
        total: torch.Tensor = HeadLoss.apply(hidden[picked], self.head, law, ids)
        return total / len(picked)

    def step_loss(self, plan: MaskedPlan, texts: Texts, step: int, rank: int) -> tuple[torch.Tensor, dict[str, Any]]:
        rng = random.Random(f"{plan.seed}/{step}/{rank}")
        batch = [self._noised(rng.choice(texts), rng) for _ in range(plan.sequences)]
        weight = torch.cat([torch.exp(-one.before(self.block) / plan.decay)[one.masked] for one in batch])
        first = torch.cat([torch.arange(len(one.ids))[one.masked] == 0 for one in batch])
        weight[first] = 0.0
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        count = min(plan.labels, int((weight > 0).sum()))
        return self.loss(batch, weight.multinomial(count, generator=generator).sort().values), {}

    def _noised(self, text: Text, rng: random.Random) -> Noised:
        ids, taps = read(text)
        blocks = len(ids) // self.block
        whole, width = blocks * self.block, self.embedding.shape[1]
        return Noised(ids[:whole], noise(blocks, self.block, rng), taps[:whole, -width:])

    @torch.no_grad()
    def drafts(self, ids: torch.Tensor, begin: int) -> torch.Tensor:
        """[blocks, length - begin] ids that one step drafts in each block of a text [n] after ``begin`` clean tokens of
        the block."""
        ids = ids[: len(ids) // self.block * self.block]
        masked = torch.arange(len(ids)) % self.block >= begin
        hidden = self([Noised(ids, masked, ids)])
        logits = F.linear(hidden.to(self.head.dtype), self.head)
        logits[:, self.config["mask_token_id"]] = -torch.inf
        return logits.argmax(-1).view(-1, self.block - begin).cpu()

    def validate(self, plan: MaskedPlan, texts: Texts) -> Iterator[tuple[str, int, list[int]]]:
        """Drafts of one step, up to the end of the block that the round begins in."""
        chosen = random.Random(f"validation/{plan.seed}").sample(texts, min(plan.validation, len(texts)))
        for i, text in enumerate(chosen):
            ids, begin = read(text)[0], i % self.block
            drafts = self.drafts(ids, begin)
            places = torch.arange(len(drafts))[:, None] * self.block + torch.arange(begin, self.block)
            leading = (drafts == ids[places]).int().cumprod(1).sum(1)
            yield text.kind, self.block - begin, leading[places[:, 0] >= text.prompt].tolist()

    def export(self, folder: Path) -> None:
        tensors = {f"model.{name}": weight for name, weight in self.model.named_parameters()}
        export(folder, self.config, tensors)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, heads, d], k and v [m, kv heads, d], bias [n, m] -> [n, heads, d]. On a CPU its backward pass is several
    times faster than that of torch's own."""
    n, heads, d = q.shape
    kv = k.shape[1]
    q = q.transpose(0, 1).reshape(kv, heads // kv * n, d)  # heads that share keys are one product
    k, v = k.to(q.dtype).transpose(0, 1), v.to(q.dtype).transpose(0, 1)
    bias = bias.to(q.dtype).repeat(heads // kv, 1).expand(kv, -1, -1)
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale).softmax(-1)
    return (weights.to(v.dtype) @ v).view(heads, n, d).transpose(0, 1)
