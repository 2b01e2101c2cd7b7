"""Whether a drafter was made for this target, from configs alone: before any weight is read.

A wrong pair still gives right text, at a tau near 1, so nothing later would tell.
"""

from __future__ import annotations

from itertools import pairwise

from foldspec.errors import PairError
from foldspec.records import DrafterFacts

__all__ = ["check_pair"]


def check_pair(drafter: DrafterFacts, *, target: str, width: int, layers: int, vocabulary: int) -> None:
    """``target`` names the target in errors; the rest are its hidden size, layer count and vocabulary size.

    Raises :class:`PairError` with the first thing that does not fit.
    """

    def refuse(what: str) -> PairError:
        return PairError(
            f"is not a drafter for {target}: {what}", where=drafter.where, do="name the drafter's own target"
        )

    if drafter.width is not None and drafter.width != width:
        raise refuse(f"it was made for hidden size {drafter.width}, the target has {width}")
    if drafter.target_layers is not None and drafter.target_layers != layers:
        raise refuse(f"it was made for {drafter.target_layers} layers, the target has {layers}")
    if abs(drafter.vocabulary - vocabulary) > drafter.padding:
        raise refuse(f"it was made for {drafter.vocabulary} ids, the target has {vocabulary}")
    taps = drafter.taps
    if any(b <= a for a, b in pairwise(taps)):
        raise refuse(f"its tapped layers {list(taps)} do not increase")
    # the last layer's raw output is no published tap: a file that names it counts its layers otherwise
    if taps and not 0 <= taps[0] <= taps[-1] < layers - 1:
        raise refuse(f"its tapped layers {list(taps)} are not all in 0 .. {layers - 2}")
    if drafter.mask_id is not None and drafter.mask_id >= vocabulary:
        raise refuse(f"its mask id {drafter.mask_id} is outside the target's {vocabulary} ids")
