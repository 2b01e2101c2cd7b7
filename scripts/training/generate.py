"""Greedy continuations of a target, many at once, with the taps that a drafter will read captured in the same pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardPlan, LanguageModel
from training.prompts import Prompt

__all__ = ["Continuation", "RoundedProducts", "generate"]

LOOP, REPEATS = 24, 4  # a text that repeats a period of up to LOOP tokens REPEATS times has nothing new to say


class RoundedProducts(Kernels):
    """Products of many rows with bf16 weights on the CPU's bf16 instructions, which round the rows too.

    Several times faster than fp32 where the CPU has such instructions. The texts are then those of a target whose
    products are rounded; near ties may fall otherwise, and nothing in training asks for more.
    """

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.dtype == torch.bfloat16 and x.dtype == torch.float32 and len(x) >= 16:
            # rows in steps of 32: torch keeps what it prepares for each shape, and shapes without end fill the memory
            rows = F.pad(x.bfloat16(), (0, 0, 0, -len(x) % 32))
            return F.linear(rows, weight, None if bias is None else bias.bfloat16())[: len(x)].float()
        return super().linear(x, weight, bias)


@dataclass
class Continuation:
    """A prompt and what the target said. ``taps`` hold pieces [n, taps * width] bf16 of all tokens but the last."""

    prompt: Prompt
    ids: list[int]
    taps: list[torch.Tensor] = field(default_factory=list)
    done: bool = False

    @property
    def written(self) -> int:
        return len(self.ids) - len(self.prompt.ids)


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    taps: tuple[int, ...],
    stop_ids: frozenset[int],
    length: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int = 64,
) -> Iterator[Continuation]:
    """Each prompt's continuation as it ends: at a stop id, at ``length`` tokens in all, or in a loop.

    At most ``batch`` requests are open at once; a new one is let in as soon as one has ended.
    """
    pages = batch * -(-(length + 1) // page_size)
    cache = PagedCache(model.cache_spec(dtype), pages=pages, page_size=page_size, device=device)
    waiting = list(enumerate(prompts))[::-1]
    going: dict[int, Continuation] = {}
    while waiting or going:
        while waiting and len(going) < batch:
            request, prompt = waiting.pop()
            cache.open(request)
            going[request] = Continuation(prompt, list(prompt.ids))
            rows = Rows.of([request], [0], [len(prompt.ids)])
            ids = torch.tensor(prompt.ids, device=device)
            _step(model, cache, ForwardPlan(rows, taps, (len(prompt.ids) - 1,)), ids, [going[request]])
        ended = [request for request, one in going.items() if _ended(one, stop_ids, length)]
        for request in ended:
            cache.close(request)
            yield going.pop(request)
        if ended or not going:
            continue
        order = list(going)
        rows = Rows.of(order, [len(going[r].ids) - 1 for r in order], [1] * len(order))
        ids = torch.tensor([going[r].ids[-1] for r in order], device=device)
        _step(model, cache, ForwardPlan(rows, taps), ids, [going[r] for r in order])


def _step(
    model: LanguageModel, cache: PagedCache, plan: ForwardPlan, ids: torch.Tensor, requests: list[Continuation]
) -> None:
    output = model(ids, plan, cache)
    captured = torch.cat(list(output.taps), dim=-1).to("cpu", torch.bfloat16)
    for one, token, (_, _, packed) in zip(requests, output.logits.argmax(-1).tolist(), plan.rows, strict=True):
        one.taps.append(captured[packed].clone())
        one.ids.append(token)


def _ended(one: Continuation, stop_ids: frozenset[int], length: int) -> bool:
    if one.ids[-1] in stop_ids or len(one.ids) >= length:
        return True
    return one.written % 8 == 0 and one.written >= 2 * LOOP and loops(one.ids[len(one.prompt.ids) :])


def loops(ids: Sequence[int]) -> bool:
    """Whether a text ends in :data:`REPEATS` copies of its last few tokens (at most :data:`LOOP`)."""
    for period in range(1, LOOP + 1):
        tail = ids[-period * REPEATS :]
        if len(tail) == period * REPEATS and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False
