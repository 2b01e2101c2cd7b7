"""From names to a pair in memory: find both checkpoints, check them against each other, then read the weights.

Two steps, so that whatever is wrong with a pair is said before gigabytes are read: :func:`find_pair` looks at configs
and file headers alone, :func:`load_pair` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from foldspec.checkpoints.embedded import embedded_path
from foldspec.checkpoints.pairing import check_pair
from foldspec.checkpoints.registry import Pair, Source, find
from foldspec.checkpoints.resolve import resolve
from foldspec.checkpoints.weights import Weights, check, load_into, read_headers
from foldspec.drafters import MODEL_FREE, make_network
from foldspec.drafters.base import DrafterNetwork
from foldspec.errors import FoldspecError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.linear import Facts
from foldspec.models.base import LanguageModel, model_class
from foldspec.models.config import ModelConfig
from foldspec.models.layers import join, matrices, settle, wide
from foldspec.options import EngineOptions
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer, stop_ids

__all__ = ["Checkpoint", "FoundPair", "Progress", "find_pair", "held_dtype", "is_local", "load_pair"]

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found: its folder, config and tensor headers. ``source`` is what the user would name."""

    folder: Path
    config: ModelConfig
    weights: Weights
    source: dict[str, str | None]


@dataclass(frozen=True)
class FoundPair:
    """A target and perhaps a drafter that fit together. Their modules are empty until :func:`load_pair` fills them."""

    entry: Pair | None
    target: Checkpoint
    model: LanguageModel
    drafter: Checkpoint | None
    network: DrafterNetwork | None
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    stop_ids: frozenset[int]


def find_pair(
    pair: str | None,
    target: str | None,
    drafter: str | None,
    *,
    options: EngineOptions,
    kernels: Kernels,
    progress: Progress | None = None,
) -> FoundPair:
    """Find a pair of the registry, or a target and a drafter by folder or hub id. ``target`` and ``drafter`` replace a
    pair's own; ``drafter="none"``, or one that has no weights, leaves it out.

    Raises :class:`UsageError`, :class:`CheckpointError`, :class:`PairError` or :class:`ResourceError`.
    """
    entry = find(pair) if pair is not None else None
    if target is None and entry is None:
        raise UsageError("no checkpoint named", do="name a pair, or a target with --target")
    target_source = Source(repo=target) if target is not None else entry.target if entry else Source()
    drafter_source = Source(repo=drafter) if drafter is not None else entry.drafter if entry else None
    if drafter == "none" or drafter in MODEL_FREE:
        drafter_source = None

    checkpoint = _find(target_source, options, progress)
    model = model_class(checkpoint.config).from_config(checkpoint.config, tuple(checkpoint.weights.entries), kernels)
    _check_shapes(model, checkpoint.weights, model.parameter_name)
    of_drafter, network = None, None
    if drafter_source is not None:
        of_drafter = _find(drafter_source, options, progress)
        network = make_network(of_drafter.config, tuple(of_drafter.weights.entries), kernels)
        check_pair(
            network.facts,
            target=str(checkpoint.folder),
            width=model.width,
            layers=model.layer_count,
            vocabulary=model.vocabulary,
        )
        _check_shapes(network, of_drafter.weights, lambda name: name, network.integer)
    tokenizer = Tokenizer.load(checkpoint.folder)
    return FoundPair(
        entry=entry,
        target=checkpoint,
        model=model,
        drafter=of_drafter,
        network=network,
        tokenizer=tokenizer,
        template=ChatTemplate.load(checkpoint.folder),
        stop_ids=frozenset(stop_ids(checkpoint.folder, checkpoint.config.values, tokenizer)),
    )


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
    """Read the weights of both into the modules of ``found``, one tensor at a time; ``weights`` as in the options.

    Raises the errors of :func:`held_dtype` and of :func:`load_into`.
    """
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
            integer=found.network.integer,
            progress=progress,
        )
        settle(found.network, kernels, dtype)
        found.network.check(found.model)


def _find(source: Source, options: EngineOptions, progress: Progress | None) -> Checkpoint:
    if source.embedded:
        folder = embedded_path(source.embedded, cache_dir=options.cache_dir, offline=options.offline, progress=progress)
        named: dict[str, str | None] = {"name": source.embedded, "revision": None}
    else:
        assert source.repo is not None
        resolved = resolve(source.repo, revision=source.revision, offline=options.offline, progress=progress)
        folder, named = resolved.path, {"name": source.repo, "revision": resolved.revision}
    return Checkpoint(folder, ModelConfig.read(folder), read_headers(folder), named)


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
