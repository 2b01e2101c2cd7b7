"""RMSNorm in one Triton launch, statistics in fp32: on NVIDIA GPUs."""

from __future__ import annotations

import torch

from foldspec.kernels import jit
from foldspec.kernels.rms_norm import Facts


def supports(facts: Facts) -> str | None:
    return jit.refusal(facts.device, facts.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(x, weight, y, eps)()
    return y


def launch(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, eps: float) -> jit.Launch:
    from foldspec.kernels.rms_norm.triton_kernels import rms_norm as kernel

    width = weight.shape[0]
    if x.dim() != 3 or x.stride(2) != 1:  # heads of a joined product are read where they lie
        x = x.reshape(-1, 1, width).contiguous()
    block = jit.power_of_two(width)
    arguments = {
        "x": x,
        "weight": weight.contiguous(),
        "y": y,
        "eps": eps,
        "inner": x.shape[1],
        "outer_step": x.stride(0),
        "inner_step": x.stride(1),
        "WIDTH": width,
        "BLOCK": block,
    }
    return jit.Launch(kernel, (x.shape[0] * x.shape[1],), arguments, warps=min(8, max(1, block // 512)))


def configurations(arch: int) -> jit.Configurations:
    """Of a model's rows, and of the heads of a joined product; weights that multiply before and after the cast."""
    found = {}
    for width, wide in ((4096, False), (4096, True), (3840, True), (576, False)):
        dtype = torch.float32 if width == 576 else torch.bfloat16
        x = torch.empty(16, width, dtype=dtype, device="meta")
        weight = torch.empty(width, dtype=torch.float32 if wide else dtype, device="meta")
        found[f"rows-{width}{'-wide' if wide else ''}"] = launch(x, weight, x, 1e-6)
    for heads, width, wide in ((32, 128, False), (16, 256, True), (16, 512, True)):
        joined = torch.empty(16, 2 * heads * width, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(width, dtype=torch.float32 if wide else torch.bfloat16, device="meta")
        x = joined[:, : heads * width].view(16, heads, width)
        found[f"heads-{heads}-{width}{'-wide' if wide else ''}"] = launch(x, weight, torch.empty_like(x), 1e-6)
    return found
