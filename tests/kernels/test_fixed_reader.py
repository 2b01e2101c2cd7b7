"""A drafter's layers read their context, and keep what is committed, alike whether the host knows where rows lie or the
device alone: layers narrower than a block, rotations with a temperature, caches that hold NaN where nothing is."""

from __future__ import annotations

from typing import Any

import brute
import pytest
import torch
from reading import Reading, draw

from foldspec.cache.rows import FixedRows, Places
from foldspec.context.base import DrafterLayer
from foldspec.models.rope import Rope

BLOCK, WIDTH, LONGEST = 5, 8, 128
LAYERS = (DrafterLayer(), DrafterLayer(window=3, causal=True), DrafterLayer(window=3), DrafterLayer(window=30))
LENGTHS = (1, 12, 33)  # of three requests at once; a page is 16, a window 11
CASES: dict[str, dict[str, Any]] = {
    "full": {"context": "full"},
    "window": {"context": "window", "window": 11},
    "fold": {"context": "fold", "window": 11, "alpha": 2.0},
    "rerope": {"context": "rerope", "window": 11, "rerope_len": 20},
    "streaming": {"context": "streaming", "sinks": 3, "recents": 14},
}


def reading(case: str) -> Reading:
    rope = Rope(torch.from_numpy(brute.frequencies(WIDTH)).to(torch.float64), theta=10000.0).stretched(4.0, 64)
    rope = Rope(rope._inverse.double(), rope.factor, theta=10000.0)
    return Reading("reference", block=BLOCK, heads=1, width=WIDTH, rope=rope, layers=LAYERS, **CASES[case])


def rows(here: Reading, count: int, far: bool) -> FixedRows:
    """Rows behind what each request holds, with slots reserved."""
    tables, rings = [], []
    for request in range(len(LENGTHS)):
        here.reader.reserve(request, here.reader.length(request) + count)
        pages, own = here.reader.places(request)
        tables.append([*pages, *(0,) * 8][:8])
        rings.append(own)
    bases = {size: torch.tensor([[own[size]] for own in rings], dtype=torch.int32) for size in rings[0]}
    places = Places(torch.tensor(tables, dtype=torch.int32), 16, bases)
    first = torch.tensor([here.reader.length(request) for request in range(len(LENGTHS))])
    return FixedRows(first, torch.arange(count), places, LONGEST, far)


def whole(here: Reading, given: list[torch.Tensor], request: int, layer: int = 0) -> torch.Tensor:
    """Context and block of one request, in the ordinary way."""
    q, k, v = given
    n = len(k) - BLOCK
    here.absorb(k[:n], v[:n], request)
    return here.attend(q, k[n:], v[n:], layer, request)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("case", CASES)
def test_a_block_reads_the_same(case: str, layer: int) -> None:
    here, given = reading(case), [draw(n, BLOCK, width=WIDTH, seed=n) for n in LENGTHS]
    expected = [whole(here, x, i, layer) for i, x in enumerate(given)]
    q, k, v = (
        torch.cat(x)
        for x in zip(*((q, k[n:], v[n:]) for (q, k, v), n in zip(given, LENGTHS, strict=True)), strict=True)
    )
    far = any(here.method.far(n) for n in LENGTHS)
    found = here.reader.attend(layer, rows(here, BLOCK, far), q, k, v)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kept", [1, 3, BLOCK])
@pytest.mark.parametrize("case", CASES)
def test_what_was_absorbed_and_kept_is_what_is_read(case: str, kept: int) -> None:
    """Rows that are written and do not count leave no trace: the last of them are NaN."""
    here, other = reading(case), reading(case)
    given = [draw(n + kept, BLOCK, width=WIDTH, seed=n) for n in LENGTHS]
    expected = [whole(other, x, i) for i, x in enumerate(given)]
    more = BLOCK - kept
    for i, ((_, k, v), n) in enumerate(zip(given, LENGTHS, strict=True)):
        here.absorb(k[:n], v[:n], request=i)
    nothing = torch.full((more, 1, WIDTH), torch.nan, dtype=torch.float64)
    k, v = (
        torch.cat([torch.cat((x[i][n : n + kept], nothing)) for x, n in zip(given, LENGTHS, strict=True)])
        for i in (1, 2)
    )
    here.reader.absorb(rows(here, BLOCK, False), [k] * len(LAYERS), [v] * len(LAYERS))
    for i, n in enumerate(LENGTHS):
        here.reader.keep(i, n + kept)
        assert here.reader.length(i) == n + kept
    found = [
        here.attend(q, k[n + kept :], v[n + kept :], request=i)
        for i, ((q, k, v), n) in enumerate(zip(given, LENGTHS, strict=True))
    ]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=0)


def test_nobody_reads_places_on_the_host() -> None:
    here = reading("full")
    for request, n in enumerate(LENGTHS):
        _, k, v = draw(n, BLOCK, width=WIDTH)
        here.absorb(k[:n], v[:n], request=request)
    found = rows(here, BLOCK, False)
    assert found.total == BLOCK * len(LENGTHS) and found.end == LONGEST
    with pytest.raises(AssertionError, match="on the device alone"):
        list(found)
    with pytest.raises(AssertionError, match="on the device alone"):
        _ = found.starts
