"""Percentile bootstrap of a mean over requests: resamples with replacement, one fixed seed.

The mean of a resample is a product with the shares in which it holds the requests, so all resamples are one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["RESAMPLES", "average_interval", "interval", "shares"]

RESAMPLES = 2000
LEVEL = 0.95


@lru_cache(maxsize=16)
def shares(n: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray[Any, Any]:
    """[resamples, n] the share of each of ``n`` requests in each resample; rows sum to 1."""
    drawn = np.random.default_rng(seed).integers(0, n, (resamples, n))
    rows = np.repeat(np.arange(resamples), n)
    counts = np.bincount(rows * n + drawn.ravel(), minlength=resamples * n).reshape(resamples, n)
    return counts / n


def interval(values: Any, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL) -> Any:
    """[..., 2] low and high end of the interval of the mean over the last axis of ``values`` [..., n].

    Values of one request (a ratio of two methods) stay together, so paired requests are resampled as pairs.
    """
    data = np.asarray(values, dtype=np.float64)
    return _ends(data @ shares(data.shape[-1], resamples, seed).T, level)


def average_interval(
    tasks: Sequence[Sequence[float]], *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> Any:
    """[2] the interval of the mean of the tasks' means, each task the same weight, each resampled by itself."""
    means = [np.asarray(values) @ shares(len(values), resamples, seed + i).T for i, values in enumerate(tasks)]
    return _ends(np.mean(means, axis=0), level)


def _ends(means: np.ndarray[Any, Any], level: float) -> np.ndarray[Any, Any]:
    return np.moveaxis(np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=-1), 0, -1)
