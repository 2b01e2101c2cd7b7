"""Definition of the linear operator: torch's own, with weights that are held narrower widened first."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foldspec.kernels.linear import Facts


def supports(facts: Facts) -> str | None:
    return "reads weights as a checkpoint has them, not in panels" if facts.packed else None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plus: torch.Tensor | None = None
) -> torch.Tensor:
    y = F.linear(x, weight.to(x.dtype), bias)
    return y if plus is None else plus + y
