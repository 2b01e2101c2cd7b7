"""Uno: the target drafts for itself, with an adapter on its own weights (methods 4.5).

The adapter is a LoRA in PEFT's format: of each matrix that it names, W x becomes W x + (alpha / r) B A x, in the rows
of drafts alone. A pass has, after the anchor, a canvas of masks, which read one another and everything before; the
anchor's row reads what it reads when it is verified, by the target's own weights, so it is the target's own row. Rows
are stored behind the committed entries of the target's own cache, and cut off again after each pass.

PEFT's format says nothing of drafting. Two keys of ours in adapter_config.json do: ``mask_token_id``, and ``shifted``,
whether the row before a place predicts it, as the target's rows do (then the anchor's row, which has no adapter,
predicts the first draft), or its own row. No published adapter has been seen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter, DrafterNetwork, Footprint, Host, NoDrafter, Room
from foldspec.drafters.denoise import Masked
from foldspec.errors import PairError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Linear
from foldspec.models.mask import Mask
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import DrafterFacts, PointMass, Proposal
from foldspec.sampling import DraftSampling

__all__ = ["Adapter", "AdapterNetwork"]

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_CANVAS = Mask(None, causal=1)


class LoRA(nn.Module):
    """(alpha / r) B A, added to some rows of what a matrix makes of its own."""

    def __init__(self, width_in: int, rank: int, width_out: int, scale: float, kernels: Kernels) -> None:
        super().__init__()
        self.A, self.B = Linear(width_in, rank, kernels), Linear(rank, width_out, kernels)
        self.scale, self.shape = scale, (width_out, width_in)

    def add(self, x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
        """x [n, in] -> added, in place, to those ``rows`` of ``out`` [n, out]."""
        out.index_add_(0, rows, self.B(self.A(x[rows])), alpha=self.scale)


class AdapterNetwork(DrafterNetwork):
    """The adapter's matrices, by the module of the target that each changes, dots written as slashes."""

    verdict: ClassVar[str] = "the adapter's matrices fit the target's"
    reads_context: ClassVar[bool] = False
    efforts: frozenset[str] = frozenset({"steps", "confidence", "entropy_bound", "order"})

    def __init__(self, where: str, loras: Mapping[str, LoRA], mask_id: int, shifted: bool, base: str) -> None:
        super().__init__()
        self.loras = nn.ModuleDict({name.replace(".", "/"): lora for name, lora in loras.items()})
        self.mask_id, self.shifted, self.base = mask_id, shifted, base
        self.facts = DrafterFacts(where, None, None, (), None, mask_id)

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> AdapterNetwork:
        """``tensors`` map names to shapes: the widths are the file's, the rank is the config's. Raises
        :class:`CheckpointError`."""
        config.refuse(bias="none", use_dora=False, lora_bias=False, fan_in_fan_out=False, modules_to_save=[])
        config.refuse(rank_pattern={}, alpha_pattern={}, layer_replication=[], trainable_token_indices=[])
        for key in ("mask_token_id", "shifted"):
            if not config.has(key):
                raise config.error(
                    f"{key} is missing: PEFT's format does not say how an adapter drafts", do="add it to the file"
                )
        rank, alpha = config.whole("r", high=1 << 16), config.number("lora_alpha")
        scale = alpha / (rank**0.5 if config.flag("use_rslora") else rank)
        shapes = dict(tensors) if isinstance(tensors, Mapping) else {}
        sides: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            found = _TENSOR.fullmatch(name)
            if found is None or len(shape) != 2:
                raise config.error(f"{name} {list(shape)} is no matrix of a LoRA as PEFT writes them")
            sides.setdefault(found[1], {})[found[2]] = shape
        if not sides:
            raise config.error("its file holds no LoRA")
        loras = {}
        for name, pair in sides.items():
            if set(pair) != {"A", "B"}:
                raise config.error(f"{name} has one half of a LoRA, not both")
            loras[name] = LoRA(pair["A"][1], rank, pair["B"][0], scale, kernels)
        base = config.get("base_model_name_or_path", str, "unknown")
        return cls(config.where, loras, config.whole("mask_token_id", low=0), config.flag("shifted"), base)

    def parameter_name(self, tensor: str) -> str | None:
        found = _TENSOR.fullmatch(tensor)
        return tensor if found is None else f"loras.{found[1].replace('.', '/')}.{found[2]}.weight"

    def described(self) -> dict[str, Any]:
        return {"adapter on": f"{len(self.loras)} matrices", "made for": self.base, "mask id": self.mask_id}

    def fit(self, target: LanguageModel) -> None:
        if target.cache_spec(torch.float32).recurrent:
            raise self._misfit("its recurrent states cannot read a block both ways")
        for name, linear in self.places(target):
            lora = self.loras[name]
            assert isinstance(lora, LoRA)
            there = None if linear is None else tuple(linear.weight.shape)
            if there != lora.shape:
                has = "nothing of that name" if there is None else f"{list(there)}"
                raise self._misfit(f"it changes {name.replace('/', '.')} {list(lora.shape)}, the target has {has}")

    def _misfit(self, what: str) -> PairError:
        return PairError(f"does not fit the target: {what}", where=self.facts.where, do="name the adapter's own target")

    def places(self, target: LanguageModel) -> Iterator[tuple[str, Linear | None]]:
        """Each adapted matrix of the target; None where there is none."""
        modules = dict(target.named_modules())
        for name in self.loras:
            own = target.parameter_name(f"{name.replace('/', '.')}.weight")
            found = None if own is None else modules.get(own.removesuffix(".weight"))
            yield name, found if isinstance(found, Linear) else None

    def rows(self, method: MethodOptions) -> int:
        return (method.draft_tokens or 0) + 1

    def footprint(self, method: MethodOptions, dtype: torch.dtype, room: Room) -> Footprint:
        return Footprint(0, 0, 0)

    def caches(self, dtype: torch.dtype, room: Room, pages: int, device: torch.device) -> None:
        """The target's own cache is all."""

    def check(self, target: LanguageModel) -> None:
        pass

    def bind(self, host: Host, caches: None, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        return Adapter(self, host, method.draft_tokens or 0, sampling)


class Adapter(NoDrafter):
    """An adapter at work. It keeps nothing of a request: what it reads is in the target's cache, which is brought up to
    date without it; but for a request that is its alone (in ``_own``), forked from a prefix and unknown to the target.
    """

    def __init__(self, network: AdapterNetwork, host: Host, max_drafts: int, sampling: DraftSampling) -> None:
        self._network, self._host, self.max_drafts, self._sampling = network, host, max_drafts, sampling
        self._effort = sampling.effort.filled(network.order)
        self.biased = self._effort.biased(sampling.temperature > 0)
        self._device = host.model.head_weight.device
        self._own: set[int] = set()

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        if not self._host.cache.tables.is_open(request):
            self._host.cache.fork(prefix, request)
            self._own.add(request)

    def close(self, request: int) -> None:
        if request in self._own:
            self._own.remove(request)
            self._host.cache.close(request)

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        for request, start, packed in rows:
            if request in self._own:
                piece = torch.tensor(tokens[packed], device=self._device)
                self._host.model(
                    piece, ForwardPlan(Rows.of([request], [start], [len(piece)]), (), ()), self._host.cache
                )

    def bytes_read(self, n: int) -> int:
        model, adapter = self._host.model.bytes_read, sum(p.nbytes for p in self._network.parameters())
        return (self._effort.steps or 1) * (model + adapter + self._host.cache.spec.bytes_read(n))

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        blocks = {
            i: Masked(self._effort, self._sampling, noises[i], start, budget)
            for i, (start, budget) in enumerate(zip(anchors.starts, budgets, strict=True))
            if budget > 0
        }
        while going := [i for i, block in blocks.items() if not block.done]:
            mask = self._network.mask_id
            canvas = [[mask if token is None else token for token in blocks[i].canvas] for i in going]
            requests, starts = [anchors.requests[i] for i in going], [anchors.starts[i] for i in going]
            rows = Rows.of(requests, starts, [1 + len(own) for own in canvas])
            places = [
                offset + place + (0 if self._network.shifted else 1)
                for offset, i in zip(rows.offsets, going, strict=False)
                for place in blocks[i].masked
            ]
            ids = [token for i, own in zip(going, canvas, strict=True) for token in (tokens[i], *own)]
            logits = self._forward(rows, ids, places)
            logits[:, mask] = -torch.inf
            pieces = logits.split([len(blocks[i].masked) for i in going])
            for i, piece in zip(going, pieces, strict=True):
                blocks[i].step(piece)
        return [blocks[i].proposal if i in blocks else PointMass(()) for i in range(len(tokens))]

    def _forward(self, rows: Rows, ids: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """One pass; nothing of it stays in the cache. Logits [places, ids]."""
        plan = ForwardPlan(rows, (), tuple(places), _CANVAS)
        drafts = [row for _, _, packed in rows for row in range(packed.start + 1, packed.stop)]
        with self._adapted(torch.tensor(drafts, device=self._device)):
            logits = self._host.model(torch.tensor(ids, device=self._device), plan, self._host.cache).logits
        for request, start, _ in rows:
            self._host.cache.truncate(request, start)
        return logits

    @contextmanager
    def _adapted(self, rows: torch.Tensor) -> Iterator[None]:
        """The target with the adapter in these rows of its next pass, and without it whatever happens there."""
        adapted = [(linear, self._network.loras[name]) for name, linear in self._network.places(self._host.model)]
        try:
            for linear, lora in adapted:
                assert isinstance(linear, Linear) and isinstance(lora, LoRA)
                linear.more = lambda x, out, lora=lora: lora.add(x, out, rows)
            yield
        finally:
            for linear, _ in adapted:
                assert linear is not None
                linear.more = None
