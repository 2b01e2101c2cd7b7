"""The state of recurrent layers: gated DeltaNet's matrices and the rows that their short convolutions look back on.

A state cannot be cut at a row, as keys can. So it is kept as of before the last forward, with that forward's rows
recorded beside it: taking rows back is counting, and the next forward folds in those that stand. Of a forward longer
than :data:`RECORDED` rows (a prompt's), only its last ones are recorded, and no more of it can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from foldspec.errors import ResourceError
from foldspec.kernels.gated_delta import State
from foldspec.made_up import Numbers

__all__ = ["RECORDED", "Columns", "RecurrentPool", "RecurrentSpec", "recorded_rows"]

RECORDED = 64  # rows of one forward that can be taken back: more than any block has


class Columns(NamedTuple):
    """Inputs of a layer's convolution: ``data`` [taps - 1 + R, channels], the history before the recorded rows and then
    those; ``kept`` of them stand, so that the next row's history begins at ``kept``."""

    data: torch.Tensor
    kept: int

    def extended(self, rows: torch.Tensor, taps: int) -> torch.Tensor:
        """The history and new rows [n, channels] -> [taps - 1 + n, channels]. The new rows are recorded."""
        both = torch.cat([self.data[self.kept : self.kept + taps - 1], rows])
        keep = min(len(both), len(self.data))
        self.data[:keep] = both[len(both) - keep :]
        return both


@dataclass(frozen=True)
class RecurrentSpec:
    """``layers`` gated DeltaNet layers. Columns of the convolution, over ``taps`` rows, are kept in ``dtype``; all else
    in float32 or better."""

    layers: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Of what one layer keeps of one request, with ``rows`` recorded rows."""
        return {
            "matrix": (self.value_heads, self.key_width, self.value_width),
            "keys": (rows, self.key_heads, self.key_width),
            "updates": (rows, self.value_heads, self.value_width),
            "decays": (rows, self.value_heads),
            "columns": (self.taps - 1 + rows, self.channels),
        }

    def bytes_per_request(self, rows: int) -> int:
        """Of all layers, with ``rows`` recorded rows."""
        sizes = {name: torch.Size(shape).numel() for name, shape in self.shapes(rows).items()}
        columns = sizes.pop("columns")
        return self.layers * (sum(sizes.values()) * self.wide.itemsize + columns * self.dtype.itemsize)

    @property
    def bytes_read(self) -> int:
        """What a row reads, whatever is before it."""
        return self.bytes_per_request(0)


def recorded_rows(longest_pass: int) -> int:
    """How many rows are recorded, where a forward has at most ``longest_pass`` of one request."""
    return min(longest_pass, RECORDED)


@dataclass
class _Life:
    """A request: its slot, the position of the first recorded row, how many are recorded, and how many of those before
    them the forward that runs has to fold in."""

    slot: int
    base: int = 0
    recorded: int = 0
    kept: int = 0


class RecurrentPool:
    """States of ``requests`` requests [layers, requests, ...]. Not zeroed before a request opens."""

    def __init__(self, spec: RecurrentSpec, requests: int, rows: int, device: torch.device | str) -> None:
        self._rows = rows
        self._data = {
            name: torch.empty(
                spec.layers, requests, *shape, dtype=spec.dtype if name == "columns" else spec.wide, device=device
            )
            for name, shape in spec.shapes(rows).items()
        }
        self._history = spec.taps - 1
        self._free = list(range(requests))
        self._requests = requests
        self._lives: dict[int, _Life] = {}
        self._marks: dict[int, _Life] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._data.values())

    def open(self, request: int) -> None:
        """With an empty past. Raises :class:`ResourceError`."""
        slot = self._slot()
        self._lives[request] = _Life(slot)
        self._data["matrix"][:, slot] = 0
        self._data["columns"][:, slot, : self._history] = 0

    def close(self, request: int) -> None:
        """Nothing to do for one that is not open."""
        for lives in (self._lives, self._marks):
            if request in lives:
                self._free.append(lives.pop(request).slot)

    def check(self) -> None:
        """Debug mode: every slot is free or has one owner."""
        slots = sorted([*self._free, *(life.slot for lives in (self._lives, self._marks) for life in lives.values())])
        assert slots == list(range(self._requests)), "a recurrent state is lost or shared"
        assert all(life.recorded <= self._rows for life in self._lives.values()), "more rows recorded than fit"

    def begin(self, request: int, start: int, count: int) -> None:
        """A forward is about to run ``count`` rows from position ``start`` on."""
        life = self._lives[request]
        life.kept = start - life.base
        assert 0 <= life.kept <= life.recorded, "rows must follow those that the state has seen"
        life.recorded = min(count, self._rows)
        life.base = start + count - life.recorded

    def fill(self, request: int, entries: int, numbers: Numbers) -> None:
        """A state that is made up, as after so many rows, of which none can be taken back."""
        life = self._lives[request]
        for matrix, columns in zip(self._data["matrix"], self._data["columns"], strict=True):
            numbers.fill(matrix[life.slot], scale=0.1)
            numbers.fill(columns[life.slot, : self._history])
        life.base, life.recorded = entries, 0

    def check_length(self, request: int, length: int) -> None:
        """A state cannot go back behind its recorded rows."""
        life = self._lives[request]
        assert life.base <= length <= life.base + life.recorded, "more rows taken back than the last forward recorded"

    def state(self, layer: int, request: int) -> tuple[State, Columns]:
        """For the one layer of the forward that has begun: both are to be brought up to its rows, once."""
        life = self._lives[request]
        part = {name: data[layer, life.slot] for name, data in self._data.items()}
        columns = Columns(part.pop("columns"), life.kept)
        return State(**part, kept=life.kept), columns

    def fork(self, source: int, request: int) -> None:
        """Open ``request`` with the state of ``source``. Raises :class:`ResourceError`."""
        self._lives[request] = self._copied(source)

    def mark(self, request: int) -> None:
        """Keep a copy of the state for :meth:`rewind`. Raises :class:`ResourceError`."""
        assert request not in self._marks, "one mark a request"
        self._marks[request] = self._copied(request)

    def rewind(self, request: int) -> None:
        """Go back to the mark, which is used up."""
        self._free.append(self._lives[request].slot)
        self._lives[request] = self._marks.pop(request)

    def _copied(self, request: int) -> _Life:
        old, new = self._lives[request], _Life(self._slot())
        for data in self._data.values():
            data[:, new.slot] = data[:, old.slot]
        new.base, new.recorded = old.base, old.recorded
        return new

    def _slot(self) -> int:
        if not self._free:
            raise ResourceError("no recurrent state is free", do="end other requests or raise --max-batch")
        return self._free.pop(0)
