"""verify in Triton, interpreted: see ``kernels/test_verify.py``."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from verifying import EACH, differences, some_pass

from foldspec.kernels.verify import triton as verify_in_triton
from foldspec.kernels.verify.triton_kernels import philox as philox_in_triton
from foldspec.noise import philox


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 30), marks=pytest.mark.slow)])
def test_it_decides_as_the_rules_do(seeds: range) -> None:
    assert differences(verify_in_triton.verify, [some_pass(seed) for seed in seeds], list(EACH.values())) == []


@pytest.mark.parametrize("vocabulary", [4097, pytest.param(262_144, marks=pytest.mark.slow)])
def test_more_than_one_chunk(vocabulary: int) -> None:
    rules = [EACH["exact"], EACH["match"], EACH["cactus leniency=0.5"]]
    assert differences(verify_in_triton.verify, [some_pass(3, vocabulary)], rules) == []


@triton.jit
def words(counters, found, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    c0 = tl.load(counters + i, mask=inside, other=0)
    c1 = tl.load(counters + count + i, mask=inside, other=0)
    c3 = tl.load(counters + 2 * count + i, mask=inside, other=0)
    low = tl.load(counters + 3 * count + i, mask=inside, other=0)
    high = tl.load(counters + 4 * count + i, mask=inside, other=0)
    w0, w1, w2, w3 = philox_in_triton(c0, c1, c3, low, high)
    tl.store(found + i, w0.to(tl.int64), mask=inside)
    tl.store(found + count + i, w1.to(tl.int64), mask=inside)
    tl.store(found + 2 * count + i, w2.to(tl.int64), mask=inside)
    tl.store(found + 3 * count + i, w3.to(tl.int64), mask=inside)


def test_the_bits_of_a_million_keys() -> None:
    count = 1_000_000
    counters = torch.randint(0, 1 << 32, (5, count), generator=torch.Generator().manual_seed(5))
    counters[:, 0], counters[:, 1] = 0, (1 << 32) - 1
    found = torch.empty(4, count, dtype=torch.int64)
    words[(4,)](counters, found, count, BLOCK=262_144)
    c0, c1, c3, low, high = counters
    assert torch.equal(found, torch.stack(philox((c0, c1, 0, c3), (low, high))))
