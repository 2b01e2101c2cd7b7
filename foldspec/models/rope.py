"""Rotary position embedding: half-split pairs ``(i, i + r/2)`` of the first ``r`` numbers of a head (``r`` is all of
them but for partial rotation), angles in fp32 as the models were trained with."""

from __future__ import annotations

import math

import torch

from foldspec.kernels.rotate_append.reference import rotate
from foldspec.models.config import ModelConfig

__all__ = ["Rope", "llama3_frequencies", "yarn_frequencies"]

STEP = 1024  # positions by which the table grows
KINDS = ("default", "llama3", "proportional", "yarn")


class Rope:
    """Rotation by position from inverse frequencies [r/2] (radians a position).

    ``factor``   multiplies cos and sin, so that it comes into every logit twice, once with the query and once with the
                 key (YaRN's attention temperature)
    ``reach``    the context that the scaling was made for, where the config says so; else 0
    ``theta``    the base of which the frequencies are powers, for :meth:`stretched`
    """

    def __init__(
        self, inverse_frequencies: torch.Tensor, factor: float = 1.0, reach: int = 0, theta: float = math.nan
    ) -> None:
        self._inverse, self.factor, self.reach, self._theta = inverse_frequencies, factor, reach, theta
        self._table = inverse_frequencies.new_empty(0, 2, len(inverse_frequencies))
        # [r/2] what is not turned is left as it is
        self._gain = torch.ones_like(inverse_frequencies).masked_fill(inverse_frequencies != 0, factor)

    @classmethod
    def from_config(cls, config: ModelConfig, head_dim: int, layer_type: str | None = None) -> Rope:
        """Both spellings: ``rope_parameters`` (of ``layer_type``, where a model has several), or ``rope_theta`` beside
        ``rope_scaling``; no silent default.

        Raises :class:`CheckpointError` if there is no theta, a rope type that is not known, or two ropes.
        """
        scaling = _scaling(config, layer_type)
        theta = scaling.number("rope_theta", config.number("rope_theta", math.nan))
        if math.isnan(theta):
            raise config.error("rope_theta is missing, at the top level and in rope_parameters")
        kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
        if kind not in KINDS:
            raise scaling.error(f"rope type {kind!r} is not supported", do=f"known types: {', '.join(KINDS)}")
        part = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        turned = int(head_dim * part)
        if not 0 < turned <= head_dim or turned % 2:
            raise scaling.error(f"partial_rotary_factor {part} of {head_dim} is no even number of 2 to {head_dim}")
        if kind == "proportional":  # spaced over the whole head; what is not turned has frequency 0
            inverse = _powers(theta, head_dim)
            inverse[turned // 2 :] = 0.0
            return cls(inverse / scaling.number("factor", 1.0), theta=theta)
        inverse = _powers(theta, turned)
        if kind == "llama3":
            return cls(llama3_frequencies(inverse, scaling, _trained_length(config, scaling)), theta=theta)
        if kind == "yarn":
            length, stated = _trained_length(config, scaling), scaling.has("original_max_position_embeddings")
            if scaling.has("factor") or not stated:
                stretch = scaling.number("factor")
            else:
                stretch = config.whole("max_position_embeddings") / length
            fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
            inverse = yarn_frequencies(theta, turned, stretch, length, fast, slow, scaling.flag("truncate", True))
            return cls(inverse, _yarn_factor(scaling, stretch), int(stretch * length) if stated else 0, theta)
        return cls(inverse, theta=theta)

    def stretched(self, stretch: float, length: int) -> Rope:
        """YaRN's table for contexts ``stretch`` > 1 times as long as ``length``, with its attention temperature: of the
        same base, whatever scaling this rope has. Pairs that this rope does not turn are not turned."""
        fast, slow = 32.0, 1.0
        inverse = yarn_frequencies(self._theta, 2 * len(self._inverse), stretch, length, fast, slow)
        inverse = inverse.to(self._inverse).where(self._inverse != 0, 0.0)
        return Rope(inverse, _temperature(stretch, 1.0), int(stretch * length), self._theta)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, r/2] at positions [n], in the dtype of the frequencies."""
        return self.between(int(positions.min()), int(positions.max()) + 1, positions)

    def between(self, low: int, high: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`at`, for positions known to lie in ``low .. high-1`` (no value is read from the device)."""
        if self._table.device != positions.device:
            self._table = self._table.to(positions.device)
        grown = [self._table]
        for first in range(len(self._table), high, STEP):
            # grown in steps of one size, each computed once: a position's angles never change, not even in the last
            # bit, with how far the table reaches (torch gives the ends of a range another cosine than its middle)
            step = torch.arange(first, first + STEP, dtype=self._inverse.dtype)
            angle = step[:, None] * self._inverse
            grown.append(
                torch.stack([angle.cos(), angle.sin()], dim=1).mul_(self._gain.to(angle.device)).to(positions.device)
            )
        if len(grown) > 1:
            self._table = torch.cat(grown)
        table = self._table[positions]
        return table[:, :1], table[:, 1:]

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool = False, end: int | None = None
    ) -> torch.Tensor:
        """Rotate x [n, heads, d] to positions [n]. ``alone``: what x meets stays un-rotated, so that x brings the
        ``factor`` of both. ``end``: positions are known to lie below it, and no value is read from the device."""
        cos, sin = self.at(positions) if end is None else self.between(0, end, positions)
        if alone and self.factor != 1.0:
            if self._gain.device != x.device:
                self._gain = self._gain.to(x.device)
            cos, sin = cos * self._gain, sin * self._gain
        return rotate(x, cos, sin)


def _scaling(config: ModelConfig, layer_type: str | None) -> ModelConfig:
    """Where the rope's own keys stand, in whichever spelling; empty where a config has ``rope_theta`` alone."""
    scaling, older = config.part("rope_parameters"), config.part("rope_scaling")
    if scaling.values and older.values and any(scaling.values.get(k) != v for k, v in older.values.items()):
        # which of the two counts is another one's guess: readers differ
        raise config.error("rope_parameters and rope_scaling say different things", do="remove one of them")
    if not scaling.values:
        return older
    if layer_type is not None:
        return scaling.part(layer_type)
    nested = [key for key, value in scaling.values.items() if isinstance(value, dict)]
    if nested:
        raise scaling.error(f"has a rope for each of {', '.join(nested)}, which this architecture has not")
    return scaling


def _trained_length(config: ModelConfig, scaling: ModelConfig) -> int:
    """Positions of the training before a rope was scaled: as transformers finds it, first beside the rope, then in it,
    then the model's own."""
    key = "original_max_position_embeddings"
    places = [place for place in (config, scaling) if place.has(key)]
    return places[0].whole(key) if places else config.whole("max_position_embeddings")


def _powers(theta: float, width: int) -> torch.Tensor:
    """[width/2] ``theta ** (-2 i / width)``."""
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def llama3_frequencies(inverse: torch.Tensor, scaling: ModelConfig, length: int) -> torch.Tensor:
    """Llama 3's scaling: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    wavelength = 2 * math.pi / inverse
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > length / low, inverse / factor, between)
    return torch.where(wavelength < length / high, inverse, scaled)


def yarn_frequencies(
    theta: float, width: int, stretch: float, length: int, fast: float, slow: float, whole: bool = True
) -> torch.Tensor:
    """YaRN's interpolation by parts (Peng et al. 2023): pairs that turn more than ``fast`` times within ``length``
    positions are kept, those that turn less than ``slow`` times are divided by ``stretch``; a ramp, linear in the
    index, lies between (its ends rounded outwards if ``whole``)."""

    def turning(times: float) -> float:  # the index, in pairs, of the frequency that turns so often
        return width * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(fast), turning(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # far out the last bit of a frequency shows in the angle: the order of these operations is transformers'
    powers = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (stretch * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_factor(scaling: ModelConfig, stretch: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        return _temperature(stretch, scaling.number("mscale")) / _temperature(stretch, scaling.number("mscale_all_dim"))
    return _temperature(stretch, 1.0)


def _temperature(stretch: float, scale: float) -> float:
    return 0.1 * scale * math.log(stretch) + 1.0 if stretch > 1 else 1.0
