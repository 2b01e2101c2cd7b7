"""What stands between the target's logits and the tokens that are committed: every acceptance rule over a batch of
blocks, with the noise of :mod:`foldspec.noise`, all on the device.

Row ``j`` of a request's block judges its draft ``j``; the row after the last draft that stands gives the token that
follows. What a rule decides is defined by ``AcceptanceRule.judge``, one request at a time and on the host; the
implementations here decide the same, in float64 as :class:`foldspec.laws.Law` does, without a look at the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["CASES", "Blocks", "Case", "Decided", "Facts", "Verify", "candidates"]

# Rules, as csrc/cuda/verify.cu numbers them.
CASES = ("exact", "match", "linear", "lenience", "cactus", "typical", "unverified", "forced")
PLAIN = ("exact", "match", "unverified", "forced")  # at temperature 0 these look at no law


class Case(NamedTuple):
    """A rule with its numbers. ``kind`` is one of :data:`CASES`.

    ``shares``      of ``linear``: lambda of each draft, the last of them for all that follow
    ``leniency``    l of ``lenience``, delta of ``cactus``, epsilon of ``typical``
    ``factor``      of ``typical``
    ``divergence``  of ``cactus``: taylor, chi2, tv or exact_kl
    ``relaxed``     the residual is that of the law that a draft was judged by (``lenience``, ``cactus``)
    ``mixture``     ``linear`` at temperature 0 takes the argmax of the mixture
    """

    kind: str
    shares: tuple[float, ...] = ()
    leniency: float = 0.0
    factor: float = 0.0
    divergence: str = "taylor"
    relaxed: bool = False
    mixture: bool = False

    def by_draft(self, drafts: int, device: torch.device | str) -> torch.Tensor:
        """[drafts] float64: lambda of each draft; 0 for rules that have none."""
        own = self.shares or (0.0,)
        return torch.tensor([own[min(j, len(own) - 1)] for j in range(drafts)], dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Blocks:
    """The blocks of R requests with at most D drafts each, all on one device and, but for ``case`` and ``greedy``, free
    to change from round to round in place.

    ``logits``        [N, V] fp32, bf16 or fp16: the target's rows, with biases and penalties in them. Request r has
                      rows ``first[r] .. first[r] + counts[r]``
    ``first``         [R] int64;  ``counts`` [R] int64 drafts, 0 to D;  ``drafts`` [R, D] int64, behind the count any id
    ``positions``     [R] int64: of the token that row 0 gives
    ``keys``          [R, 2] int64: low and high 32 bits of the seed
    ``temperatures``  [R] float64; 0: the largest logit
    ``shares``        [D] float64, :meth:`Case.by_draft`
    ``greedy``        every temperature is 0
    ``floor``, ``last``  [N] fp32 and int64, both or none: of a row's scaled logits fp32((l - max l) / T) those count
                      that are above its floor, and of those that equal it the ids up to ``last``
                      (``kernels/verify/filters.py``)
    ``q``             [Q, V] fp32: processed logits of the laws that drafts were drawn from, -inf for an id that a law
                      has not;  ``q_rows`` [R, D] int64: the row of a draft's law, -1: a point mass. Both or none
    ``forced``        [R] int64: how many drafts stand, for the rule ``forced`` alone
    """

    case: Case
    greedy: bool
    logits: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor
    drafts: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    temperatures: torch.Tensor
    shares: torch.Tensor
    floor: torch.Tensor | None = None
    last: torch.Tensor | None = None
    q: torch.Tensor | None = None
    q_rows: torch.Tensor | None = None
    forced: torch.Tensor | None = None

    @property
    def counts_mass(self) -> bool:
        """Whether more than the argmax of each row is looked at."""
        case = self.case
        raw = (case.kind == "lenience" and case.leniency < 1) or case.mixture
        return not self.greedy or raw or (self.q is not None and case.kind not in PLAIN)


class Decided(NamedTuple):
    """``accepted`` [R] int64: drafts that stand;  ``token`` [R] int64: what follows them (of ``unverified``, where
    anything was drafted, the last draft again);  ``sound`` [R] int64: rows before the first that is not finite, beyond
    which nothing is accepted and no token means anything;  ``outside`` [R, D] bool: drafts that stand although p rules
    them out."""

    accepted: torch.Tensor
    token: torch.Tensor
    sound: torch.Tensor
    outside: torch.Tensor


class Facts(NamedTuple):
    """``logits``: their dtype."""

    device: str
    logits: torch.dtype


class Verify(Protocol):
    def __call__(self, blocks: Blocks) -> Decided: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], Any]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.verify import cuda, reference, triton

    compiled = cuda.CudaVerify(library.gpu)
    return [
        ("cuda", compiled.supports, compiled),
        ("triton", triton.supports, triton.verify),
        ("reference", reference.supports, reference.verify),
    ]
