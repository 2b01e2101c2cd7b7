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
NOBODY = 0x7FFFFFFF


def supports(facts: Facts) -> str | None:
    if facts.logits not in (torch.float32, torch.bfloat16, torch.float16):
        return f"reads float32 and half precision, not {str(facts.logits).removeprefix('torch.')}"
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if facts.device != "cuda" and not triton.knobs.runtime.interpret:
        return f"runs on a GPU, not on {facts.device}"
    return None


def verify(blocks: Blocks) -> Decided:
    return _verify(blocks, jit.Launch.__call__)


def _verify(blocks: Blocks, run: Callable[[jit.Launch], None]) -> Decided:
    passes = _Passes(blocks, run)
    totals = passes.totals()
    judged = judge(blocks, totals)
    token = judged.token
    if not blocks.greedy:
        token = torch.where(token < 0, passes.drawn(judged, totals), token)
    return Decided(judged.accepted, token, judged.sound, judged.outside)


class _Passes:
    """The kernels over one batch."""

    def __init__(self, blocks: Blocks, run: Callable[[jit.Launch], None]) -> None:
        from foldspec.kernels.verify import triton_kernels

        self.kernels, self.blocks, self.run = triton_kernels, blocks, run
        self.requests, self.most = blocks.drafts.shape
        self.size = blocks.logits.shape[1]
        self.chunks = -(-self.size // CHUNK)
        assert blocks.logits.stride(1) == 1

    def _launch(self, kernel: Any, rows: int, *arguments: Any, **constants: Any) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | {"CHUNK": CHUNK, **constants}
        # no product and sum become one, so that numbers are those of the definition
        self.run(jit.Launch(kernel, (self.chunks, rows), named, warps=8, fused=False))

    def _parts(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.blocks.logits.device)

    def totals(self) -> Totals:
        blocks, slots, rows = self.blocks, self.requests * (self.most + 1), self.most + 1
        tops, ids = self._parts(slots, self.chunks, dtype=torch.float32), self._ids(slots, self.chunks)
        step = blocks.logits.stride(0)
        about = (blocks.first, blocks.counts)
        self._launch(self.kernels.peaks, slots, blocks.logits, *about, tops, ids, step, self.size, rows)
        peak, best = (x.view(self.requests, rows) for x in _best(tops.double(), ids))
        self.peak = peak.contiguous()
        if not blocks.counts_mass:
            return Totals(best, peak)
        sums, also, values = (self._parts(slots, self.chunks) for _ in range(3))
        ids = self._ids(slots, self.chunks)
        kind = blocks.case.kind
        self._launch(
            self.kernels.totals, slots, blocks.logits, *about, blocks.drafts, blocks.positions, blocks.keys,
            blocks.temperatures, *self._cut(), self.peak, sums, also, values, ids, step, self.size, rows,
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

    def _cut(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``floor`` and ``last``, or what no kernel looks at."""
        blocks = self.blocks
        if blocks.floor is None or blocks.last is None:
            return blocks.temperatures, blocks.first
        return blocks.floor, blocks.last

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
        self._launch(self.kernels.q_totals, len(blocks.q), blocks.q, tops, sums, self.size)
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
            self.kernels.mixtures, count, blocks.logits, blocks.first, blocks.counts, blocks.drafts,
            blocks.temperatures, self.peak, self.total, q, q_rows, q_total, blocks.shares, values, ids,
            blocks.logits.stride(0), self.size, self.most,
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
            self.kernels.draw, self.requests, blocks.logits, blocks.first, blocks.drafts, blocks.keys,
            blocks.temperatures, *self._cut(), self.peak, judged.accepted, judged.position, judged.residual.long(),
            (judged.token < 0).long(), judged.times, total, q, q_row, q_total, values, ids, left,
            blocks.logits.stride(0), self.size, self.most, CUT=blocks.floor is not None,
        )  # fmt: skip
        plain, residual = (_best(values[..., i], ids[..., i])[1] for i in range(2))
        return torch.where(judged.residual & (left.sum(-1) > NEGLIGIBLE), residual, plain)


def _best(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, chunks] -> [n]: the largest value and of its ids the lowest."""
    most = values.amax(-1, keepdim=True)
    return most[:, 0], torch.where(values == most, ids, NOBODY).amin(-1)


def configurations(arch: int) -> jit.Configurations:
    """By whatever rule: all ids or those that a filter leaves, drafts that are points or were drawn; bf16 logits, and
    fp32 ones by the rule that most have."""
    found: jit.Configurations = {}
    for variant, case, greedy, filtered, drawn in (
        ("", Case("exact"), False, False, False),
        ("-filtered", Case("exact"), False, True, False),
        ("-drawn", Case("exact"), False, False, True),
        ("-match", Case("match"), False, False, False),
        ("-entropy", Case("typical"), False, False, False),
        ("-mixture", Case("linear", (0.5,), mixture=True), True, False, False),
        ("-fp32", Case("exact"), False, False, False),
    ):
        dtype = torch.float32 if variant == "-fp32" else torch.bfloat16
        launches: list[jit.Launch] = []
        _verify(_without_memory(case, greedy, filtered, drawn, dtype), launches.append)
        for launch in launches:
            same = any(launch.kernel is other.kernel and _types(launch) == _types(other) for other in found.values())
            if not same:
                found[f"{launch.kernel.fn.__name__}{variant}"] = launch
    return found


def _types(launch: jit.Launch) -> list[Any]:
    return [getattr(x, "dtype", x) for x in launch.arguments.values()]


def _without_memory(case: Case, greedy: bool, filtered: bool, drawn: bool, logits: torch.dtype) -> Blocks:
    rows, drafts, size = 10, 9, 128_256

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    return Blocks(
        case,
        greedy,
        empty(rows, size, dtype=logits),
        first=empty(1),
        counts=empty(1),
        drafts=empty(1, drafts),
        positions=empty(1),
        keys=empty(1, 2),
        temperatures=empty(1, dtype=torch.float64),
        shares=empty(drafts, dtype=torch.float64),
        floor=empty(rows, dtype=torch.float32) if filtered else None,
        last=empty(rows) if filtered else None,
        q=empty(drafts, size, dtype=torch.float32) if drawn else None,
        q_rows=empty(1, drafts) if drawn else None,
    )
