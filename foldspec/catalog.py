"""What the registry knows, put together for ``foldspec models``: each value with where it comes from, sizes, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foldspec.acceptance import RULES
from foldspec.checkpoints.registry import Pair, Source, find, load_registry
from foldspec.checkpoints.shapes import list_tensors, side_cache
from foldspec.context import METHODS
from foldspec.drafters import ARCHITECTURES as DRAFTERS
from foldspec.drafters import MODEL_FREE
from foldspec.errors import CheckpointError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import FoundPair, built_in, is_local
from foldspec.memory import make_plan, size
from foldspec.models.base import ARCHITECTURES as TARGETS
from foldspec.options import EngineOptions, MethodOptions
from foldspec.resources import CHUNKS, filled_in, pick_context

__all__ = ["describe", "known", "table"]

# fields of a pair that are shown, in words
_DEFAULTS = {
    "window": "window",
    "alpha": "alpha",
    "coverage": "coverage",
    "yarn_reference": "YaRN reference",
    "block": "block",
    "effort": "effort",
}


def known(cache_dir: Path) -> dict[str, Any]:
    """All pairs in brief, and whether each is on this disk; all architectures, methods and rules."""
    registry, kernels = load_registry(), Kernels.of(EngineOptions())
    there = {name: is_local(source, cache_dir) for name, source in registry.checkpoints.items()}
    pairs: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    for name, pair in registry.pairs.items():
        parts = [source for source in (pair.target, pair.drafter) if source is not None]
        pairs[name] = {
            "description": pair.description,
            "target": pair.target.name,
            "drafter": pair.drafter.name if pair.drafter else None,
            "kind": pair.drafter.kind if pair.drafter else None,
            "window": pair.window,
            "alpha": pair.alpha,
            "bytes": _bytes(pair),
            "download MB": None if pair.download_bytes is None else round(pair.download_bytes / 1e6),
            "on disk": all(there[source.name] for source in parts),
            "runs": _runs(pair, kernels, targets),
        }
    return {
        "pairs": pairs,
        "targets": sorted(TARGETS),
        "drafters": [*sorted(DRAFTERS), *MODEL_FREE],
        "contexts": list(METHODS),
        "rules": list(RULES),
    }


def describe(name: str, cache_dir: Path, max_context: int | None = None) -> dict[str, Any]:
    """One pair: every default with its source (``paper``, ``file``, ``ours``, or ``unverified`` where nobody saw the
    file), sizes, what is on this disk, and the memory that one request of ``max_context`` tokens takes (None: as many
    as the target holds).

    Raises :class:`UsageError` for a name that is not known, or more tokens than the target holds.
    """
    pair, kernels = find(name), Kernels.of(EngineOptions())
    defaults = {}
    for key, words in _DEFAULTS.items():
        value = getattr(pair, key)
        if key == "effort":
            value = ", ".join(f"{k} {v}" for k, v in vars(value).items() if v is not None) or None
        if value is not None and (key != "coverage" or pair.window is not None):  # for those that read a context
            defaults[words] = {"value": value, "source": pair.source(key)}
    report: dict[str, Any] = {"description": pair.description, "defaults": defaults}
    for side, source in (("target", pair.target), ("drafter", pair.drafter)):
        if source is not None:
            report[side] = {**_checkpoint(source, cache_dir), "chosen by": pair.source(side)}
    report["runs"] = _runs(pair, kernels, {})
    found, refused = _built(pair, kernels)
    if refused:
        report["refused"] = refused
        found, refused = _built(pair, kernels, alone=True)
    if found is None:
        return report | {"memory": f"not known: {refused}"}
    return report | {"memory": _memory(found, pair, kernels, max_context)}


def table() -> str:
    """The pairs as a Markdown table, the README's."""
    kernels, targets = Kernels.of(EngineOptions()), dict[str, bool]()
    lines = [
        "| pair | target | drafter | kind | block | window | GB | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, pair in load_registry().pairs.items():
        total, (found, _) = _bytes(pair), _built(pair, kernels)
        cells = [
            f"`{name}`",
            pair.target.name,
            pair.drafter.name if pair.drafter else "none",
            (pair.drafter.kind or "") if pair.drafter else "",
            _marked(*_block(pair, found)),
            _marked(pair.window, pair.source("window")),
            "" if total is None else f"{total / 1e9:.3g}",
            _runs(pair, kernels, targets),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _marked(value: Any, source: str) -> str:
    marks = {"ours": " (ours)", "unverified": " (unverified)"}
    return "" if value is None else f"{value}{marks.get(source, '')}"


def _block(pair: Pair, found: FoundPair | None) -> tuple[int | None, str]:
    """Rows of a block, and where that comes from: from the drafter's config, else from the pair."""
    if pair.drafter is not None:
        for key, value, source in pair.drafter.values():
            if key.rpartition(".")[2] == "block_size":
                return value, source
    if pair.block is None and found is not None and found.network is not None:
        return found.network.block, "file"
    return pair.block, pair.source("block")


def _built(pair: Pair, kernels: Kernels, *, alone: bool = False) -> tuple[FoundPair | None, str | None]:
    """The pair, or its target ``alone``, as the registry knows it; or why this version cannot run it."""
    try:
        return built_in(pair, kernels, alone=alone), None
    except CheckpointError as error:
        return None, str(error)


def _runs(pair: Pair, kernels: Kernels, targets: dict[str, bool]) -> str:
    """Whether this version runs a pair: ``yes``, ``target alone``, ``no``. ``targets`` keeps what was found of each,
    since several pairs share one."""
    name = pair.target.name
    if name not in targets:
        targets[name] = _built(pair, kernels, alone=True)[0] is not None
    if not targets[name]:
        return "no"
    return "target alone" if _built(pair, kernels)[0] is None else "yes"


def _size(source: Source) -> tuple[int, int] | None:
    """Tensors of a checkpoint and their bytes, as its config has them."""
    if not source.config:
        return None
    weights = list_tensors(source.config, source.name)
    return len(weights.entries), weights.size


def _bytes(pair: Pair) -> int | None:
    """Of the tensors of both files; what comes with foldspec counts nothing. None where one is not known."""
    if pair.disk_bytes is not None:
        return pair.disk_bytes
    sizes = [_size(source) for source in (pair.target, pair.drafter) if source is not None and not source.embedded]
    return None if None in sizes else sum(each[1] for each in sizes if each)


def _checkpoint(source: Source, cache_dir: Path) -> dict[str, Any]:
    sizes = _size(source)
    report: dict[str, Any] = {"name": source.name}
    if source.embedded and source.repo:
        report["original"] = source.repo
    if source.kind:
        report["kind"] = source.kind
    for key in ("revision", "licence"):
        value = getattr(source, key)
        mark = "unverified" if key in source.unverified else "published"
        report[key] = {"value": value, "source": mark} if value else "unknown"
    if source.embedded:
        del report["revision"]
    report["tensors"] = "unknown" if sizes is None else f"{sizes[0]}, {size(sizes[1])}"
    report["on disk"] = is_local(source, cache_dir)
    if source.config:
        report["config"] = {key: {"value": value, "source": mark} for key, value, mark in source.values()}
    return report


def _memory(found: FoundPair, pair: Pair, kernels: Kernels, max_context: int | None) -> dict[str, Any]:
    longest, device = pick_context(max_context, found), torch.device("cpu")

    def plan(method: MethodOptions) -> dict[str, str]:
        plan = make_plan(
            found,
            EngineOptions(max_batch=1),
            filled_in(method, found),
            dtype=torch.bfloat16,
            device=device,
            kernels=kernels,
            chunk=CHUNKS[device.type],
            longest=longest,
            must_fit=False,
        )
        return {key: value for key, value in plan.report().items() if key not in ("cache tokens", "free")}

    report: dict[str, Any] = {"one request of": f"{longest:,} tokens, all in bfloat16"}
    report |= plan(MethodOptions())
    if found.drafter is not None and pair.window is not None:
        paper = plan(MethodOptions(layout="paper"))
        report["in the paper's layout"] = {key: paper[key] for key in ("draft cache", "rings", "in all")}
        report["side cache in the paper's layout"] = size(side_cache(found.drafter.weights, longest))
    if found.drafter is None and pair.drafter is not None:
        report["without"] = f"{pair.drafter.name}, which this version does not run"
    return report
