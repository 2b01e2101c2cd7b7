"""A feed-forward of many experts, of which each row takes the few that its router chooses.

    pi = softmax(proj(rms(x) * scale / sqrt(width)));   y = sum_e w_e down_e(gelu(gate_e h) * up_e h)

over the ``k`` largest pi_e, with w_e = pi_e over their sum, times a scale of the expert's own. Rows are sorted by
expert, so that each expert that is chosen at all reads its rows in one product and the others are not read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from foldspec.kernels.dispatch import Kernels
from foldspec.models.layers import Linear, Matrix, UnitNorm, parameter

__all__ = ["Experts", "Router"]


class Router(nn.Module):
    """Its norm has no weight. Probabilities are taken in fp32 or better, over all experts."""

    def __init__(self, width: int, experts: int, chosen: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self._chosen, self._factor = chosen, width**-0.5
        self.norm = UnitNorm(width, eps, kernels)
        self.proj = Linear(width, experts, kernels)
        self.scale = parameter(width)
        self.per_expert_scale = parameter(experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, width] -> experts [n, k] int64 and their weights [n, k] in fp32 or better."""
        scores = self.proj(self.norm(x) * self.scale * self._factor)
        shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, experts = shares.topk(self._chosen)
        return experts, weights / weights.sum(-1, keepdim=True) * self.per_expert_scale[experts]


class ExpertMatrices(Matrix):
    """A weight [experts, out, in]: a matrix for each expert, in panels of its own if packed."""

    def __init__(self, experts: int, width_out: int, width_in: int, kernels: Kernels) -> None:
        super().__init__(width_out, width_in, kernels)
        self.weight = parameter(experts, width_out, width_in)

    def grouped(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x [n, in], the first ``counts[0]`` rows for expert 0 and so on -> [n, out]."""
        even = not any(width % 8 for width in self.weight.shape[1:])  # what the one call asks for, in half precision
        if x.is_cuda and x.dtype == self.weight.dtype == torch.bfloat16 and even:  # no look at the device
            return self.at_once(x, counts)
        used = counts.nonzero()[:, 0]
        pieces = zip(used.tolist(), x.split(counts[used].tolist()), strict=True)
        return torch.cat([self._kernels.linear(piece, self.weight[e], packed=self.packed) for e, piece in pieces])

    def at_once(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """:meth:`grouped` in one call of torch's, of weights that are not packed."""
        return F.grouped_mm(x, self.weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


class Experts(nn.Module):
    def __init__(self, width: int, inner: int, experts: int, kernels: Kernels) -> None:
        super().__init__()
        self._kernels, self._count, self._inner = kernels, experts, inner
        self.gate_up_proj = ExpertMatrices(experts, 2 * inner, width, kernels)  # rows of the gate first
        self.down_proj = ExpertMatrices(experts, width, inner, kernels)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [n, width], experts and weights [n, k] -> [n, width]. A row's bits do not depend on the rows beside it."""
        (rows, chosen), flat = experts.shape, experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self._count)
        gate, up = self.gate_up_proj.grouped(x[order // chosen], counts).split(self._inner, dim=1)
        sorted_out = self.down_proj.grouped(self._kernels.gelu_mul(gate, up), counts)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        each = out.view(rows, chosen, -1).unbind(1)
        total = each[0] * weights[:, :1]  # one after another: a sum over an axis may be cut by its length
        for i in range(1, chosen):
            total = total + each[i] * weights[:, i : i + 1]
        return total.to(x.dtype)
