"""Definition of verify over tensors: fixed shapes, no look at the host, so it may be part of a CUDA graph.

Three steps, of which a compiled version replaces the first and the last, those that read whole rows:

    totals   max, argmax and the log-sum-exp of each row's law, and what a rule asks besides
    judge    which drafts stand, from one number a draft (methods 3.1 to 3.5)
    follow   one token of the deciding row's law or of its residual ``Norm([p - c q]+)``: the largest of log mass +
             Gumbel noise, which each id has for itself
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from foldspec.kernels.verify import Blocks, Decided, Facts
from foldspec.laws import NEGLIGIBLE
from foldspec.noise import Purpose, gumbel, uniform

__all__ = ["Judged", "Totals", "judge", "supports", "verify"]

HALVINGS = 100  # as in the rule cactus


def supports(facts: Facts) -> str | None:
    return None


class Totals(NamedTuple):
    """Of each request's D + 1 rows, all [R, D + 1]; those behind its last are copies of that one.

    ``best`` int64, ``peak`` float64: argmax and max of the logits; of the rest, float64, None where nothing asks:
    ``total`` log-sum-exp of the processed logits, at temperature 0 of the logits; ``own`` int64: the draw of
    plain decoding, for the rule ``match``. ``chosen`` [R, D] processed logit of each draft; ``others`` [R, D] what p
    has besides the draft; ``entropy`` [R, D] of p, in nats. ``q`` [R, D]: the probability that each draft was drawn
    with, and ``q_total`` [R, D] the log-sum-exp behind it. ``mixture`` [R, D] int64: the argmax of (1 - lambda) p +
    lambda q at temperature 0.
    """

    best: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    others: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    own: torch.Tensor | None = None
    q: torch.Tensor | None = None
    q_total: torch.Tensor | None = None
    mixture: torch.Tensor | None = None


class Judged(NamedTuple):
    """``accepted``, ``sound``, ``outside`` as in :class:`Decided`; ``token`` [R] int64, -1 where it must be drawn:
    ``position`` [R] is that of its noise, ``residual`` [R] bool: of the residual, p less ``times`` [R] float64 q."""

    accepted: torch.Tensor
    sound: torch.Tensor
    outside: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    residual: torch.Tensor
    times: torch.Tensor


def verify(blocks: Blocks) -> Decided:
    rows = _rows(blocks)
    x = blocks.logits[rows]
    best = x.argmax(-1)
    peak = x.gather(-1, best[..., None])[..., 0].double()
    if not blocks.counts_mass:
        judged = judge(blocks, Totals(best, peak))
        return Decided(judged.accepted, judged.token, judged.sound, judged.outside)
    law = _processed(blocks, rows, x, peak)
    totals = _totals(blocks, law, best, peak)
    judged = judge(blocks, totals)
    token = judged.token
    if not blocks.greedy:
        token = torch.where(token < 0, _draw(blocks, judged, law, totals), token)
    return Decided(judged.accepted, token, judged.sound, judged.outside)


def _rows(blocks: Blocks) -> torch.Tensor:
    """[R, D + 1] int64: rows of the logits."""
    place = torch.arange(blocks.drafts.shape[1] + 1, device=blocks.logits.device)
    return blocks.first[:, None] + torch.minimum(place, blocks.counts[:, None])


def _processed(blocks: Blocks, rows: torch.Tensor, x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """[R, D + 1, V] float64: processed logits, at temperature 0 the logits; -inf for ids that are filtered out. Rows
    that are not finite count as zeros."""
    warm = blocks.temperatures[:, None, None]
    x = torch.where(peak.isfinite()[..., None], x, 0.0).double()
    top = torch.where(peak.isfinite(), peak, 0.0)[..., None]
    # as laws.law_of has it: the quotient is rounded to fp32
    s = torch.where(warm > 0, (x - top) / torch.where(warm > 0, warm, 1.0), x).float()
    if blocks.floor is not None and blocks.last is not None:
        floor, ids = blocks.floor[rows][..., None], torch.arange(s.shape[-1], device=s.device)
        s = torch.where((s > floor) | ((s == floor) & (ids <= blocks.last[rows][..., None])), s, -math.inf)
    return s.double()


def _totals(blocks: Blocks, law: torch.Tensor, best: torch.Tensor, peak: torch.Tensor) -> Totals:
    case, drafts = blocks.case, blocks.drafts
    count = drafts.shape[1]
    total = law.logsumexp(-1)
    y = drafts.clamp(0, law.shape[-1] - 1)[..., None]
    of_drafts = law[:, :count]
    probs = (of_drafts - total[:, :count, None]).exp()
    others = probs.scatter(-1, y, 0.0).sum(-1) if case.kind == "cactus" else None
    entropy = torch.special.entr(probs).sum(-1) if case.kind == "typical" else None
    own = None
    if case.kind == "match" and not blocks.greedy:
        place = blocks.positions[:, None] + torch.arange(count + 1, device=law.device)
        noise = _gumbel(blocks, place, torch.full_like(place, Purpose.TARGET), law.shape[-1])
        own = torch.where(blocks.temperatures[:, None] > 0, (law + noise).argmax(-1), best)
    q = q_total = None
    if blocks.q is not None and blocks.q_rows is not None:
        q_total = blocks.q.double().logsumexp(-1)[blocks.q_rows.clamp(min=0)]
        drawn = blocks.q[blocks.q_rows.clamp(min=0), y[..., 0]].double()
        q = torch.where(blocks.q_rows < 0, 1.0, (drawn - q_total).exp())
    mixture = None
    if case.mixture:
        mixed = (1 - blocks.shares[:, None]) * probs + blocks.shares[:, None] * _q_probs(blocks, y, q_total)
        mixture = torch.where(blocks.shares > 0, mixed.argmax(-1), best[:, :count])
    chosen = of_drafts.gather(-1, y)[..., 0]
    return Totals(best, peak, total, chosen, others, entropy, own, q, q_total, mixture)


def _q_probs(
    blocks: Blocks, y: torch.Tensor, q_total: torch.Tensor | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., V] float64: the laws of drafts y [..., 1], in full."""
    point = torch.zeros(*y.shape[:-1], blocks.logits.shape[-1], dtype=torch.float64, device=y.device).scatter_(
        -1, y, 1.0
    )
    rows = blocks.q_rows if rows is None else rows
    if blocks.q is None or rows is None or q_total is None:
        return point
    return torch.where(rows[..., None] < 0, point, (blocks.q[rows.clamp(min=0)].double() - q_total[..., None]).exp())


def judge(blocks: Blocks, totals: Totals) -> Judged:
    """Which drafts stand, and what the token after them is drawn from."""
    case, drafts = blocks.case, blocks.drafts
    count, size = drafts.shape[1], blocks.logits.shape[-1]
    place = torch.arange(count, device=drafts.device)
    warm = blocks.temperatures[:, None] > 0
    best = totals.best[:, :count]
    known = (drafts >= 0) & (drafts < size)
    top = drafts == best
    p = top.double()
    if totals.total is not None and totals.chosen is not None:
        raw = (totals.chosen - totals.total[:, :count]).exp()
        p = torch.where(warm, raw, p)
    p = torch.where(known, p, 0.0)
    q = torch.ones_like(p) if totals.q is None else totals.q
    times = torch.ones_like(p)
    instead = torch.where(warm, -1, best)  # what replaces a draft that falls: -1, a draw of the residual

    if case.kind == "unverified":
        stands = torch.ones_like(top)
    elif case.kind == "forced":
        assert blocks.forced is not None
        stands = place < blocks.forced[:, None]
    elif case.kind == "match":
        own = totals.best if totals.own is None else totals.own
        stands = drafts == own[:, :count]
    else:
        u = uniform(_keys(blocks), Purpose.ACCEPT, blocks.positions[:, None] + place)
        if case.kind == "exact":
            stands = torch.where(warm, u * q < p, top)
        else:
            allowed = p
            if case.kind == "linear":
                allowed = (1 - blocks.shares) * p + blocks.shares * q
                if case.mixture:
                    assert totals.mixture is not None
                    allowed = torch.where(warm, allowed, (drafts == totals.mixture).double())
                    instead = torch.where(warm, -1, totals.mixture)
            elif case.kind == "lenience":
                allowed = p / case.leniency
                if case.leniency < 1 and totals.total is not None:
                    least = case.leniency * (totals.peak - totals.total)[:, :count].exp()
                    allowed = torch.where(warm, allowed, (top | (known & (raw >= least))).double())
                times = times * (case.leniency if case.relaxed else 1.0)
            elif case.kind == "cactus":
                others = 1 - p if totals.others is None else torch.where(warm & (p >= 0.9), totals.others, 1 - p)
                step = raised_by(p, others, case.leniency, case.divergence)
                allowed = p + step
                if case.relaxed:
                    times = torch.where(step >= others, times, others / (others - step))
            elif case.kind == "typical":
                entropy = torch.zeros_like(p) if totals.entropy is None else torch.where(warm, totals.entropy, 0.0)
                allowed = (p > (case.factor * (-entropy).exp()).clamp(max=case.leniency)).double()
                instead = best
            stands = u * q < allowed

    finite = totals.peak.isfinite()
    accepted = ((place < blocks.counts[:, None]) & finite[:, :count] & stands).long().cumprod(-1).sum(-1)
    sound = (
        ((torch.arange(count + 1, device=drafts.device) > blocks.counts[:, None]) | finite).long().cumprod(-1).sum(-1)
    )
    sound = torch.minimum(sound, blocks.counts + 1)
    last = accepted == blocks.counts
    here = accepted.clamp(max=max(0, count - 1))[:, None]
    followed = torch.where(blocks.temperatures > 0, -1, totals.best.gather(-1, accepted[:, None])[:, 0])
    token, residual = followed, torch.zeros_like(last)
    if case.kind == "match":
        token = own.gather(-1, accepted[:, None])[:, 0]
    elif count and case.kind == "unverified":
        token = torch.where(
            blocks.counts > 0, drafts.gather(-1, (blocks.counts - 1).clamp(min=0)[:, None])[:, 0], followed
        )
    elif count and case.kind != "forced":
        token = torch.where(last, followed, instead.gather(-1, here)[:, 0])
        residual = ~last
    outside = torch.zeros_like(top)
    if case.kind not in ("exact", "match", "forced"):
        outside = (place < accepted[:, None]) & (p == 0)
    times = times.gather(-1, here)[:, 0] if count else torch.ones_like(blocks.temperatures)
    return Judged(accepted, sound, outside, token, blocks.positions + accepted, residual, times)


def raised_by(a: torch.Tensor, others: torch.Tensor, delta: float, divergence: str) -> torch.Tensor:
    """g - a of the rule ``cactus`` [...] float64, at most ``others``, which is 1 - a (methods 3.4)."""
    if divergence == "exact_kl":
        low, high = torch.zeros_like(a), others
        for _ in range(HALVINGS):
            step = (low + high) / 2
            spent = (a + step) * torch.log1p(step / a)
            spent = spent + torch.where(step < others, (others - step) * torch.log1p(-step / others), 0.0)
            within = spent <= delta
            low, high = torch.where(within, step, low), torch.where(within, high, step)
        step = torch.where((others <= 0) | (-a.log() <= delta), others, low)
    elif divergence == "tv":
        step = others.clamp(max=delta)
    else:
        step = torch.minimum(others, ((2 if divergence == "taylor" else 1) * delta * a * others).sqrt())
    return torch.where(a > 0, step, 0.0) if delta > 0 else torch.zeros_like(a)


def _draw(blocks: Blocks, judged: Judged, law: torch.Tensor, totals: Totals) -> torch.Tensor:
    """[R] int64: the token of the deciding row's law or of its residual."""
    assert totals.total is not None
    request = torch.arange(len(law), device=law.device)
    logits, total = law[request, judged.accepted], totals.total[request, judged.accepted]
    purpose = torch.where(judged.residual, Purpose.RESIDUAL, Purpose.TARGET)
    count, size = blocks.drafts.shape[1], law.shape[-1]
    if count:
        here = judged.accepted.clamp(max=count - 1)
        y = blocks.drafts[request, here].clamp(0, size - 1)[:, None]
        rows = None if blocks.q_rows is None else blocks.q_rows[request, here]
        q = _q_probs(blocks, y, None if totals.q_total is None else totals.q_total[request, here], rows)
        mass = ((logits - total[:, None]).exp() - judged.times[:, None] * q).clamp(min=0.0)
        left = judged.residual & (mass.sum(-1) > NEGLIGIBLE)  # false for NaN too: then p itself
        logits = torch.where(left[:, None], mass.log(), logits)
    return (logits + _gumbel(blocks, judged.position, purpose, size)).argmax(-1)


def _keys(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks.keys[:, :1], blocks.keys[:, 1:]


def _gumbel(blocks: Blocks, position: torch.Tensor, purpose: torch.Tensor, size: int) -> torch.Tensor:
    """[..., size] float64 noise of every id at positions [R, ...]."""
    low, high = (k.view(-1, *[1] * position.dim()) for k in _keys(blocks))
    return gumbel((low, high), size, position[..., None], purpose[..., None])
