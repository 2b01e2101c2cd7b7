"""Percentile bootstrap of a mean over requests: resamples with replacement, one fixed seed.

A resample is how often it holds each request, so all resamples are one matrix and all their sums one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["RESAMPLES", "average_interval", "counts", "interval", "ratio_interval"]

RESAMPLES = 2000
LEVEL = 0.95


@lru_cache(maxsize=16)
def counts(n: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray[Any, Any]:
    """[resamples, n] how often each of ``n`` requests is in each resample; rows sum to ``n``."""
    drawn = np.random.default_rng(seed).integers(0, n, (resamples, n))
    rows = np.repeat(np.arange(resamples), n)
    held = np.bincount(rows * n + drawn.ravel(), minlength=resamples * n)
    return held.reshape(resamples, n).astype(np.float64)


def interval(values: Any, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL) -> Any:
    """[..., 2] low and high end of the interval of the mean over the last axis of ``values`` [..., n].

    Values of one request (a ratio of two methods) stay together, so paired requests are resampled as pairs.
    """
    return _ends(_means(np.asarray(values, dtype=np.float64), resamples, seed), level)


def average_interval(
    tasks: Sequence[Sequence[float]],
    *,
    weights: Sequence[float] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Any:
    """[2] the interval of the mean of the tasks' means, each resampled by itself; ``weights`` None: all the same."""
    means = [
        np.asarray(values) @ counts(len(values), resamples, seed + i).T / len(values) for i, values in enumerate(tasks)
    ]
    return _ends(np.average(means, axis=0, weights=weights), level)


def ratio_interval(
    sums: Sequence[float],
    sizes: Sequence[float],
    less: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[float]:
    """[2] the interval of ``sum(sums) / sum(sizes)``, a mean over what requests hold (``sizes[i]`` values that come to
    ``sums[i]``); requests are resampled whole. ``less``: another such mean of the same requests, subtracted.
    Resamples that hold nothing are left out."""

    def means(sums: Sequence[float], sizes: Sequence[float]) -> np.ndarray[Any, Any]:
        held = counts(len(sums), resamples, seed)
        total: np.ndarray[Any, Any] = held @ np.asarray(sizes)
        return np.divide(held @ np.asarray(sums), total, out=np.full(len(total), np.nan), where=total > 0)

    values = means(sums, sizes) - (0.0 if less is None else means(*less))
    return [float(end) for end in _ends(values[np.isfinite(values)], LEVEL)]


def _means(values: np.ndarray[Any, Any], resamples: int, seed: int) -> np.ndarray[Any, Any]:
    n = values.shape[-1]
    means: np.ndarray[Any, Any] = values @ counts(n, resamples, seed).T / n
    return means


def _ends(means: np.ndarray[Any, Any], level: float) -> np.ndarray[Any, Any]:
    return np.moveaxis(np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=-1), 0, -1)
