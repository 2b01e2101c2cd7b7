"""Definition of RMSNorm: ``w * x / sqrt(mean(x^2) + eps)``, statistics in fp32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foldspec.kernels.rms_norm import Facts


def supports(facts: Facts) -> str | None:
    return None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    # in half precision the source casts the normalised row before it multiplies by the weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
