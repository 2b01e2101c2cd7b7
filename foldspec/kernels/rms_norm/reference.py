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
    # in half precision sources differ in whether the normalised row is cast before it is multiplied by the weight
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)
