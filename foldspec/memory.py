"""What an engine is going to hold in memory, in bytes, computed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from foldspec.cache.recurrent import RECORDED
from foldspec.drafters import MODEL_FREE, make_model_free
from foldspec.drafters.base import Footprint, Room
from foldspec.errors import PairError, ResourceError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import Checkpoint, FoundPair, held_dtype
from foldspec.models.layers import matrices, wide
from foldspec.options import EngineOptions, MethodOptions
from foldspec.schedule.fixed import Seats

__all__ = ["MemoryPlan", "free_memory", "make_plan"]

PARTS = ("weights", "target_cache", "draft_cache", "rings", "method_state", "workspace", "graphs")
SPARE = 0.1  # of the free memory is left alone
SHARE = {"cpu": 0.5, "cuda": 0.9}  # of the free memory that caches take at most, unless the user says how much


@dataclass(frozen=True)
class MemoryPlan:
    """``entries`` are tokens that the caches hold, of all requests together, in ``pages``; ``longest`` what one request
    may hold, ``longest_pass`` what one forward may add to it; ``draft_pages`` are some more, for blocks. The target has
    rings and states for ``target_requests``: one more than a batch, for a kept prompt. ``free`` memory on the device,
    None where nobody knows.

    ``target_cache`` and ``draft_cache`` are what pages take, ``rings`` the windows and recurrent states of the target's
    layers and, for the context method at hand, the windows and selections of the drafter's, ``method_state`` what else
    that method comes to keep of requests; ``workspace`` is an estimate of what the largest pass of the target needs
    meanwhile, ``graphs`` one of what recorded rounds keep to themselves (all of them share it) and of their buffers.
    """

    device: str
    entries: int
    pages: int
    draft_pages: int
    longest: int
    longest_pass: int
    target_requests: int
    weights: int
    target_cache: int
    draft_cache: int
    rings: int
    method_state: int
    workspace: int
    graphs: int
    free: int | None

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    def report(self) -> dict[str, str]:
        """In words, for people."""
        parts = {name.replace("_", " "): size(getattr(self, name)) for name in PARTS}
        free = "unknown" if self.free is None else size(self.free)
        return {"cache tokens": f"{self.entries:,}", **parts, "in all": size(self.total), "free": free}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.report().items())


def size(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def free_memory(device: torch.device) -> int | None:
    """Bytes that the device has left; None where that cannot be found out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")  # a container may have less than its machine
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = min(left, int((group / limit).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, left)


def make_plan(
    found: FoundPair,
    options: EngineOptions,
    method: MethodOptions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    chunk: int,
    longest: int,
    must_fit: bool = True,
) -> MemoryPlan:
    """The plan of a pair that was found. Without ``cache_tokens``, caches hold ``max_batch`` requests of ``longest``
    tokens, or as many as a share of the free memory does, but at least one. ``method`` has its window filled in.

    Raises :class:`ResourceError`, with the plan and two remedies, if that does not fit into the free memory, unless it
    need not; :class:`PairError` for blocks that the target cannot take back.
    """
    page, network, spec = options.page_size, found.network, found.model.cache_spec(dtype)
    block = network.rows(method) if network else 0
    rows = options.max_batch * (block + 1)
    weights = _weights(found.model, found.target, dtype, device, options, kernels)
    workspace = _workspace(found.model, max(min(chunk, longest), rows), rows, dtype)
    # whichever drafter runs later: those without weights may propose more than the pair's own
    drafts = max(block, *(make_model_free(name).max_drafts for name in MODEL_FREE))
    longest_pass, requests = max(min(chunk, longest), drafts + 1), options.max_batch + 1
    if spec.recurrent and block >= RECORDED:
        raise PairError(f"blocks of {block} rows: this target's states can be taken back by {RECORDED - 1} at most")
    if network is not None:
        own_rows = network.pass_rows(method, longest)
        workspace = max(workspace, _workspace(network, own_rows, rows, dtype))
    rings, drafts_take = requests * spec.bytes_per_request(longest_pass, longest + block), Footprint(0, 0, 0)
    if network is not None and found.drafter is not None:
        weights += _weights(network, found.drafter, dtype, device, options, kernels)
        room = Room(options.max_batch, longest + block, longest_pass, page)
        drafts_take = network.footprint(method, dtype, room)
        rings += drafts_take.rings
    per_draft_entry, state = drafts_take.entry, drafts_take.state
    graphs = 0
    if options.graphs == "on" or (options.graphs == "auto" and device.type == "cuda"):
        graphs = Seats(options.max_batch, longest + block, page, block, block, ()).bytes
        if device.type == "cuda":
            graphs += _workspace(found.model, rows, rows, dtype)
            graphs += _workspace(network, rows, rows, dtype) if network is not None else 0

    more = options.max_batch * -(-block // page)  # a drafter writes its block behind the last entry

    def plan(pages: int) -> MemoryPlan:
        return MemoryPlan(
            device=str(device),
            entries=pages * page,
            pages=pages,
            draft_pages=pages + more,
            longest=longest + block,
            longest_pass=longest_pass,
            target_requests=requests,
            weights=weights,
            target_cache=pages * page * spec.bytes_per_entry,
            draft_cache=(pages + more) * page * per_draft_entry,
            rings=rings,
            method_state=state,
            workspace=workspace,
            graphs=graphs,
            free=free,
        )

    free = free_memory(device)
    one = -(-longest // page) + 1  # the one more is for a kept prompt, whose last page is copied
    pages = options.max_batch * one if options.cache_tokens is None else -(-options.cache_tokens // page)
    if free is not None:
        each = page * (spec.bytes_per_entry + per_draft_entry)
        most = (
            int((1 - SPARE) * free - weights - workspace - graphs - rings - state - more * page * per_draft_entry)
            // each
        )
        if options.cache_tokens is None:
            pages = max(one, min(pages, most, int(SHARE[device.type] * free) // each))
        if pages > most and must_fit:
            smaller = ["--dtype bfloat16"] if dtype == torch.float32 else []
            smaller += ["fewer --dummy-layers"] if found.dummy else []
            do = ", or ".join([f"use --max-context or --cache-tokens of at most {(most - 1) * page:,}", *smaller])
            if most < 2:
                held = ["use --weights bfloat16"] if dtype == torch.float32 and options.weights != "bfloat16" else []
                do = ", or ".join(["lower --max-batch", *held, *smaller, "a smaller checkpoint"])
            raise ResourceError(f"not enough memory on {device}: {plan(pages)}", do=do)
    return plan(pages)


def _weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    options: EngineOptions,
    kernels: Kernels,
) -> int:
    held = held_dtype(checkpoint, options.weights, dtype=dtype, device=device, kernels=kernels)
    dtypes = dict.fromkeys(matrices(module), held)
    dtypes |= {name: torch.promote_types(dtype, torch.float32) for name in wide(module)}
    return sum(p.numel() * dtypes.get(name, dtype).itemsize for name, p in module.named_parameters())


def _workspace(model: nn.Module, rows: int, head_rows: int, dtype: torch.dtype) -> int:
    """About the bytes alive at once in a pass over ``rows`` rows: the widest product's inputs and outputs, and the
    logits of ``head_rows`` rows."""
    shapes = [p.shape for name, p in model.named_parameters() if p.dim() == 2]
    inner = [max(s) for s in shapes if max(s) != max(max(s) for s in shapes)]  # all but tables of the vocabulary
    vocabulary = max(max(s) for s in shapes)
    return rows * 6 * max(inner, default=vocabulary) * dtype.itemsize + 2 * head_rows * vocabulary * 4
