"""What runs here: the facts behind ``foldspec check`` and every report."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foldspec
from foldspec.acceptance import make_rule
from foldspec.drafters import MODEL_FREE
from foldspec.errors import ResourceError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import Progress, find_pair, held_dtype
from foldspec.memory import make_plan
from foldspec.options import EngineOptions, MethodOptions
from foldspec.resources import CHUNKS, choose_operators, filled_in, no_graphs, pick_context, pick_device, pick_dtype

__all__ = ["check", "environment"]


def environment(device: torch.device, kernels: Kernels) -> dict[str, Any]:
    """Versions, device, threads, and for each operator what was chosen and why not the others."""
    return {
        "foldspec": foldspec.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "kernels": {c.operator: {"runs": c.name, "refused": dict(c.refused)} for c in kernels.choices},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check(
    options: EngineOptions,
    pair: str | None = None,
    *,
    target: str | None = None,
    drafter: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What runs here and, if a pair is named, whether it fits together: configs and tensor headers, no weights. Of what
    is not on this disk the hub is asked, and only the small files are kept. ``short`` says that memory does not do.

    Raises the errors of :meth:`Engine.load` but that one.
    """
    kernels, device = Kernels.of(options), pick_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype, held, about, memory = torch.float32, torch.float32, None, None
    told: tuple[str, ...] = ()
    short: str | None = None
    spec = None
    if any(name is not None for name in (pair, target, drafter)):
        found = find_pair(pair, target, drafter, options=options, kernels=kernels, progress=progress, peeking=True)
        told = found.notices
        dtype = pick_dtype(options.dtype, device, found)
        spec = found.model.cache_spec(dtype)
        held = held_dtype(found.target, options.weights, dtype=dtype, device=device, kernels=kernels)
        asked = filled_in(MethodOptions(drafter=drafter if drafter in MODEL_FREE else None), found)
        weights = sum(p.numel() for p in found.model.parameters()) * held.itemsize
        about = {
            "target": str(found.target.folder),
            "architecture": found.target.config.architecture,
            "weights": f"{weights / 1e9:.3g} GB as {str(held).removeprefix('torch.')}",
            "cache": f"{spec.bytes_per_entry / 1e3:.3g} kB a token",
            "context": pick_context(options.max_context, found),
            "stop ids": sorted(found.stop_ids),
            "graphs": no_graphs(options, device, spec, found.network, asked, make_rule(asked.accept))
            or ("rounds are recorded" if device.type == "cuda" else "fixed buffers, not recorded"),
            "weights on this disk": found.target.local and (found.drafter is None or found.drafter.local),
        }
        if drafter in MODEL_FREE:
            about |= {"drafter": drafter}
        if found.drafter is not None and found.network is not None:
            about |= {
                "drafter": str(found.drafter.folder),
                "drafter architecture": found.drafter.config.architecture,
                **found.network.described(),
                "verdict": found.network.verdict,
            }
        plan = partial(
            make_plan,
            found,
            options,
            filled_in(MethodOptions(), found),
            dtype=dtype,
            device=device,
            kernels=kernels,
            chunk=options.prefill_chunk or CHUNKS[device.type],
            longest=pick_context(options.max_context, found),
        )
        try:
            memory = plan().report()
        except ResourceError as error:  # whether the pair fits together is told all the same
            short, memory = str(error), plan(must_fit=False).report()
    choose_operators(kernels, device, dtype, held, spec)
    return {
        "environment": environment(device, kernels),
        "pair": about,
        "memory": memory,
        "short": short,
        "notices": [*told, *kernels.notices],
    }
