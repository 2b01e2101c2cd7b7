"""The passes of verify over whole rows, in Triton; each program has one chunk of one row.

Imports triton: only what runs or compiles the kernels imports this file. Numbers are those of ``laws.py``: a law is in
float64, a scaled logit is rounded to fp32. Philox is ``noise.philox``.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["draw", "mixtures", "peaks", "q_totals", "totals"]

NOBODY = tl.constexpr(0x7FFFFFFF)  # an id beyond all others


@triton.jit
def philox(pair, position, last, low, high):
    """Words 0 to 3 for counters (pair, position, 0, last): uint64 that hold 32 bits; all arguments int64."""
    mask = 0xFFFFFFFF
    c0, k0, k1 = pair.to(tl.uint64), low.to(tl.uint64), high.to(tl.uint64)
    c1, c2, c3 = c0 * 0 + position.to(tl.uint64), c0 * 0, c0 * 0 + last.to(tl.uint64)
    for _ in tl.static_range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


@triton.jit
def gumbel(high, low):
    """float64: -log(-log u), u of the upper 52 bits of two words."""
    u = (((high << 20) | (low >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@triton.jit
def best_of(values, ids):
    """The largest value of a chunk and of its ids the lowest; of NaN nothing is said."""
    most = tl.max(values, 0)
    return most, tl.min(tl.where(values == most, ids, NOBODY), 0)


@triton.jit
def processed(x, ids, inside, temperature, peak, floor, last, CUT: tl.constexpr):
    """float64 logits of a row's law, at temperature 0 the logits themselves; -inf where there are none."""
    raw = tl.load(x + ids, mask=inside, other=-float("inf")).to(tl.float64)
    warm = temperature > 0
    s = tl.where(warm, (raw - peak) / tl.where(warm, temperature, 1.0), raw).to(tl.float32)
    if CUT:
        s = tl.where((s > floor) | ((s == floor) & (ids <= last)), s, -float("inf"))
    return tl.where(inside, s, -float("inf")).to(tl.float64)


@triton.jit
def drafted(q, row, ids, inside, draft, total, size):
    """float64 probabilities of a draft's law; of a point mass where it has no row."""
    held = inside & (ids * 0 + row >= 0)
    drawn = tl.load(q + tl.maximum(row, 0) * size + ids, mask=held, other=-float("inf")).to(tl.float64)
    return tl.where(row < 0, (ids == draft).to(tl.float64), tl.exp(drawn - total))


@triton.jit(do_not_specialize=("rows",))
def peaks(logits, first, counts, peak, best, step, size, rows, CHUNK: tl.constexpr):
    """Max and argmax of each chunk [slots, chunks]; NaN counts as inf, since such a row is not used either."""
    chunk, slot, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    request, place = slot // rows, slot % rows
    if place <= tl.load(counts + request):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        at = (tl.load(first + request) + place) * step
        x = tl.load(logits + at + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
        most, own = best_of(tl.where(x != x, float("inf"), x), ids)
        tl.store(peak + slot * chunks + chunk, most)
        tl.store(best + slot * chunks + chunk, own)


@triton.jit(do_not_specialize=("rows",))
def totals(
    logits, first, counts, drafts, positions, keys, temperatures, floor, last, peak, sums, also, drawn, own, step, size,
    rows, CHUNK: tl.constexpr, CUT: tl.constexpr, MATCH: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Of each chunk [slots, chunks]: the sum of exp(s - top), that of the ids that are not the draft or, with ENTROPY,
    of exp(s - top) (s - top); with MATCH the largest of s + noise instead, and its id."""
    chunk, slot, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    request, place = slot // rows, slot % rows
    count = tl.load(counts + request)
    if place <= count:
        row = tl.load(first + request) + place
        temperature, top = tl.load(temperatures + request), tl.load(peak + slot)
        lowest, end = -float("inf"), size
        if CUT:
            lowest, end = tl.load(floor + row), tl.load(last + row)
        base = tl.where(temperature > 0, 0.0, top)
        pair = chunk * (CHUNK // 2) + tl.arange(0, CHUNK // 2).to(tl.int64)
        if MATCH:
            low, high = tl.load(keys + 2 * request), tl.load(keys + 2 * request + 1)
            position = tl.load(positions + request) + place
            a, b, c, d = philox(pair, position, position * 0 + 1, low, high)
            s = processed(logits + row * step, 2 * pair, 2 * pair < size, temperature, top, lowest, end, CUT)
            even, even_id = best_of(s + gumbel(a, b), 2 * pair)
            s = processed(logits + row * step, 2 * pair + 1, 2 * pair + 1 < size, temperature, top, lowest, end, CUT)
            odd, odd_id = best_of(s + gumbel(c, d), 2 * pair + 1)
            ahead = (even > odd) | ((even == odd) & (even_id < odd_id))
            tl.store(drawn + slot * chunks + chunk, tl.where(ahead, even, odd))
            tl.store(own + slot * chunks + chunk, tl.where(ahead, even_id, odd_id))
        else:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            draft = tl.load(drafts + request * (rows - 1) + place, mask=place < count, other=-1)
            s = processed(logits + row * step, ids, ids < size, temperature, top, lowest, end, CUT)
            mass = tl.exp(s - base)
            second = tl.where(ids != draft, mass, 0.0)
            if ENTROPY:
                second = tl.where(mass > 0, mass * (s - base), 0.0)
            tl.store(sums + slot * chunks + chunk, tl.sum(mass, 0))
            tl.store(also + slot * chunks + chunk, tl.sum(second, 0))


@triton.jit
def q_totals(q, tops, sums, size, CHUNK: tl.constexpr):
    """Of each chunk of the drafts' laws [Q, chunks]: its largest logit and the sum of exponentials over that."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    s = tl.load(q + row * size + ids, mask=ids < size, other=-float("inf")).to(tl.float64)
    top = tl.max(tl.where(s == s, s, -float("inf")), 0)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.where(s == -float("inf"), 0.0, tl.exp(s - top)), 0))


@triton.jit(do_not_specialize=("most",))
def mixtures(
    logits, first, counts, drafts, temperatures, peak, total, q, q_rows, q_total, shares, mixed, own, step, size, most,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest of (1 - lambda) p + lambda q of each chunk [R D, chunks], at temperature 0, and its id."""
    chunk, drafted_at, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    request, place = drafted_at // most, drafted_at % most
    slot = request * (most + 1) + place
    if (place < tl.load(counts + request)) & (tl.load(temperatures + request) == 0):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        at = (tl.load(first + request) + place) * step
        x = tl.load(logits + at + ids, mask=ids < size, other=-float("inf")).to(tl.float64)
        share, draft = tl.load(shares + place), tl.load(drafts + drafted_at)
        row = tl.load(q_rows + drafted_at)
        of_draft = drafted(q, row, ids, ids < size, draft, tl.load(q_total + drafted_at), size)
        mass = (1 - share) * tl.exp(x - tl.load(total + slot)) + share * of_draft
        most_mass, most_id = best_of(tl.where(ids < size, mass, -1.0), ids)
        tl.store(mixed + drafted_at * chunks + chunk, most_mass)
        tl.store(own + drafted_at * chunks + chunk, most_id)


@triton.jit
def _tail(
    x, ids, inside, noise, temperature, peak, floor, last, total, times, q, row, draft, q_total, size,
    CUT: tl.constexpr,
):  # fmt: skip
    s = processed(x, ids, inside, temperature, peak, floor, last, CUT)
    of_draft = drafted(q, row, ids, inside, draft, q_total, size)
    mass = tl.exp(s - total) - times * of_draft
    mass = tl.where(inside, tl.where(mass < 0, 0.0, mass), 0.0)  # NaN, of a broken drafter, stays
    plain, plain_id = best_of(s + noise, ids)
    rest, rest_id = best_of(tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)) + noise, -float("inf")), ids)
    return plain, plain_id, rest, rest_id, tl.sum(mass, 0)


@triton.jit(do_not_specialize=("most",))
def draw(
    logits, first, drafts, keys, temperatures, floor, last, peak, accepted, position, residual, needed, times, total, q,
    q_row, q_total, values, ids_of, left, step, size, most, CHUNK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Of each chunk of a request's deciding row [R, chunks, 2]: the largest of log mass + noise of p and of its
    residual, and their ids; ``left`` [R, chunks]: the residual's mass."""
    chunk, request, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if tl.load(needed + request) != 0:
        place, falls = tl.load(accepted + request), tl.load(residual + request)
        row = tl.load(first + request) + place
        temperature, top = tl.load(temperatures + request), tl.load(peak + request * (most + 1) + place)
        lowest, end = -float("inf"), size
        if CUT:
            lowest, end = tl.load(floor + row), tl.load(last + row)
        draft = tl.load(drafts + request * most + place, mask=falls != 0, other=-1)
        of_draft, of_all = tl.load(q_total + request), tl.load(total + request)
        c, q_at = tl.load(times + request), tl.load(q_row + request)
        pair = chunk * (CHUNK // 2) + tl.arange(0, CHUNK // 2).to(tl.int64)
        low, high = tl.load(keys + 2 * request), tl.load(keys + 2 * request + 1)
        w0, w1, w2, w3 = philox(pair, tl.load(position + request), tl.where(falls != 0, 3, 1).to(tl.int64), low, high)
        x = logits + row * step
        ids = 2 * pair
        p_a, p_a_id, r_a, r_a_id, mass_a = _tail(
            x, ids, ids < size, gumbel(w0, w1), temperature, top, lowest, end, of_all, c, q, q_at, draft, of_draft,
            size, CUT,
        )  # fmt: skip
        ids = 2 * pair + 1
        p_b, p_b_id, r_b, r_b_id, mass_b = _tail(
            x, ids, ids < size, gumbel(w2, w3), temperature, top, lowest, end, of_all, c, q, q_at, draft, of_draft,
            size, CUT,
        )  # fmt: skip
        to = request * chunks + chunk
        ahead = (p_a > p_b) | ((p_a == p_b) & (p_a_id < p_b_id))
        tl.store(values + 2 * to, tl.where(ahead, p_a, p_b))
        tl.store(ids_of + 2 * to, tl.where(ahead, p_a_id, p_b_id))
        ahead = (r_a > r_b) | ((r_a == r_b) & (r_a_id < r_b_id))
        tl.store(values + 2 * to + 1, tl.where(ahead, r_a, r_b))
        tl.store(ids_of + 2 * to + 1, tl.where(ahead, r_a_id, r_b_id))
        tl.store(left + to, mass_a + mass_b)
