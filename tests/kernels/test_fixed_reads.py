"""The reads of a method, said on the device for many requests at once, are those that it says for each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foldspec.context import METHODS, make_method
from foldspec.context.base import ContextMethod, DrafterLayer, FixedRead, Read
from foldspec.options import MethodOptions

BLOCK = 5
LAYERS = (
    DrafterLayer(),
    DrafterLayer(window=3, causal=True),
    DrafterLayer(window=9),
    DrafterLayer(window=21, causal=True),
)
LENGTHS = range(64)
CASES: dict[str, dict[str, Any]] = {
    "full": {"context": "full"},
    "window": {"context": "window", "window": 11},
    "window by layer": {"context": "window", "layer_window": (11, 1, 30, 4)},
    "shared window": {"context": "shared_window", "draft_window": 13},
    "fold": {"context": "fold", "window": 11, "alpha": 2.0},
    "fold, alpha huge": {"context": "fold", "window": 1, "alpha": 1e300},
    "fold by layer": {"context": "fold", "layer_window": (11, 1, 30, 4), "layer_alpha": (1.0, 2.0, 4.0, 8.0)},
    "fold, full layers": {"context": "fold", "window": 11, "alpha": 2.0, "coverage": "full"},
    "fold, complement": {"context": "fold", "window": 11, "alpha": 2.0, "far_boundary": "complement"},
    "rerope": {"context": "rerope", "window": 11, "rerope_len": 20},
    "rerope, full layers": {"context": "rerope", "window": 11, "rerope_len": 20, "coverage": "full"},
    "streaming": {"context": "streaming", "sinks": 3, "recents": 14},
    "streaming, all layers": {"context": "streaming", "sinks": 3, "recents": 14, "coverage": "all"},
    "streaming, no sinks": {"context": "streaming", "sinks": 0, "recents": 14},
}


def make(case: str) -> ContextMethod:
    options = MethodOptions(**CASES[case])
    return make_method(replace(options, window=options.window or 8, alpha=options.alpha or 2.0), LAYERS, BLOCK)


def spans(read: Read) -> list[tuple[int, int] | None]:
    """None where a row reads nothing."""
    return [(f, l) if f < l else None for f, l in zip(read.first, read.last, strict=True)]


def of_one(read: FixedRead, i: int) -> Read:
    """What request ``i`` reads."""
    first, last, at = (tuple(x[i].tolist()) for x in (read.first, read.last, read.query_at))
    scale = tuple(read.scale[i].tolist()) if isinstance(read.scale, torch.Tensor) else read.scale
    return Read(first, last, read.keys, at, scale, read.exponent, read.block)


def same(a: Read, b: Read) -> bool:
    scales = [torch.tensor(x.scale, dtype=torch.float64).expand(BLOCK) for x in (a, b)]
    rest = [(x.keys, x.query_at, x.exponent, x.block, spans(x)) for x in (a, b)]
    return rest[0] == rest[1] and torch.allclose(*scales, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_reads_of_every_length_are_the_ones_said_one_by_one(case: str) -> None:
    method, n = make(case), torch.tensor(LENGTHS)
    for layer in range(len(LAYERS)):
        fixed = method.fixed_reads(layer, n, True)
        for i in LENGTHS:
            reads, found = method.reads(layer, None, i, None), [of_one(read, i) for read in fixed]
            assert same(found[0], reads[0]), (layer, i)
            # a row's own entries end where the block begins: its bounds must hold where it reads no entry, too
            assert found[0].last == reads[0].last and found[0].first == reads[0].first, (layer, i)
            if len(reads) == 2:
                assert same(found[1], reads[1]), (layer, i)
            else:
                assert all(not any(spans(read)) for read in found[1:]), (layer, i)


@pytest.mark.parametrize("case", CASES)
def test_while_nothing_is_far_the_near_read_is_all_there_is(case: str) -> None:
    method = make(case)
    near = [i for i in LENGTHS if not method.far(i)]
    for layer in range(len(LAYERS)):
        assert all(len(method.reads(layer, None, i, None)) == 1 for i in near)
        (fixed,) = method.fixed_reads(layer, torch.tensor(near), False)
        for place, i in enumerate(near):
            assert same(of_one(fixed, place), method.reads(layer, None, i, None)[0]), (layer, i)
    if any(len(method.reads(layer, None, i, None)) == 2 for layer in range(len(LAYERS)) for i in LENGTHS):
        assert near == list(range(len(near))) and 0 < len(near) < len(LENGTHS), "once far, always far"


@pytest.mark.parametrize("case", CASES)
def test_places_of_queries_lie_below_what_the_read_says(case: str) -> None:
    method, n = make(case), torch.tensor(LENGTHS)
    for layer in range(len(LAYERS)):
        for read in method.fixed_reads(layer, n, True):
            end = len(LENGTHS) + BLOCK - 1 if read.reach is None else read.reach
            assert int(read.query_at.min()) >= 0 and int(read.query_at.max()) < end


@pytest.mark.parametrize("case", CASES)
def test_layers_of_one_kind_have_the_same_reads(case: str) -> None:
    method = make_method(make(case).options, LAYERS, BLOCK)
    kinds = [method.kind(layer) for layer in range(len(LAYERS))]
    assert len(set(kinds)) == len(LAYERS), "these layers all differ"
    alike = {"layer_window": (), "layer_alpha": ()}
    same_layers = make_method(replace(method.options, **alike), (LAYERS[0], LAYERS[0]), BLOCK)
    assert same_layers.kind(0) == same_layers.kind(1)


def test_each_method_says_its_reads_or_why_it_cannot() -> None:
    here = {CASES[case]["context"] for case in CASES}
    for name in METHODS:
        method = make_method(MethodOptions(context=name, window=8, alpha=2.0), LAYERS, BLOCK)
        assert (method.not_fixed == "") == (name in here), name
