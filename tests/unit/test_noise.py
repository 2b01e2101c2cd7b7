"""The noise: Philox against the published known answers, and what each part of a key does."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from foldspec.laws import Law, law_of
from foldspec.noise import Noise, Purpose, gumbel, philox

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, words
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def philox_numpy(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Written once more, from the paper, in unsigned numbers: counters [n, 4] -> words [n, 4]."""
    c = counter.astype(np.uint64).T.copy()
    k = np.array(key, np.uint64)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = np.stack([(second >> shift) ^ c[1] ^ k[0], second & mask, (first >> shift) ^ c[3] ^ k[1], first & mask])
        k = (k + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & mask
    return c.T


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_the_known_answers(counter: str, key: str, wanted: str) -> None:
    low, high = words(key)
    assert philox(words(counter), (low, high)) == words(wanted)
    columns = [torch.tensor([word]) for word in words(counter)]
    assert tuple(int(word) for word in philox(columns, (low, high))) == words(wanted)
    assert tuple(philox_numpy(np.array([words(counter)]), (low, high))[0].tolist()) == words(wanted)


def test_tensors_ints_and_unsigned_numbers_agree() -> None:
    random = np.random.default_rng(3)
    counters = random.integers(0, 1 << 32, (500, 4))
    key = (0x9E3779B9, 0xFFFFFFF0)
    wanted = philox_numpy(counters, key)
    found = torch.stack(philox(torch.tensor(counters).unbind(1), key), dim=1)
    assert np.array_equal(found.numpy(), wanted.astype(np.int64))
    assert [philox(row, key) for row in counters[:20].tolist()] == [tuple(row) for row in wanted[:20].tolist()]


def gumbel_by_hand(seed: int, ids: int, position: int, anchor: int, step: int, purpose: int) -> np.ndarray:
    """As the module's docstring lays the counter out."""
    pairs = np.arange((ids + 1) // 2)
    counter = np.stack(np.broadcast_arrays(pairs, position, anchor, 256 * step + purpose), axis=1)
    out = philox_numpy(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1, 2)[:ids]
    bits = (out[:, 0] << np.uint64(20)) | (out[:, 1] >> np.uint64(12))
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2.0**52))


def test_a_draw_is_the_largest_of_logit_and_gumbel_noise() -> None:
    logits = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    seed = 0xDEADBEEF12345678
    noise = Noise(seed)
    for position, anchor, step in ((0, 0, 0), (7, 3, 2), (2**32 - 1, 2**20, 255)):
        added = gumbel_by_hand(seed, 1001, position, anchor, step, Purpose.DRAFT)
        wanted = int((logits.double().numpy() + added).argmax())
        assert noise.draw(Law(logits), Purpose.DRAFT, position, anchor=anchor, step=step) == wanted
        some = torch.tensor(sorted({4, 5, 77, 78, 79, 500, 1000, wanted}))  # an id has its noise in any company
        assert noise.draw(Law(logits[some], some), Purpose.DRAFT, position, anchor=anchor, step=step) == wanted


def test_golden_numbers() -> None:
    """What seeded output rests on: a change here changes every sampled text."""
    noise = Noise(12345)
    assert [noise.uniform(Purpose.ACCEPT, i) for i in (0, 1, 999)] == UNIFORMS
    assert [noise.draw(Law(torch.zeros(50_000)), Purpose.TARGET, i) for i in range(5)] == DRAWS


UNIFORMS = [0.42271487603825453, 0.6459076213930683, 0.033858912515568385]
DRAWS = [13785, 23902, 27817, 26486, 24757]


def test_every_part_of_the_key_counts() -> None:
    """Numbers whose keys differ in one part are other numbers, and as good as independent."""
    law = Law(torch.zeros(1 << 17))

    def both(
        seed: int = 1, purpose: Purpose = Purpose.DRAFT, position: int = 5, anchor: int = 4, step: int = 0
    ) -> tuple[float, int]:
        noise = Noise(seed)
        return (
            noise.uniform(purpose, position, anchor=anchor, step=step),
            noise.draw(law, purpose, position, anchor=anchor, step=step),
        )

    changes = [{}, {"seed": 2}, {"seed": 1 + (1 << 32)}, {"position": 6}, {"anchor": 3}, {"step": 1}]
    changes += [{"purpose": purpose} for purpose in Purpose if purpose is not Purpose.DRAFT]
    seen = [both(**change) for change in changes]  # type: ignore[arg-type]
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in combinations(seen, 2))
    assert both() == seen[0]


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    noise = Noise(7)
    found = np.array(
        [[noise.uniform(purpose, i) for i in range(20_000)] for purpose in (Purpose.ACCEPT, Purpose.TARGET)]
    )
    assert found.min() >= 0 and found.max() < 1
    for row in found:
        assert stats.kstest(row, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(found)[0, 1]) < 0.03


def test_the_largest_words_do_not_round_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 of these bits would be 1, whose logarithm takes the noise to infinity."""
    ones = (1 << 32) - 1
    monkeypatch.setattr("foldspec.noise.philox", lambda counter, key: (*[counter[0] * 0 + ones] * 4,))
    assert 0.9999 < Noise(0).uniform(Purpose.ACCEPT, 0) < 1
    assert bool(gumbel((0, 0), 9, *torch.zeros(2, 1, dtype=torch.int64)).isfinite().all())
    monkeypatch.setattr("foldspec.noise.philox", lambda counter, key: (*[counter[0] * 0] * 4,))
    assert Noise(0).uniform(Purpose.ACCEPT, 0) == 0
    assert bool(gumbel((0, 0), 9, *torch.zeros(2, 1, dtype=torch.int64)).isfinite().all())


def test_a_point_mass_needs_no_noise() -> None:
    assert Noise(0).draw(Law.point(9), Purpose.TARGET, 3) == 9


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)


def test_draws_follow_their_law_and_a_shared_key_makes_two_laws_agree() -> None:
    """Chi-square of either; together at least (1 - TV) / (1 + TV), where independent draws would agree by sum p q."""
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(6, generator=random)
    first, second = law_of(logits, 1.0), law_of(logits + 0.5 * torch.randn(6, generator=random), 1.2, top_k=5)
    n = 2500
    noise = Noise(99)
    draws = np.array([[noise.draw(law, Purpose.TARGET, i) for law in (first, second)] for i in range(n)])
    p, q = ([law.prob(token) for token in range(6)] for law in (first, second))
    for law, column in ((p, draws[:, 0]), (q, draws[:, 1])):
        counts, expected = np.bincount(column, minlength=6), n * np.array(law)
        assert counts[expected == 0].sum() == 0
        assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3
    distance = total_variation(np.array(p), np.array(q))
    least = (1 - distance) / (1 + distance)
    agreed = float((draws[:, 0] == draws[:, 1]).mean())
    assert agreed > least - 3 * math.sqrt(least * (1 - least) / n)
    assert least > float(np.dot(p, q)) + 0.1  # the bound says more than chance
