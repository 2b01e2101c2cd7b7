"""Many rows at once, in chunks, as a few products (Yang et al. 2024, Gated Delta Networks, section 3.3). For one head
and the rows of a chunk, with c_i the sum of g up to row i, and D_ij = e^(c_i - c_j) for j <= i, else 0:

    A = I + strictly lower(beta K Kᵀ D);   R = A^-1 (beta V) - A^-1 (beta e^c K) S;
    Y = (e^c Q) S + (Q Kᵀ D) R;            S' = e^(c_last) S + (e^(c_last - c) K)ᵀ R.

R are the updates of the definition. Equal to it but for rounding, so blocks to be verified, which must not depend on
how rows are split, go row by row all the same.
"""

from __future__ import annotations

import itertools

import torch

from foldspec.kernels.gated_delta import Facts, State, reference

CHUNK = 64  # rows
STEPS = 32  # up to which rows go one by one


def supports(facts: Facts) -> str | None:
    return None


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State
) -> torch.Tensor:
    if state.kept > STEPS:
        _fold(state)
        state = state._replace(kept=0)
    if len(v) <= STEPS:
        return reference.gated_delta(q, k, v, g, beta, state)
    for key, update, decay, _ in zip(state.keys, state.updates, state.decays, range(state.kept), strict=False):
        reference.advance(state.matrix, key, update, decay)
    n, dtype, heads = len(v), state.matrix.dtype, len(state.matrix)
    key = reference.normalised(k, dtype)
    query = reference.normalised(q, dtype) * q.shape[-1] ** -0.5
    # [heads, rows, width]
    wide_k, wide_q = (x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1) for x in (key, query))
    values, decays, rates = v.to(dtype).transpose(0, 1), g.T, beta.T
    recorded = min(n, len(state.keys))
    y, updates = torch.empty_like(v), values.new_empty(recorded, *v.shape[1:])
    cuts = [*range(0, n - recorded, CHUNK), *range(n - recorded, n, CHUNK), n]
    matrix = state.matrix.clone()
    for a, b in itertools.pairwise(cuts):
        if a == n - recorded:
            state.matrix.copy_(matrix)
        part = (slice(None), slice(a, b))
        out, update = _chunk(wide_q[part], wide_k[part], values[part], decays[part], rates[part], matrix)
        y[a:b] = out.transpose(0, 1)
        if a >= n - recorded:
            at = a - (n - recorded)
            updates[at : at + b - a] = update.transpose(0, 1)
    state.keys[:recorded], state.updates[:recorded] = key[n - recorded :], updates
    state.decays[:recorded] = g[n - recorded :].exp()
    return y


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [heads, n, key width], v [heads, n, value width], g and beta [heads, n] -> outputs and updates
    [heads, n, value width]; the matrix goes on in place."""
    total = g.cumsum(-1)
    grown = total.exp()[..., None]
    # masked before the exponential: above the diagonal it may overflow
    between = total[:, :, None] - total[:, None, :]
    between = between.masked_fill(torch.ones_like(between, dtype=torch.bool).triu(1), -torch.inf).exp()
    system = beta[..., None] * (k @ k.mT) * between
    right = beta[..., None] * (v - grown * (k @ matrix))
    update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (grown * q) @ matrix + ((q @ k.mT) * between) @ update
    left = (total[:, -1:] - total).exp()[..., None]
    matrix.mul_(grown[:, -1:]).add_((left * k).mT @ update)
    return out, update


def _fold(state: State) -> None:
    """The kept rows into the matrix, in one product."""
    heads, kept = len(state.matrix), state.kept
    keys = state.keys[:kept].repeat_interleave(heads // state.keys.shape[1], dim=1)
    # what each row's update has decayed by at the end: the product of the decays behind it
    after = state.decays[:kept].flip(0).cumprod(0).flip(0)
    left = torch.cat([after[1:], torch.ones_like(after[:1])])
    state.matrix.mul_(after[0][:, None, None])
    state.matrix.add_(torch.einsum("th,thk,thv->hkv", left, keys, state.updates[:kept]))
