"""DFlash: a small network that reads the target's tapped states and fills a block of masks in one pass.

Both published formats, z-lab's and DeepSpec's, share the network:

    c_j = rms(fc [taps of token j])                        one context row a committed token, the same for all layers
    K, V of layer l = k_norm(Wk c), Wv c                    stored once, when the token is committed
    block = [anchor, MASK x (B-1)] at positions n .. n+B-1  reads the context and itself

A DeepSpec file may hold DSpark's heads (``dspark.py``): a Markov head joins the drafts of a block into a chain, a
confidence head says where a block is not worth verifying any further.

They differ in what row ``r`` predicts: the token at ``n + r`` (z-lab: B-1 drafts, row 0 unused) or at ``n + r + 1``
(DeepSpec: B drafts). The wrong shift loses all acceptance without a sound, so it is chosen by architecture alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from foldspec.cache.paged import CacheSpec
from foldspec.cache.rows import FixedRows, Rows
from foldspec.context import make_method
from foldspec.context.base import DrafterLayer
from foldspec.context.reader import ContextReader
from foldspec.drafters.base import Drafter
from foldspec.drafters.conditioned import ConditionedNetwork
from foldspec.drafters.dspark import Chain, ConfidenceHead, HeadsConfig, markov_head
from foldspec.errors import CheckpointError
from foldspec.kernels.dispatch import Kernels
from foldspec.made_up import Numbers
from foldspec.models.base import LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Embedding, Geometry, Linear, Projections, RMSNorm, SwiGLU
from foldspec.models.rope import Rope
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import DrafterFacts, PointMass, Proposal, Sampled
from foldspec.sampling import ARGMAX, DraftSampling, Law, greedy

__all__ = ["DFlash", "DFlashConfig", "DFlashNetwork"]


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter's config.json, both formats and both spellings of each.

    ``block``        B, rows of a block, the anchor's included
    ``first_row``    the first row whose prediction is used: 1 (z-lab) or 0 (DeepSpec)
    ``draft_ids``    size of a restricted draft vocabulary, or None for the target's whole vocabulary
    ``heads``        DSpark's, if there are any
    ``embedding_scale`` and ``softcap`` come in place of the target's own, where the file has them (z-lab);
                     ``softcap`` also bounds the logits of a head of its own
    """

    geometry: Geometry
    rope: Rope
    layers: tuple[DrafterLayer, ...]
    block: int
    first_row: int
    mask_id: int
    taps: tuple[int, ...]
    vocabulary: int
    target_layers: int | None
    attention_bias: bool
    own_embedding: bool
    own_head: bool
    draft_ids: int | None
    heads: HeadsConfig
    embedding_scale: float | None
    softcap: float | None
    where: str

    @property
    def facts(self) -> DrafterFacts:
        return DrafterFacts(
            self.where, self.geometry.width, self.vocabulary, self.taps, self.target_layers, self.mask_id
        )

    @property
    def max_drafts(self) -> int:
        return self.block - self.first_row

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str]) -> DFlashConfig:
        """``tensors`` are the names in the checkpoint. Raises :class:`CheckpointError`: no value is guessed."""
        name = config.architecture
        if name == "DFlashDraftModel":
            nested, first_row, heads = config.part("dflash_config"), 1, HeadsConfig()
            config.refuse(enable_confidence_head=False)
        elif name == "Qwen3DSparkModel":
            nested, first_row = config, 0
            heads = HeadsConfig.from_config(config, tensors)
        else:
            raise config.error(f"unknown drafter architecture {name!r}", do="known: DFlashDraftModel, Qwen3DSparkModel")
        config.refuse(hidden_act="silu")
        nested.refuse(use_swa=False, swa_window_size=None, attention_sink_bias=False, output_multiplier=1.0)
        if first_row == 0 or {"embed_tokens.weight", "lm_head.weight"} & set(tensors):  # not of a table of its own
            nested.refuse(input_embedding_scale=1.0, final_logit_softcapping=None)
        config.refuse(final_logit_softcapping=None)
        geometry = Geometry.from_config(config)
        if not config.has("head_dim"):  # the drafter's own; deriving it would be a guess
            raise config.error("head_dim is missing")
        rope = Rope.from_config(config, geometry.head_dim)
        return cls.of(config, nested, tensors, geometry, rope, heads, first_row)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        nested: ModelConfig,
        tensors: Collection[str],
        geometry: Geometry,
        rope: Rope,
        heads: HeadsConfig,
        first_row: int,
    ) -> DFlashConfig:
        """The rest, which no backbone changes. ``nested``: where the format keeps what is the drafter's own."""
        config.refuse(quantization_config=None, sample_from_anchor=None)
        if config.has("draft_vocab_size") and "d2t" not in tensors:
            raise config.error("draft_vocab_size is given, but the file has no d2t that maps draft ids to the target's")
        block = nested if nested.has("block_size") else config
        return cls(
            geometry=geometry,
            rope=rope,
            layers=_layers(config, nested, geometry.layers),
            block=block.whole("block_size", low=1 + first_row),
            first_row=first_row,
            mask_id=nested.whole("mask_token_id", low=0),
            taps=nested.wholes("target_layer_ids"),
            vocabulary=config.whole("vocab_size"),
            target_layers=config.whole("num_target_layers") if config.has("num_target_layers") else None,
            attention_bias=config.flag("attention_bias"),
            own_embedding="embed_tokens.weight" in tensors,
            own_head="lm_head.weight" in tensors,
            draft_ids=config.whole("draft_vocab_size") if "d2t" in tensors else None,
            heads=heads,
            embedding_scale=nested.number("input_embedding_scale") if nested.has("input_embedding_scale") else None,
            softcap=nested.number("final_logit_softcapping") if nested.has("final_logit_softcapping") else None,
            where=config.where,
        )


def _layers(config: ModelConfig, nested: ModelConfig, count: int) -> tuple[DrafterLayer, ...]:
    """Layer kinds: ``layer_types`` and ``sliding_window`` decide. Sliding layers are causal inside the block and full
    ones are not, unless ``is_causal`` (or the format's own ``causal``) says otherwise for all."""
    kinds = config.get("layer_types", list, ["full_attention"] * count)
    if len(kinds) != count:
        raise config.error(f"layer_types has {len(kinds)} entries for {count} layers")
    causal: bool | None = None
    if config.has("is_causal"):
        causal = config.flag("is_causal")
    elif nested.has("causal"):
        causal = nested.flag("causal")
    layers = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error(f"unknown layer type {kind!r}")
        sliding = kind == "sliding_attention"
        window = config.whole("sliding_window") if sliding else None
        layers.append(DrafterLayer(window, sliding if causal is None else causal))
    return tuple(layers)


class Block(nn.Module):
    def __init__(self, g: Geometry, kernels: Kernels, *, bias: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(g.width, g.eps, kernels)
        self.self_attn = Projections(g, kernels, head_norm=True, bias=bias, bias_out=bias)
        self.post_attention_layernorm = RMSNorm(g.width, g.eps, kernels)
        self.mlp = SwiGLU(g.width, g.inner, kernels)

    def forward(self, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Rows [n, width] of a block; ``attend`` makes of q, k and v what the rows read."""
        x = self.self_attn.output(attend(*self.self_attn.inputs(self.input_layernorm(x))), x)
        return self.mlp(self.post_attention_layernorm(x), x)


class DFlashNetwork(ConditionedNetwork):
    """The weights, named as in the checkpoint. Embedding and head are the target's where the file has none."""

    d2t: torch.Tensor
    integer = frozenset({"d2t"})

    def __init__(self, config: DFlashConfig, kernels: Kernels) -> None:
        super().__init__()
        g = config.geometry
        self.config, self.facts, self.most = config, config.facts, config.max_drafts
        self.block, self.layer_facts = config.block, config.layers
        self.rope, self.scale, self.heads = config.rope, g.head_dim**-0.5, g.heads
        self.fc = Linear(len(config.taps) * g.width, g.width, kernels)
        self.hidden_norm = RMSNorm(g.width, g.eps, kernels)
        self.layers = nn.ModuleList(Block(g, kernels, bias=config.attention_bias) for _ in range(g.layers))
        self.norm = RMSNorm(g.width, g.eps, kernels)
        if config.own_embedding:
            self.embed_tokens = Embedding(config.vocabulary, g.width, kernels)
        if config.own_head:
            self.lm_head = Linear(g.width, config.draft_ids or config.vocabulary, kernels)
        heads, self.confident = config.heads, config.heads.confidence
        if heads.rank:
            drafted = config.draft_ids or config.vocabulary
            self.markov_head = markov_head(heads, g.width, config.vocabulary, drafted, kernels)
        if heads.confidence:
            self.confidence_head = ConfidenceHead(g.width + (heads.rank if heads.with_markov else 0))
        if config.draft_ids:
            self.register_buffer("d2t", torch.empty(config.draft_ids, dtype=torch.int64, device="meta"))

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> DFlashNetwork:
        """Raises :class:`CheckpointError`."""
        return cls(DFlashConfig.from_config(config, tensors), kernels)

    def not_fixed(self, method: MethodOptions) -> str:
        if method.draft_temperature:
            return "drafts are drawn on the host (--draft-temperature)"
        if method.confidence_stop:
            return "a confidence stop saves work that a round of fixed shape does"
        why = make_method(method, self.layer_facts, self.block).not_fixed
        return why and f"the context method {method.context}: {why}"

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        g = self.config.geometry
        return CacheSpec(g.layers, g.kv_heads, g.head_dim, g.head_dim, dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> rows [n, width] of the drafter's own embedding, in the dtype of its arithmetic."""
        return self.embed_tokens(ids).to(self.norm.weight.dtype)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] -> logits [n, draft ids] of the drafter's own head."""
        logits, cap = self.lm_head(x), self.config.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    @property
    def target_ids(self) -> torch.Tensor | None:
        """[draft ids] the target's id of each draft id, where the draft vocabulary is restricted."""
        if not self.config.draft_ids:
            return None
        return self.d2t + torch.arange(self.config.draft_ids, device=self.d2t.device)

    def features(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1)))

    def weight_bytes(self, target: LanguageModel) -> int:
        ids = self.target_ids
        head = 0 if self.config.own_head else target.vocabulary if ids is None else len(ids)
        tables = ("embed_tokens.", "markov_head.markov_w1.")  # a round looks single rows up in them
        own = sum(p.nbytes for name, p in self.named_parameters() if not name.startswith(tables))
        return own + head * target.width * target.head_weight.itemsize

    def check(self, target: LanguageModel) -> None:
        ids = self.target_ids
        if ids is None:
            return
        if int(ids.min()) < 0 or int(ids.max()) >= target.vocabulary:
            raise CheckpointError(
                f"d2t maps outside the {target.vocabulary} ids of the target", where=self.config.where
            )
        if bool((ids[1:] <= ids[:-1]).any()):  # laws over these ids are looked up by bisection, and name each id once
            raise CheckpointError("d2t does not map to rising ids of the target", where=self.config.where)

    def drafter(self, target: LanguageModel, reader: ContextReader, sampling: DraftSampling = ARGMAX) -> DFlash:
        return DFlash(self, target, reader, sampling)


class DFlash(Drafter):
    """The network at work for one target, one context method and one way to choose drafts: argmax, or drawn from each
    row's law; with DSpark's heads from left to right, each law given the draft before, up to the first row that is less
    sure than the sampling's ``confidence_stop``."""

    def __init__(
        self, network: DFlashNetwork, target: LanguageModel, reader: ContextReader, sampling: DraftSampling = ARGMAX
    ) -> None:
        self._network, self._reader, self._sampling = network, reader, sampling
        config = network.config
        self._config = config
        self.taps, self.max_drafts, self.pass_rows = config.taps, config.max_drafts, config.block
        self._embed = network.embed if config.own_embedding else partial(target.embed, scale=config.embedding_scale)
        self._target_ids = network.target_ids
        self._logits: Callable[[torch.Tensor], torch.Tensor] = partial(target.head, softcap=config.softcap)
        if config.own_head:
            self._logits = network.head
        elif self._target_ids is not None:
            self._logits = partial(self._logits, matrix=target.head_matrix.part(self._target_ids))
        self._weight_bytes = network.weight_bytes(target)

    def open(self, request: int, longest: int | None = None) -> None:
        self._reader.open(request, longest)

    def open_prefix(self, request: int) -> None:
        self._reader.open_prefix(request)

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        self._reader.fork(prefix, request, longest)

    def close(self, request: int) -> None:
        self._reader.close(request)

    def suspend(self, request: int) -> None:
        self._reader.suspend(request)

    def reserve(self, request: int, entries: int) -> None:
        self._reader.reserve(request, entries)

    def truncate(self, request: int, length: int) -> None:
        # nothing drafted was stored, and the entries of this round come after: only scratch pages are given back
        self._reader.truncate(request, min(length, self._reader.length(request)))

    def held(self, request: int) -> int:
        return self._reader.length(request)

    def bytes_read(self, n: int) -> int:
        return self._weight_bytes + self._reader.bytes_read(n)

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        context = self._network.features(taps)
        keys, values = zip(*(block.self_attn.context(context) for block in self._network.blocks), strict=True)
        self._reader.absorb(rows, keys, values)

    def fill(self, rows: Rows, tokens: Sequence[int], numbers: Numbers) -> None:
        g, like = self._config.geometry, self._network.norm.weight
        shape = (rows.total, g.kv_heads, g.head_dim)
        keys, values = ([numbers.tensor(shape, like) for _ in range(g.layers)] for _ in range(2))
        self._reader.absorb(rows, keys, values)

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        # A request with no budget sits the round out; the others always draft whole blocks, as the network was trained.
        drafting = [i for i, budget in enumerate(budgets) if budget > 0]
        proposals: list[Proposal] = [PointMass(()) for _ in budgets]
        if not drafting:
            return proposals
        starts, own = [anchors.starts[i] for i in drafting], [tokens[i] for i in drafting]
        chain = self._draft([anchors.requests[i] for i in drafting], starts, own, min(max(budgets), self.max_drafts))
        if self._sampling.temperature:
            drawn = [self._sampling.begin(noises[i], anchors.starts[i]) for i in drafting]
            self._draw(drawn, chain, own, [budgets[i] for i in drafting])
            for i, draft in zip(drafting, drawn, strict=True):
                proposals[i] = draft
        else:
            for i, best in zip(drafting, self._best(chain, own), strict=True):
                proposals[i] = PointMass(tuple(best[: budgets[i]]))
        return proposals

    def draft(self, rows: FixedRows, anchors: torch.Tensor) -> torch.Tensor:
        masks = anchors.new_full((len(anchors), self.pass_rows - 1), self._config.mask_id)
        chain = self._chain(rows, torch.cat((anchors[:, None], masks), 1), self.max_drafts)
        return torch.stack(self._likeliest(chain, anchors)[0], 1)

    def places(self, request: int) -> tuple[tuple[int, ...], dict[int, int]]:
        return self._reader.places(request)

    def advance(self, request: int, length: int) -> None:
        self._reader.keep(request, length)

    def far(self, n: int) -> bool:
        return self._reader.far(n)

    def _draft(self, requests: list[int], starts: list[int], tokens: list[int], count: int) -> Chain:
        """The rows of the first ``count`` drafts of one block a request."""
        rows = Rows.of(requests, starts, [self.pass_rows] * len(requests))
        ids = [[token] + [self._config.mask_id] * (self.pass_rows - 1) for token in tokens]
        return self._chain(rows, torch.tensor(ids, device=self._network.fc.weight.device), count)

    def _chain(self, rows: Rows, ids: torch.Tensor, count: int) -> Chain:
        """The same, of blocks with these ids [R, B]."""
        net, x = self._network, self._embed(ids.flatten())
        self._reader.begin(rows)
        for i, layer in enumerate(net.blocks):
            x = layer(x, partial(self._reader.attend, i, rows))
        first = self._config.first_row
        used = net.norm(x.view(*ids.shape, -1)[:, first : first + count].flatten(0, 1))
        shape = len(ids), count, -1
        stop, heads = self._sampling.confidence_stop, self._config.heads
        return Chain(
            net.markov_head if heads.rank else None,
            net.confidence_head if heads.confidence and stop else None,
            heads.with_markov,
            used.view(shape),
            self._logits(used).view(shape),
        )

    def _best(self, chain: Chain, tokens: list[int]) -> list[list[int]]:
        """The argmax drafts of each request; with DSpark's heads each given the one before, the first the anchor."""
        ids, logits, stop = self._target_ids, chain.logits, self._sampling.confidence_stop
        count = logits.shape[1]
        if not self._config.heads.rank and not stop:
            drafts = greedy(logits.flatten(0, 1))
            if ids is not None:
                drafts = ids[drafts].tolist()
            return [drafts[i * count : (i + 1) * count] for i in range(len(tokens))]
        drafted, ends = self._likeliest(chain, torch.tensor(tokens, device=logits.device))
        rows = torch.stack(drafted, dim=1).tolist()
        if not ends:
            return rows
        cuts = torch.stack(ends, dim=1).tolist()
        return [row[: cut.index(True)] if True in cut else row for row, cut in zip(rows, cuts, strict=True)]

    def _likeliest(self, chain: Chain, previous: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Row after row the argmax drafts [R], each given the one before, the first ``previous``; and, where the
        drafter says so, whether a block ends before it."""
        drafted, ends = [], []
        for _ in range(chain.logits.shape[1]):
            row, sure = chain.next(previous)
            best = row.argmax(-1)
            previous = best if self._target_ids is None else self._target_ids[best]
            drafted.append(previous)
            if sure is not None:
                ends.append(sure < self._sampling.confidence_stop)
        return drafted, ends

    def _draw(
        self, drafts: Sequence[Sampled[Law]], chain: Chain, tokens: Sequence[int], budgets: Sequence[int]
    ) -> None:
        """Draw each request's drafts from left to right, as many as its budget has."""
        previous, going = list(tokens), list(budgets)
        for row in range(chain.logits.shape[1]):
            laws, sure = chain.next(torch.tensor(previous, device=chain.logits.device))
            if sure is not None:
                ends = (sure < self._sampling.confidence_stop).tolist()
                going = [min(budget, row) if end else budget for budget, end in zip(going, ends, strict=True)]
            for i, draft in enumerate(drafts):
                if row < going[i]:
                    previous[i] = draft.draw(self._sampling.law(laws[i], self._target_ids))
