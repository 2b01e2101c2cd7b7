"""From names to a pair in memory: find both checkpoints, check them against each other, then read the weights.

Two steps, so that whatever is wrong with a pair is said before gigabytes are read: :func:`find_pair` looks at configs
and file headers alone, :func:`load_pair` reads the tensors. :func:`built_in` does the first with what the registry
knows of a pair, and no file at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foldspec.checkpoints.cut import cut, fold_taps, layers_of
from foldspec.checkpoints.embedded import embedded_path
from foldspec.checkpoints.pairing import check_pair
from foldspec.checkpoints.registry import Pair, Source, find, load_registry, named
from foldspec.checkpoints.resolve import peek, resolve
from foldspec.checkpoints.shapes import list_tensors
from foldspec.checkpoints.weights import Weights, check, load_into, read_headers
from foldspec.drafters import KINDS, MODEL_FREE, make_network
from foldspec.drafters.base import DrafterNetwork
from foldspec.errors import CheckpointError, FoldspecError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.linear import Facts
from foldspec.made_up import Numbers
from foldspec.models.base import LanguageModel, model_class
from foldspec.models.config import ModelConfig
from foldspec.models.layers import join, matrices, settle, wide
from foldspec.options import EngineOptions
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer, stop_ids

__all__ = [
    "Checkpoint",
    "FoundPair",
    "Progress",
    "built_in",
    "check_kind",
    "find_pair",
    "held_dtype",
    "is_local",
    "load_pair",
]

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found: its folder, config and tensor headers. ``source`` is what the user would name."""

    folder: Path
    config: ModelConfig
    weights: Weights
    source: dict[str, str | None]

    @property
    def local(self) -> bool:
        """Whether the weights are on this disk."""
        return all(path.exists() for path in {entry.file for entry in self.weights.entries.values()})


@dataclass(frozen=True)
class FoundPair:
    """A target and perhaps a drafter that fit together. Their modules are empty until :func:`load_pair` fills them.

    ``notices`` say where a file and the registry differ: the file counts. ``dummy`` weights are no file's."""

    entry: Pair | None
    target: Checkpoint
    model: LanguageModel
    drafter: Checkpoint | None
    network: DrafterNetwork | None
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    stop_ids: frozenset[int]
    notices: tuple[str, ...] = ()
    dummy: bool = False


def find_pair(
    pair: str | None,
    target: str | None,
    drafter: str | None,
    *,
    options: EngineOptions,
    kernels: Kernels,
    progress: Progress | None = None,
    peeking: bool = False,
) -> FoundPair:
    """Find a pair of the registry, or a target and a drafter by folder, hub id or embedded name. ``target`` and
    ``drafter`` replace a pair's own; ``drafter="none"``, or one that has no weights, leaves it out. With ``peeking`` no
    weights are fetched, only headers read: then :func:`load_pair` may find no files.

    Raises :class:`UsageError`, :class:`CheckpointError`, :class:`PairError` or :class:`ResourceError`.
    """
    entry = find(pair) if pair is not None else None
    if target is None and entry is None:
        raise UsageError("no checkpoint named", do="name a pair, or a target with --target")
    if drafter == "none" or drafter in MODEL_FREE:
        drafter, entry = None, None if entry is None else replace(entry, drafter=None)
    source_of = _registered if options.load_format == "dummy" else named
    target_source = source_of(target) if target is not None else entry.target if entry else Source()
    drafter_source = source_of(drafter) if drafter is not None else entry.drafter if entry else None
    if options.load_format == "dummy":
        return _dummy(entry, target_source, drafter_source, options.dummy_layers, kernels)
    _foresee(target_source, drafter_source, options, kernels)

    checkpoint = _find(target_source, options, progress, peeking)
    of_drafter = None if drafter_source is None else _find(drafter_source, options, progress, peeking)
    model, network = _fit(checkpoint, of_drafter, kernels)
    tokenizer = Tokenizer.load(checkpoint.folder)
    notices = []
    for source, read in ((target_source, checkpoint), (drafter_source, of_drafter)):
        if source is not None and read is not None and not source.embedded:  # those are pinned by their content
            notices += source.contradictions(read.config.values)
    return FoundPair(
        entry=entry,
        target=checkpoint,
        model=model,
        drafter=of_drafter,
        network=network,
        tokenizer=tokenizer,
        template=ChatTemplate.load(checkpoint.folder),
        stop_ids=frozenset(stop_ids(checkpoint.folder, checkpoint.config.values, tokenizer)),
        notices=tuple(notices),
    )


def built_in(entry: Pair, kernels: Kernels, *, alone: bool = False) -> FoundPair:
    """A pair of the registry as its configs there say, without a file: modules, tensors and caches have their true
    shapes. ``alone`` leaves the drafter out.

    Raises :class:`CheckpointError` where a config is not enough to list tensors, or is one that no class here runs.
    """
    return _built(entry, entry.target, None if alone else entry.drafter, kernels)


def _built(entry: Pair | None, target: Source, drafter: Source | None, kernels: Kernels) -> FoundPair:
    if drafter is not None:
        check_kind(drafter)
    sides = _known(target), None if drafter is None else _known(drafter)
    model, network = _fit(*sides, kernels)
    return FoundPair(entry, sides[0], model, sides[1], network, None, None, frozenset())


def _dummy(
    entry: Pair | None, target: Source, drafter: Source | None, layers: int | None, kernels: Kernels
) -> FoundPair:
    """A pair for dummy weights, perhaps cut to its last ``layers``. A drafter that no class here runs is left out."""
    notices = []
    try:
        found = _built(entry, target, drafter, kernels)
    except CheckpointError as error:
        if drafter is None:
            raise
        found = _built(entry, target, None, kernels)
        notices.append(f"{error}; here its target decodes alone")
    whole = found.model.layer_count
    if layers is not None:
        sides = _cut(found.target, found.drafter, layers)
        model, network = _fit(*sides, kernels, folded=True)
        found = replace(found, target=sides[0], model=model, drafter=sides[1], network=network)
    size = "all layers" if layers is None else f"{found.model.layer_count} of {whole} layers"
    notices.append(f"dummy weights ({size}) and contexts: outputs mean nothing, there is no text")
    return replace(found, dummy=True, notices=tuple(notices))


def _cut(target: Checkpoint, drafter: Checkpoint | None, layers: int) -> tuple[Checkpoint, Checkpoint | None]:
    def shorter(side: Checkpoint, values: dict[str, Any]) -> Checkpoint:
        config, weights = cut(values, side.weights, layers)
        return replace(side, config=ModelConfig(config, side.config.where), weights=weights)

    short = shorter(target, target.config.values)
    if drafter is None:
        return short, None
    before, after = (layers_of(side.config.values) for side in (target, short))
    return short, shorter(drafter, fold_taps(drafter.config.values, before, after))


def _registered(name: str) -> Source:
    """Raises :class:`UsageError` for a checkpoint that is not in the registry."""
    known = load_registry().checkpoints
    if name not in known:
        do = "name a pair or a checkpoint of `foldspec models`"
        raise UsageError(f"{name} is not in the registry, which knows shapes", where="--load-format dummy", do=do)
    return known[name]


def check_kind(drafter: Source) -> None:
    """Raises :class:`CheckpointError` for a drafter of the registry of a kind that is not built."""
    if drafter.kind is not None and drafter.kind not in KINDS:
        raise CheckpointError(
            f"is a drafter of the kind {drafter.kind}, which this version does not run",
            where=drafter.name,
            do="--drafter lookup or --drafter none need no drafter's weights",
        )


def _foresee(target: Source, drafter: Source | None, options: EngineOptions, kernels: Kernels) -> None:
    """Before anything is fetched: refuse what the registry knows not to run. What is on this disk speaks for itself."""
    if drafter is not None:
        check_kind(drafter)
    for source in (drafter, target):
        if source is None or source.embedded or not source.config or is_local(source, options.cache_dir):
            continue
        checkpoint = _known(source)
        names = tuple(checkpoint.weights.entries)
        if source is drafter:
            make_network(checkpoint.config, names, kernels)
        else:
            model_class(checkpoint.config).from_config(checkpoint.config, names, kernels)


def _fit(
    target: Checkpoint, drafter: Checkpoint | None, kernels: Kernels, *, folded: bool = False
) -> tuple[LanguageModel, DrafterNetwork | None]:
    """The modules of both, empty, whose tensors are those of the files, and which were made for each other (as is known
    of those whose taps were ``folded`` since)."""
    model = model_class(target.config).from_config(target.config, tuple(target.weights.entries), kernels)
    _check_shapes(model, target.weights, model.parameter_name)
    if drafter is None:
        return model, None
    network = make_network(drafter.config, tuple(drafter.weights.entries), kernels)
    if not folded:
        check_pair(
            network.facts,
            target=str(target.folder),
            width=model.width,
            layers=model.layer_count,
            vocabulary=model.vocabulary,
        )
    _check_shapes(network, drafter.weights, network.parameter_name, network.integer)
    return model, network


def held_dtype(
    checkpoint: Checkpoint, name: str, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> torch.dtype:
    """The dtype in which a checkpoint's matrices lie in memory: ``name``, a value of ``--weights``.

    ``auto`` is ``dtype``, that of the arithmetic, unless they are bf16 in the file, the arithmetic is a CPU's float32
    and a compiled kernel reads them as they are: half the memory, and the same numbers. Raises :class:`UsageError` for
    a pairing that nothing computes with.
    """
    mixed = device.type == "cpu" and dtype == torch.float32
    if name != "auto":
        held: torch.dtype = getattr(torch, name)
        if held != dtype and not (mixed and held == torch.bfloat16):
            raise UsageError(
                f"{name} weights do not go with {str(dtype).removeprefix('torch.')} arithmetic on {device.type}",
                where="--weights",
                do="leave it out",
            )
        return held
    stored = {entry.dtype for entry in checkpoint.weights.entries.values() if len(entry.shape) > 1}
    if (
        mixed
        and stored == {"BF16"}
        and kernels.compiles("linear", Facts(device.type, dtype, torch.bfloat16, packed=True))
    ):
        return torch.bfloat16
    return dtype


def load_pair(
    found: FoundPair,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: str,
    kernels: Kernels,
    progress: Progress | None = None,
) -> None:
    """Read the weights of both into the modules of ``found``, one tensor at a time, or fill those of dummies;
    ``weights`` as in the options.

    Raises the errors of :func:`held_dtype` and of :func:`load_into`.
    """
    fill = partial(_fill, Numbers(device)) if found.dummy else None
    held = held_dtype(found.target, weights, dtype=dtype, device=device, kernels=kernels)
    join(found.model, held, dtype, device)
    load_into(
        found.model,
        found.target.weights,
        dtype=dtype,
        device=device,
        held=held,
        matrices=matrices(found.model),
        wide=wide(found.model),
        rename=found.model.parameter_name,
        fill=fill,
        progress=progress,
    )
    settle(found.model, kernels, dtype)
    if found.network is not None and found.drafter is not None:
        held = held_dtype(found.drafter, weights, dtype=dtype, device=device, kernels=kernels)
        join(found.network, held, dtype, device)
        load_into(
            found.network,
            found.drafter.weights,
            dtype=dtype,
            device=device,
            held=held,
            matrices=matrices(found.network),
            wide=wide(found.network),
            rename=found.network.parameter_name,
            integer=found.network.integer,
            fill=fill,
            progress=progress,
        )
        settle(found.network, kernels, dtype)
        found.network.check(found.model)


def _fill(numbers: Numbers, key: str, tensor: torch.Tensor) -> None:
    """A parameter with which a network gives finite numbers: rows of about unit length, norms about 1, biases small."""
    if not tensor.is_floating_point():  # ids of the target, as differences from their places
        tensor.zero_()
    elif tensor.dim() > 1:
        numbers.fill(tensor, scale=tensor.shape[-1] ** -0.5)
    else:
        numbers.fill(tensor, scale=0.1, mean=0.0 if key.endswith("bias") else 1.0)


def _find(source: Source, options: EngineOptions, progress: Progress | None, peeking: bool = False) -> Checkpoint:
    if source.embedded:
        folder = embedded_path(source.embedded, cache_dir=options.cache_dir, offline=options.offline, progress=progress)
        label: dict[str, str | None] = {"name": source.embedded, "revision": None}
        return Checkpoint(folder, ModelConfig.read(folder), read_headers(folder), label)
    assert source.repo is not None
    weights = None
    if peeking:
        found, weights = peek(source.repo, revision=source.revision, offline=options.offline, progress=progress)
    else:
        found = resolve(source.repo, revision=source.revision, offline=options.offline, progress=progress)
    label = {"name": source.repo, "revision": found.revision}
    return Checkpoint(found.path, ModelConfig.read(found.path), weights or read_headers(found.path), label)


def _known(source: Source) -> Checkpoint:
    """A checkpoint as the registry knows it; of one that comes with foldspec, its files."""
    if not source.config:
        if source.embedded is None:
            raise CheckpointError("the registry has no config of it", where=source.name)
        return _find(source, EngineOptions(offline=True), None)
    weights = list_tensors(source.config, source.name)
    config = ModelConfig(source.config, f"the registry's config of {source.name}")
    return Checkpoint(weights.folder, config, weights, {"name": source.name, "revision": source.revision})


def is_local(source: Source, cache_dir: Path) -> bool:
    """Whether a checkpoint is on this disk. Opens no socket."""
    try:
        _find(source, EngineOptions(offline=True, cache_dir=cache_dir), None)
    except FoldspecError:
        return False
    return True


def _check_shapes(
    module: torch.nn.Module,
    weights: Weights,
    rename: Callable[[str], str | None],
    integer: frozenset[str] = frozenset(),
) -> None:
    check(weights, {k: tuple(t.shape) for k, t in module.state_dict().items()}, rename=rename, integer=integer)
