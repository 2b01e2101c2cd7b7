"""Which implementation of an operator runs, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from foldspec.errors import UsageError
from foldspec.kernels import gate_mul, gated_delta, jit, linear, pack, rms_norm, rotate_append, verify
from foldspec.kernels import multi_read_attention as mra
from foldspec.kernels.build import INSTALL_NVCC
from foldspec.kernels.library import Library
from foldspec.kernels.multi_read_attention import device
from foldspec.kernels.multi_read_attention.splits import Splits
from foldspec.kernels.rotate_append import device as moving
from foldspec.options import EngineOptions

__all__ = ["Choice", "Kernels"]

# of each operator: compiled library -> implementations in order of preference (name, supports, function)
OPERATORS: dict[str, Callable[[Library], Any]] = {
    "gated_delta": gated_delta.candidates,
    "multi_read_attention": mra.candidates,
    "device_attention": lambda library: device.device_candidates(),
    "linear": linear.candidates,
    "pack": pack.candidates,
    "rms_norm": rms_norm.candidates,
    "rotate_append": rotate_append.candidates,
    "move_rows": lambda library: moving.device_candidates(),
    "gate_mul": gate_mul.candidates,
    "verify": verify.candidates,
}


class Choice(NamedTuple):
    """The implementation of ``operator`` that runs, and (name, reason) of each that was passed over."""

    operator: str
    name: str
    refused: tuple[tuple[str, str], ...]


class Kernels:
    """The operators, each bound to the first implementation that fits its arguments, or to the one that was forced.

    ``force`` names an implementation; an operator that has none of that name chooses for itself. ``library`` is the
    compiled one; without it everything runs on torch. ``splits`` are those of attention on a GPU. Raises
    :class:`UsageError` if ``force`` names no implementation or one that does not fit.
    """

    def __init__(self, force: str = "auto", library: Library | None = None, splits: Splits | None = None) -> None:
        self._library, self._splits = library or Library(None), splits or Splits()
        self._candidates: dict[str, list[tuple[str, Any, Any]]] = {
            operator: find(self._library) for operator, find in OPERATORS.items()
        }
        known = sorted({name for candidates in self._candidates.values() for name, _, _ in candidates})
        if force != "auto" and force not in known:
            raise UsageError(f"unknown kernels {force!r}", where="--kernels", do=f"known: auto, {', '.join(known)}")
        self._force = force
        self._chosen: dict[Any, Any] = {}
        self.choices: list[Choice] = []

    @classmethod
    def of(cls, options: EngineOptions) -> Kernels:
        """The operators of an engine, with compiled libraries and what was measured in its cache folder."""
        folder = options.cache_dir / "kernels"
        library = Library(folder, options.compiler, nvcc=options.nvcc)
        return cls(options.kernels, library, Splits(folder / "splits.json"))

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should be told, a line each: that there is no compiled library and what to do."""
        gpu = self._library.gpu
        told = [self._library.notice, gpu.notice]
        if gpu.notice is not None and gpu.reason is not None:
            runs = next((choice.name for choice in reversed(self.choices) if choice.operator == "verify"), None)
            which = "Triton" if runs == "triton" else "torch"
            told[1] = f"{gpu.notice}; using the {which} implementation, same results; {INSTALL_NVCC}"
        return tuple(notice for notice in dict.fromkeys(told) if notice is not None)

    @property
    def prepared(self) -> int:
        """Libraries loaded for these operators, and Triton kernels compiled or loaded in this process, so far."""
        return self._library.prepared + jit.compiled()

    def multi_read_attention(self, batch: Sequence[Sequence[mra.ReadArgs]]) -> list[mra.Output]:
        """One output a request, from its reads."""
        run: mra.Attention = self.choose("multi_read_attention", mra.Facts.of(batch[0][0]))
        return run(batch)

    def device_attention(
        self, reads: Sequence[device.DeviceRead], out: torch.Tensor | None = None
    ) -> device.DeviceOutput:
        """The same where numbers stay on the device: the reads of R requests, into ``out`` if that is given."""
        run: device.DeviceAttention = self.choose("device_attention", device.facts_of(reads[0]))
        return run(self._splits.filled(reads, lambda tried: run(tried, None)), out)

    def tuning(self) -> AbstractContextManager[None]:
        """A context for what warms a GPU up, before a round is recorded: device attention measures in it how calls are
        split best."""
        return self._splits.tuning()

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: gated_delta.State,
    ) -> torch.Tensor:
        """Rows of one request through a DeltaNet layer's state -> [n, value heads, value width] in the dtype of v."""
        run: gated_delta.GatedDelta = self.choose("gated_delta", gated_delta.Facts(v.device.type, v.dtype))
        return run(q, k, v, g, beta, state)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
        *,
        packed: bool = False,
    ) -> torch.Tensor:
        """x [n, in], weight [out, in] in the dtype it is held in and perhaps ``packed`` in panels, plus [n, out] ->
        [n, out] in the dtype of x."""
        run: linear.Linear = self.choose("linear", linear.Facts(x.device.type, x.dtype, weight.dtype, packed))
        return run(x, weight, bias, plus)

    def pack(self, rows: torch.Tensor, to: torch.Tensor) -> None:
        """Rows [n, in] as a checkpoint has them to their place ``to`` [n, in] in a packed weight, cast to its dtype."""
        run: pack.Pack = self.choose("pack", pack.Facts(to.device.type, to.dtype))
        run(rows, to)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Every [..., width] of x over its root mean square, times the weight."""
        run: rms_norm.RmsNorm = self.choose("rms_norm", rms_norm.Facts(x.device.type, x.dtype))
        return run(x, weight, eps)

    def rotate_append(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        into: rotate_append.Slots,
    ) -> torch.Tensor:
        """q rotated [n, heads, d]; k rotated and v lie in their slots."""
        facts = rotate_append.Facts(q.device.type, q.dtype, into.keys.dtype)
        run: rotate_append.RotateAppend = self.choose("rotate_append", facts)
        return run(q, k, v, *cos_sin, into)

    def move_rows(self, moves: Sequence[moving.Move]) -> None:
        """What ``rotate_append`` does, with slots that are on the device, and in as many copies as are kept."""
        rows, into = moves[0].rows, moves[0].into
        facts = rotate_append.Facts(rows.device.type, rows.dtype, into.dtype)
        run: moving.MoveRows = self.choose("move_rows", facts)
        run(moves)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of two [n, width]."""
        return self._gate_mul(gate, up, "silu")

    def gelu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up``, gelu in its tanh form."""
        return self._gate_mul(gate, up, "gelu_tanh")

    def _gate_mul(self, gate: torch.Tensor, up: torch.Tensor, f: gate_mul.Gate) -> torch.Tensor:
        run: gate_mul.GateMul = self.choose("gate_mul", gate_mul.Facts(gate.device.type, gate.dtype))
        return run(gate, up, f)

    def verify(self, blocks: verify.Blocks) -> verify.Decided:
        """Which drafts of each request stand, and what follows them, decided on the device."""
        run: verify.Verify = self.choose("verify", verify.Facts(blocks.logits.device.type, blocks.logits.dtype))
        return run(blocks)

    def choose(self, operator: str, facts: Any) -> Any:
        """The implementation of an operator for these facts of it, picked once and then noted in ``choices``."""
        run = self._chosen.get((operator, facts))
        if run is None:
            run = self._chosen[operator, facts] = self._pick(operator, facts)
        return run

    def _pick(self, operator: str, facts: Any) -> Any:
        refused: list[tuple[str, str]] = []
        candidates = self._candidates[operator]
        forced = self._force if any(name == self._force for name, _, _ in candidates) else "auto"
        for name, supports, run in candidates:
            # one that was not asked for is not even looked at: looking may compile
            reason = f"--kernels {forced} was asked for" if forced not in ("auto", name) else supports(facts)
            if reason is None:
                self.choices.append(Choice(operator, name, tuple(refused)))
                return run
            if forced == name:
                raise UsageError(f"{name}: {reason}", where="--kernels")
            refused.append((name, reason))
        raise UsageError(f"no implementation of {operator} fits", where="--kernels")

    def compiles(self, operator: str, facts: Any) -> bool:
        """Whether a compiled implementation would run for these facts. May build the library."""
        forced_away = self._force not in ("auto", "native") and any(
            name == self._force for name, _, _ in self._candidates[operator]
        )
        supports = next(supports for name, supports, _ in self._candidates[operator] if name == "native")
        return not forced_away and supports(facts) is None
