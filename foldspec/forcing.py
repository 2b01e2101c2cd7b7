"""``--force-accept``: how many drafts stand in a round where that is not asked of the target. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from foldspec.errors import UsageError

__all__ = ["Forcing", "parse", "published"]

WHERE = "--force-accept"

# Committed tokens a round in the FOLD paper, by pair and context method: the averages of its Table 2; Table 3, general
# tasks, for DSpark; for Qwen3-8B with DFlash Table 9 and section C.2, the Gov task. Its DFlash rows are our ``full``.
_PUBLISHED = {
    "llama-3.1-8b-dflash": {"full": 2.28, "fold": 3.77},
    "qwen3.5-9b-dflash": {"full": 4.23, "fold": 4.87},
    "gemma-4-12b-dflash": {"full": 2.73, "fold": 3.07},
    "gemma-4-12b-dspark": {"full": 3.03, "fold": 3.42},
    "qwen3-8b-dspark": {"full": 4.02, "fold": 4.38},
    "qwen3-8b-dflash": {"full": 2.68, "window": 2.51, "fold": 2.85},
}


@dataclass(frozen=True)
class Forcing:
    """One of three: ``count`` drafts stand in every round; rounds commit ``mean`` tokens on average, the target's own
    included; draft ``i`` stands with probability ``chances[i]`` if those before it do (the last one serves all
    later drafts)."""

    count: int | None = None
    mean: float | None = None
    chances: tuple[float, ...] = ()

    @property
    def least_drafts(self) -> int:
        """Drafts that a round must propose for this to be possible."""
        if self.count is not None:
            return self.count
        return 0 if self.mean is None else -int(-self.mean // 1) - 1


def parse(spec: str) -> Forcing | None:
    """``3``: a count. ``tau=3.4``: a mean. ``0.9,0.8,0.5``: probabilities. ``paper``: None, to be looked up.
    Raises :class:`UsageError`."""
    if spec == "paper":
        return None
    try:
        if spec.startswith("tau="):
            mean = float(spec.removeprefix("tau="))
            if not 1 <= mean <= 1000:
                what = f"tau is at least 1, the target's own token, and at most 1000, not {mean:g}"
                raise UsageError(what, where=WHERE)
            return Forcing(mean=mean)
        if spec.isdecimal() and spec.isascii() and len(spec) < 5:
            return Forcing(count=int(spec))
        chances = tuple(float(word) for word in spec.split(","))
    except ValueError:
        do = "give a count (3), a mean (tau=3.4), probabilities (0.9,0.8,0.5) or paper"
        raise UsageError(f"{spec!r} says no law", where=WHERE, do=do) from None
    for chance in chances:
        if not 0 <= chance <= 1:
            raise UsageError(f"a probability is from 0 to 1, not {chance:g}", where=WHERE)
    return Forcing(chances=chances)


def published(pair: str | None, context: str) -> Forcing:
    """What a paper says of a pair under a context method. Raises :class:`UsageError` where it says nothing."""
    known = _PUBLISHED.get(pair or "", {})
    if context not in known:
        said = f"it has {', '.join(known)} of this pair" if known else f"it has {', '.join(_PUBLISHED)}"
        what = f"the paper gives no tau of {pair or 'this pair'} under {context}"
        raise UsageError(what, where=f"{WHERE} paper", do=f"give one, as tau=3.4; {said}")
    return Forcing(mean=known[context])
