"""verify in Triton: the passes over whole rows are its kernels (``triton_kernels.py``); what is decided from one number
a draft is the definition's own ``judge``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foldspec.kernels import jit
from foldspec.kernels.verify import Blocks, Case, Decided, Facts
from foldspec.kernels.verify.reference import Judged, Totals, judge
from foldspec.laws import NEGLIGIBLE

__all__ = ["supports", "verify"]

CHUNK = 4096  # ids a program
WARPS = 8  # each of their threads has 16 ids, in float64
NOBODY = 0x7FFFFFFF


def supports(facts: Facts) -> str | None:
    return jit.refusal(facts.device, facts.logits)


def verify(blocks: Blocks) -> Decided:
    return _decided(blocks, jit.Launch.__call__)


def _decided(blocks: Blocks, run: Callable[[jit.Launch], None]) -> Decided:
    passes = _Passes(blocks, run)
    totals = passes.totals()
    judged = judge(blocks, totals)
    token = judged.token
    if not blocks.greedy:
        token = torch.where(token < 0, passes.drawn(judged, totals), token)
    return Decided(judged.accepted, token, judged.sound, judged.outside)


class _Passes:
    """The kernels over one batch, each of which goes to ``run``."""

    def __init__(self, blocks: Blocks, run: Callable[[jit.Launch], None]) -> None:
        from foldspec.kernels.verify import triton_kernels

        self.kernels, self.blocks, self.run = triton_kernels, blocks, run
        self.requests, self.most = blocks.drafts.shape
        self.size = blocks.logits.shape[1]
        self.chunks = -(-self.size // CHUNK)
        assert blocks.logits.stride(1) == 1

    def _launch(self, kernel: Any, rows: int, **arguments: Any) -> None:
        """Over the chunks of so many rows. Arguments that are not named are those of the blocks, under their names."""
        blocks = self.blocks
        known: dict[str, Any] = {"step": blocks.logits.stride(0), "size": self.size}
        known |= {"rows": self.most + 1, "most": self.most}
        # floor and last where there are none: what no kernel looks at
        known |= {"CHUNK": CHUNK, "floor": blocks.temperatures, "last": blocks.first}
        known |= {name: given for name, given in vars(blocks).items() if given is not None} | arguments
        named = {name: known[name] for name in kernel.arg_names}
        self.run(jit.Launch(kernel, (self.chunks, rows), named, WARPS, fusion=False))

    def _parts(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.blocks.logits.device)

    def totals(self) -> Totals:
        blocks, slots, rows = self.blocks, self.requests * (self.most + 1), self.most + 1
        tops, ids = self._parts(slots, self.chunks, dtype=torch.float32), self._ids(slots, self.chunks)
        self._launch(self.kernels.peaks, slots, peak=tops, best=ids)
        peak, best = (x.view(self.requests, rows) for x in _best(tops.double(), ids))
        self.peak = peak.contiguous()
        if not blocks.counts_mass:
            return Totals(best, peak)
        sums, also, values = (self._parts(slots, self.chunks) for _ in range(3))
        ids = self._ids(slots, self.chunks)
        kind = blocks.case.kind
        self._launch(
            self.kernels.totals, slots, peak=self.peak, sums=sums, also=also, drawn=values, own=ids,
            CUT=blocks.floor is not None, MATCH=kind == "match", ENTROPY=kind == "typical",
        )  # fmt: skip
        if kind == "match":
            own = _best(values, ids)[1].view(self.requests, rows)
            return Totals(best, peak, own=torch.where(blocks.temperatures[:, None] > 0, own, best))
        mass, second = (x.sum(-1).view(self.requests, rows) for x in (sums, also))
        self.total = torch.where(blocks.temperatures[:, None] > 0, 0.0, peak) + mass.log()
        second = (second / mass)[:, : self.most]
        q, q_total = self._q()
        return Totals(
            best,
            peak,
            self.total,
            self._chosen(peak),
            second if kind == "cactus" else None,
            mass[:, : self.most].log() - second if kind == "typical" else None,
            None,
            q,
            q_total,
            self._mixture(best, q_total) if blocks.case.mixture else None,
        )

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, NOBODY, dtype=torch.int64, device=self.blocks.logits.device)

    def _chosen(self, peak: torch.Tensor) -> torch.Tensor:
        """[R, D] processed logit of each draft."""
        blocks = self.blocks
        place = torch.arange(self.most, device=peak.device)
        rows = blocks.first[:, None] + torch.minimum(place, blocks.counts[:, None])
        y = blocks.drafts.clamp(0, self.size - 1)
        raw, warm = blocks.logits[rows, y].double(), blocks.temperatures[:, None]
        s = torch.where(warm > 0, (raw - peak[:, : self.most]) / torch.where(warm > 0, warm, 1.0), raw).float()
        if blocks.floor is not None and blocks.last is not None:
            floor, last = blocks.floor[rows], blocks.last[rows]
            s = torch.where((s > floor) | ((s == floor) & (y <= last)), s, -torch.inf)
        return s.double()

    def _q(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``q`` and ``q_total`` of :class:`Totals`."""
        blocks = self.blocks
        if blocks.q is None or blocks.q_rows is None:
            return None, None
        assert blocks.q.is_contiguous()
        tops, sums = (self._parts(len(blocks.q), self.chunks) for _ in range(2))
        self._launch(self.kernels.q_totals, len(blocks.q), tops=tops, sums=sums)
        row = blocks.q_rows.clamp(min=0)
        total = (tops + sums.log()).logsumexp(-1)[row]
        drawn = blocks.q[row, blocks.drafts.clamp(0, self.size - 1)].double()
        return torch.where(blocks.q_rows < 0, 1.0, (drawn - total).exp()), total

    def _laws(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``q`` and ``q_rows``; where all drafts are point masses, -1 and what no kernel looks at."""
        blocks = self.blocks
        if blocks.q is None or blocks.q_rows is None:
            return blocks.temperatures, torch.full_like(blocks.drafts, -1)
        return blocks.q, blocks.q_rows

    def _mixture(self, best: torch.Tensor, q_total: torch.Tensor | None) -> torch.Tensor:
        """[R, D]."""
        blocks, count = self.blocks, self.requests * self.most
        if not count:
            return blocks.drafts
        values, ids = self._parts(count, self.chunks), self._ids(count, self.chunks)
        q, q_rows = self._laws()
        q_total = torch.zeros_like(q_rows, dtype=torch.float64) if q_total is None else q_total.contiguous()
        self._launch(
            self.kernels.mixtures, count, peak=self.peak, total=self.total, q=q, q_rows=q_rows, q_total=q_total,
            mixed=values, own=ids,
        )  # fmt: skip
        mixed = _best(values, ids)[1].view(self.requests, self.most)
        return torch.where(blocks.shares > 0, mixed, best[:, : self.most])

    def drawn(self, judged: Judged, totals: Totals) -> torch.Tensor:
        """[R]: the token of the deciding row's law or of its residual, where one is needed."""
        blocks = self.blocks
        request = torch.arange(self.requests, device=blocks.logits.device)
        q, rows = self._laws()
        total = torch.zeros_like(judged.times) if totals.total is None else totals.total[request, judged.accepted]
        q_row, q_total = torch.full_like(judged.accepted, -1), torch.zeros_like(judged.times)
        if self.most:
            here = judged.accepted.clamp(max=self.most - 1)
            q_row = torch.where(judged.residual, rows[request, here], -1)
            q_total = q_total if totals.q_total is None else totals.q_total[request, here]
        values, ids = self._parts(self.requests, self.chunks, 2), self._ids(self.requests, self.chunks, 2)
        left = self._parts(self.requests, self.chunks)
        self._launch(
            self.kernels.draw, self.requests, peak=self.peak, accepted=judged.accepted, position=judged.position,
            residual=judged.residual.long(), needed=(judged.token < 0).long(), times=judged.times, total=total, q=q,
            q_row=q_row, q_total=q_total, values=values, ids_of=ids, left=left, CUT=blocks.floor is not None,
        )  # fmt: skip
        plain, residual = (_best(values[..., i], ids[..., i])[1] for i in range(2))
        return torch.where(judged.residual & (left.sum(-1) > NEGLIGIBLE), residual, plain)


def _best(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, chunks] -> [n]: the largest value and of its ids the lowest."""
    most = values.amax(-1, keepdim=True)
    return most[:, 0], torch.where(values == most, ids, NOBODY).amin(-1)


def configurations(arch: int) -> jit.Configurations:
    """Of one pass over blocks of 15 drafts, for every way that the kernels are compiled: each under the first of these
    cases that needs it."""
    found: dict[Any, tuple[str, jit.Launch]] = {}
    for name, blocks in _cases().items():

        def keep(launch: jit.Launch, name: str = name) -> None:
            types = {n: each.dtype if torch.is_tensor(each) else each for n, each in launch.arguments.items()}
            found.setdefault((launch.kernel, *types.items()), (f"{launch.kernel.__name__} {name}", launch))

        _decided(blocks, keep)
    return dict(found.values())


def _cases() -> dict[str, Blocks]:
    """Blocks of shapes alone. What is drawn from float64 laws is compiled as what is drawn from none."""
    exact, match, typical, mixture = Case("exact"), Case("match"), Case("typical"), Case("linear", mixture=True)
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    return {
        "greedy": _case(exact, bf16, greedy=True),
        "sampled": _case(exact, bf16, q=fp32),
        "points": _case(exact, bf16),
        "float64": _case(exact, bf16, q=fp64),
        "match": _case(match, bf16),
        "typical": _case(typical, bf16),
        "mixture": _case(mixture, bf16, q=fp32, greedy=True),
        "mixture points": _case(mixture, bf16, greedy=True),
        "filtered": _case(exact, bf16, q=fp32, cut=True),
        "filtered points": _case(exact, bf16, cut=True),
        "filtered match": _case(match, bf16, cut=True),
        "filtered typical": _case(typical, bf16, cut=True),
        "fp32 greedy": _case(exact, fp32, greedy=True),
        "fp32 sampled": _case(exact, fp32, q=fp32),
        "fp32 filtered": _case(exact, fp32, q=fp32, cut=True),
    }


def _case(
    case: Case, logits: torch.dtype, q: torch.dtype | None = None, *, cut: bool = False, greedy: bool = False
) -> Blocks:
    drafts, size = 15, 128256

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    return Blocks(
        case,
        greedy,
        empty(drafts + 1, size, dtype=logits),
        first=empty(1),
        counts=empty(1),
        drafts=empty(1, drafts),
        positions=empty(1),
        keys=empty(1, 2),
        temperatures=empty(1, dtype=torch.float64),
        shares=case.by_draft(drafts, "meta"),
        floor=empty(drafts + 1, dtype=torch.float32) if cut else None,
        last=empty(drafts + 1) if cut else None,
        q=None if q is None else empty(drafts, size, dtype=q),
        q_rows=None if q is None else empty(1, drafts),
    )
