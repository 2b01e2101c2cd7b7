"""Definition of the gated delta rule, row by row. For each value head, with the key head that serves it (each serves
consecutive value heads), q and k normalised to length 1, and q divided by the root of its width:

    S <- e^g S;   r = beta (v - Sᵀ k);   S <- S + k rᵀ;   y = Sᵀ q.

(Yang et al. 2024, Gated Delta Networks, Eq. 10, with S transposed.) Every operation is on one row alone, so that a
row's bits do not depend on the rows that come with it.
"""

from __future__ import annotations

import torch

from foldspec.kernels.gated_delta import Facts, State

EPS = 1e-6  # in the length of q and k


def supports(facts: Facts) -> str | None:
    return None


def normalised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., width] to length 1."""
    x = x.to(dtype)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def advance(matrix: torch.Tensor, key: torch.Tensor, update: torch.Tensor, decay: torch.Tensor) -> None:
    """A recorded row: key [key heads, key width], update [value heads, value width], decay [value heads]."""
    matrix.mul_(decay[:, None, None])
    matrix.add_(spread(key, len(matrix)) * update[:, None, :])


def spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[key heads, width] -> [value heads, width, 1]: what each value head meets."""
    return x.repeat_interleave(heads // len(x), dim=0)[:, :, None]


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State
) -> torch.Tensor:
    matrix = state.matrix
    for key, update, decay, _ in zip(state.keys, state.updates, state.decays, range(state.kept), strict=False):
        advance(matrix, key, update, decay)
    y, folded = torch.empty_like(v), max(0, len(v) - len(state.keys))
    for t in range(len(v)):
        if t == folded:
            matrix = matrix.clone()  # from here on rows may be taken back
        key, decay = normalised(k[t], matrix.dtype), g[t].exp()
        matrix.mul_(decay[:, None, None])
        wide = spread(key, len(matrix))
        update = beta[t][:, None] * (v[t] - (matrix * wide).sum(1))
        matrix.add_(wide * update[:, None, :])
        query = normalised(q[t], matrix.dtype) * q.shape[-1] ** -0.5
        y[t] = (matrix * spread(query, len(matrix))).sum(1)
        if t >= folded:
            at = t - folded
            state.keys[at], state.updates[at], state.decays[at] = key, update, decay
    return y
