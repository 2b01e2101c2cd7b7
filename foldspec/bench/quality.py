"""How good what came out is, of each run of a request that a sweep measures: looked at when all its times are taken.

logprob   the mean over the output's tokens of their log-probability under the target's raw logits, in nats
spent     the mean, over the drafts that were judged, of the total variation between the target's law and that of
          the token that comes there; of the calibrating run under the method's own rule, which has the same seed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foldspec.bench import metrics
from foldspec.bench.methods import AR, AR_AGAIN
from foldspec.bench.timing import Run

__all__ = ["Quality"]


class Quality:
    """``judged``: of each method the name of its calibrating run."""

    def __init__(self, judged: Mapping[str, str]) -> None:
        self._judged = judged

    def request(
        self, prefix: Any, runs: Mapping[str, Run], calibration: Mapping[str, Any] | None
    ) -> dict[str, dict[str, float | None]]:
        """By method. Texts that are the same are scored once. ``calibration``: None where there was no room for it."""
        means: dict[tuple[int, ...], float] = {}
        for run in runs.values():
            if run.token_ids and run.token_ids not in means:
                means[run.token_ids] = metrics.mean(prefix.score(run.token_ids).logprobs)
        return {
            label: {"logprob": means.get(run.token_ids), "spent": self._spent(label, calibration)}
            for label, run in runs.items()
        }

    def _spent(self, label: str, calibration: Mapping[str, Any] | None) -> float | None:
        if label in (AR, AR_AGAIN):
            return 0.0
        rounds: Sequence[Mapping[str, Any]] = calibration[self._judged[label]]["rounds"] if calibration else ()
        judged = [value for each in rounds for value in each["spent"] if value is not None]
        return metrics.mean(judged) if judged else None
