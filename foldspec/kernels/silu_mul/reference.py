"""Definition of silu_mul: ``x / (1 + exp(-x)) * up``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foldspec.kernels.silu_mul import Facts


def supports(facts: Facts) -> str | None:
    return None


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up
