"""Definition of gate_mul: ``x / (1 + exp(-x)) * up``, or ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) * up``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foldspec.kernels.gate_mul import Facts, Gate


def supports(facts: Facts) -> str | None:
    return None


def gate_mul(gate: torch.Tensor, up: torch.Tensor, f: Gate) -> torch.Tensor:
    return (F.silu(gate) if f == "silu" else F.gelu(gate, approximate="tanh")) * up
