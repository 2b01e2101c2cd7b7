"""gate_mul in one Triton launch, arithmetic in fp32: on NVIDIA GPUs."""

from __future__ import annotations

import torch

from foldspec.kernels import jit
from foldspec.kernels.gate_mul import Facts, Gate

BLOCK = 1024


def supports(facts: Facts) -> str | None:
    return jit.refusal(facts.device, facts.dtype)


def gate_mul(gate: torch.Tensor, up: torch.Tensor, f: Gate) -> torch.Tensor:
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(gate, up, y, f)()
    return y


def launch(gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor, f: Gate) -> jit.Launch:
    from foldspec.kernels.gate_mul.triton_kernels import gate_mul as kernel

    rows, width = gate.shape
    arguments = {
        "gate": gate,
        "up": up,
        "y": y,
        "gate_step": gate.stride(0),
        "up_step": up.stride(0),
        "width": width,
        "GELU": f == "gelu_tanh",
        "BLOCK": BLOCK,
    }
    return jit.Launch(kernel, (rows, -(-width // BLOCK)), arguments, warps=4)


def configurations(arch: int) -> jit.Configurations:
    """Of gate and up in one joined product."""
    found: jit.Configurations = {}
    shapes: tuple[tuple[str, Gate, torch.dtype], ...] = (
        ("silu-bf16", "silu", torch.bfloat16),
        ("gelu-bf16", "gelu_tanh", torch.bfloat16),
        ("silu-fp32", "silu", torch.float32),
    )
    for name, f, dtype in shapes:
        joined = torch.empty(16, 2 * 14336, dtype=dtype, device="meta")
        gate, up = joined.chunk(2, 1)
        found[name] = launch(gate, up, torch.empty_like(gate), f)
    return found
