"""Rotary position embedding: half-split pairs ``(i, i + d/2)``, angles in fp32 as the models were trained with."""

from __future__ import annotations

import math

import torch

from foldspec.kernels.rotate_append.reference import rotate
from foldspec.models.config import ModelConfig

__all__ = ["Rope", "llama3_frequencies"]

STEP = 1024  # positions by which the table grows


class Rope:
    """Rotation by position for heads of width ``d``, from inverse frequencies [d/2] (radians a position)."""

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        self._inverse = inverse_frequencies
        self._table = inverse_frequencies.new_empty(0, 2, len(inverse_frequencies))

    @classmethod
    def from_config(cls, config: ModelConfig, head_dim: int) -> Rope:
        """Both spellings: ``rope_parameters`` first, then ``rope_theta`` beside ``rope_scaling``; no silent default.

        Raises :class:`CheckpointError` if there is no theta, or a rope type that is not known.
        """
        if config.has("rope_parameters"):
            scaling = config.part("rope_parameters")
            theta = scaling.number("rope_theta", config.number("rope_theta", math.nan))
        else:
            scaling = config.part("rope_scaling")
            theta = config.number("rope_theta", math.nan)
        if math.isnan(theta):
            raise config.error("rope_theta is missing, at the top level and in rope_parameters")
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
        if kind == "llama3":
            inverse = llama3_frequencies(inverse, scaling)
        elif kind != "default":
            raise scaling.error(f"rope type {kind!r} is not supported", do="known types: default, llama3")
        return cls(inverse)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, d/2] at positions [n], in the dtype of the frequencies."""
        return self.between(int(positions.min()), int(positions.max()) + 1, positions)

    def between(self, low: int, high: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`at`, for positions known to lie in ``low .. high-1`` (no value is read from the device)."""
        if self._table.device != positions.device:
            self._table = self._table.to(positions.device)
        while high > len(self._table):
            # grown in steps of one size, each computed once: a position's angles never change, not even in the last
            # bit, with how far the table reaches (torch gives the ends of a range another cosine than its middle)
            step = torch.arange(len(self._table), len(self._table) + STEP, dtype=self._inverse.dtype)
            angle = step[:, None] * self._inverse
            grown = torch.stack([angle.cos(), angle.sin()], dim=1).to(positions.device)
            self._table = torch.cat([self._table, grown])
        table = self._table[positions]
        return table[:, :1], table[:, 1:]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [n, heads, d] to positions [n]."""
        return rotate(x, *self.at(positions))


def llama3_frequencies(inverse: torch.Tensor, scaling: ModelConfig) -> torch.Tensor:
    """Llama 3's scaling: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    length = scaling.whole("original_max_position_embeddings")
    wavelength = 2 * math.pi / inverse
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > length / low, inverse / factor, between)
    return torch.where(wavelength < length / high, inverse, scaled)
