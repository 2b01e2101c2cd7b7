"""Context features of a prompt, as it is and with its older part shuffled, as entries whose order is probed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.cache.rows import Rows
from foldspec.drafters.base import NoDrafter
from foldspec.drafters.conditioned import ConditionedNetwork
from foldspec.engine import Engine
from foldspec.errors import UsageError
from reproduce.probe import Entries

CHUNK, LEAST = 64, 128  # entries: that stay together when they are shuffled; that must be left
KINDS = ("features", "embeddings", "shuffled, as read", "shuffled, as text")


class Collector(NoDrafter):
    """Keeps the context features of what it absorbs."""

    def __init__(self, network: ConditionedNetwork) -> None:
        self.taps, self._network, self.found = network.facts.taps, network, list[torch.Tensor]()

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        self.found.append(self._network.features(taps).float().cpu())


@torch.inference_mode()
def entries(engine: Engine, prompt: Sequence[int], seed: int) -> dict[str, Entries]:
    """Of each kind the entries before the window, and where they stand in the order that is asked for."""
    window = engine.method.window or 0
    end = CHUNK + (len(prompt) - window - CHUNK) // CHUNK * CHUNK
    if end <= CHUNK + LEAST:
        raise UsageError(f"of {len(prompt)} tokens, the window of {window} leaves too little", where="--lengths")
    old, places = slice(CHUNK, end), torch.arange(end - CHUNK)
    chunks = torch.randperm(len(places) // CHUNK, generator=torch.Generator().manual_seed(seed))
    order = (chunks[:, None] * CHUNK + torch.arange(CHUNK)).flatten()  # the n-th that is read is entry order[n]
    ids, plain = torch.tensor(prompt), features(engine, prompt)[old]
    again, shuffled = ids.clone(), torch.empty_like(plain)
    again[old] = ids[old][order]
    shuffled[order] = features(engine, again.tolist())[old]
    embedded = engine.resources.found.model.embed(ids[old].to(engine.resources.device)).float().cpu()
    found = (plain, places), (embedded, places), (shuffled, order.argsort()), (shuffled, places)
    return {kind: Entries(*one) for kind, one in zip(KINDS, found, strict=True)}


def features(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """[n, width] of one pass of the target."""
    resources, network = engine.resources, engine.resources.found.network
    if not isinstance(network, ConditionedNetwork):
        raise UsageError("drafts without features of its target", where="--pair", do="choose a DFlash or DSpark pair")
    request, keeper = resources.new_id(), Collector(network)
    with resources.turn, resources.opened(request, keeper, None):
        resources.run_prompt(request, ids, keeper)
    return torch.cat(keeper.found)
