"""Device attention as two Triton kernels: one reads, split over entries, and one merges what the splits found.

Imports triton: only what runs or compiles the kernels imports this file. What changes from call to call is an ordinary
argument, so that one compiled kernel serves any number of rows, heads, splits and requests, and any page size.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge", "split"]


# No variant of a kernel for a number or an address that happens to be 1 or a multiple of 16: what was compiled ahead of
# time is all that there is. So no argument is specialised but the first, a buffer of our own; ALIGN says what is known
# of the others.


@triton.jit(do_not_specialize=range(1, 47))
def split(
    o_part,
    q_a,
    k_a,
    v_a,
    key_table_a,
    value_table_a,
    first_a,
    last_a,
    q_b,
    k_b,
    v_b,
    key_table_b,
    value_table_b,
    first_b,
    last_b,
    lse_part,
    scale_a,
    scale_b,
    splits_a,
    splits,
    place,
    places,
    rows,
    group,
    page_bits_a,
    page_bits_b,
    ring_a,
    ring_b,
    key_pages_a,
    key_pages_b,
    value_pages_a,
    value_pages_b,
    q_request_a,
    q_request_b,
    q_row_a,
    q_row_b,
    q_head_a,
    q_head_b,
    k_slot_a,
    k_slot_b,
    k_head_a,
    k_head_b,
    v_slot_a,
    v_slot_b,
    v_head_a,
    v_head_b,
    kv_heads,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Two reads, ``a`` and ``b``; ``splits_a`` of the ``splits`` are for the first. Grid: (splits, kv heads * tiles of
    rows * PARTS, requests).

    A tile is BLOCK_M of the ``rows`` * ``group`` query rows of a kv head: block row ``i // group``, head ``i % group``
    of it. Its entries, from the smallest ``first`` to the largest ``last`` of its rows, are shared out in whole blocks.
    Of values a program reads the columns of its part. ``scale`` is in base 2.

    ``o_part`` fp32 [requests, kv heads, places, rows * group, VALUE_WIDTH] gets averages and ``lse_part`` fp32
    [requests, kv heads, places, rows * group] log masses in base 2, -inf where a row sees nothing of a split, of which
    averages are then unwritten; this call's splits begin at ``place``.
    """
    s = tl.program_id(0)
    y = tl.program_id(1)
    request = tl.program_id(2)
    head = y % kv_heads
    part = (y // kv_heads) % PARTS
    tile = y // kv_heads // PARTS

    # one set of pointers and numbers for the read at hand, so that there is one loop
    if s < splits_a:
        q_base = q_a
        k_base = k_a
        v_base = v_a
        key_table = key_table_a + request.to(tl.int64) * key_pages_a
        value_table = value_table_a + request.to(tl.int64) * value_pages_a
        first = first_a
        last = last_a
        scale = scale_a
        bits = page_bits_a
        ring = ring_a
        q_request = q_request_a
        q_row = q_row_a
        q_head = q_head_a
        k_slot = k_slot_a
        k_head = k_head_a
        v_slot = v_slot_a
        v_head = v_head_a
        index = s
        count = splits_a
    else:
        q_base = q_b
        k_base = k_b
        v_base = v_b
        key_table = key_table_b + request.to(tl.int64) * key_pages_b
        value_table = value_table_b + request.to(tl.int64) * value_pages_b
        first = first_b
        last = last_b
        scale = scale_b
        bits = page_bits_b
        ring = ring_b
        q_request = q_request_b
        q_row = q_row_b
        q_head = q_head_b
        k_slot = k_slot_b
        k_head = k_head_b
        v_slot = v_slot_b
        v_head = v_head_b
        index = s - splits_a
        count = splits - splits_a
    # strides come in units of ALIGN elements, and bases stay at multiples of ALIGN bytes: the choice between two reads
    # makes the compiler forget whatever else it may know
    q_base = tl.multiple_of(q_base + request.to(tl.int64) * q_request * ALIGN, ALIGN)
    k_base = tl.multiple_of(k_base + head.to(tl.int64) * k_head * ALIGN, ALIGN)
    v_base = tl.multiple_of(v_base + head.to(tl.int64) * v_head * ALIGN, ALIGN)

    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i // group
    there = row < rows
    row_first = tl.load(first + request.to(tl.int64) * rows + row, mask=there, other=0)
    row_last = tl.load(last + request.to(tl.int64) * rows + row, mask=there, other=0)
    some = row_first < row_last
    low = tl.min(tl.where(some, row_first, 2147483647), 0)
    high = tl.max(tl.where(some, row_last, 0), 0)
    each = ((tl.maximum(high - low, 0) + count - 1) // count + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    begin = low + index * each
    end = tl.minimum(begin + each, high)

    lse_at = (((request * kv_heads + head) * places + place + s).to(tl.int64) * rows * group) + i
    if begin >= end:
        if part == 0:
            tl.store(lse_part + lse_at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=there)
        return

    d = tl.arange(0, BLOCK_D)
    c = part * BLOCK_V + tl.arange(0, BLOCK_V)
    q_at = (row.to(tl.int64) * q_row + (head * group + i % group).to(tl.int64) * q_head) * ALIGN
    q = tl.load(q_base + q_at[:, None] + d[None, :], mask=there[:, None] & (d < WIDTH)[None, :], other=0.0)
    k_step = k_slot * ALIGN
    v_step = v_slot * ALIGN
    # a ring is one page of any length that starts again at its beginning
    page_mask = (1 << bits) - 1
    page = 1 << bits
    key_bits = tl.where(ring > 0, 31, bits)
    key_mask = tl.where(ring > 0, 2147483647, page_mask)
    key_page = tl.where(ring > 0, 1, page)
    wrap = tl.where(ring > 0, ring, 2147483647)
    origin = begin // wrap * wrap

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(begin, end, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        entry = tl.minimum(j, end - 1)  # nothing behind the last one is loaded: it may be anything
        key_entry = (entry - origin) & key_mask
        key_entry = tl.where(key_entry >= wrap, key_entry - wrap, key_entry)
        key_slot = tl.load(key_table + (entry >> key_bits)) * key_page + key_entry
        k_at = k_base + (key_slot.to(tl.int64) * k_step)[:, None] + d[None, :]
        if WIDTH == BLOCK_D:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(d < WIDTH)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        seen = (j[None, :] >= row_first[:, None]) & (j[None, :] < row_last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)  # of a row that has seen nothing yet
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(p, 1)
        top = above
        value_slot = tl.load(value_table + (entry >> bits)) * page + (entry & page_mask)
        v_at = v_base + (value_slot.to(tl.int64) * v_step)[:, None] + c[None, :]
        if VALUE_WIDTH == BLOCK_V * PARTS:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(c < VALUE_WIDTH)[None, :], other=0.0)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="tf32x3")

    # by count: what a row without entries has as its mass is no one's promise
    full = tl.maximum(row_first, begin) < tl.minimum(row_last, end)
    mass = tl.where(full, mass, 1.0)
    if part == 0:
        tl.store(lse_part + lse_at, tl.where(full, top + tl.log2(mass), float("-inf")), mask=there)
    tl.store(
        o_part + (lse_at * VALUE_WIDTH)[:, None] + c[None, :],
        o / mass[:, None],
        mask=there[:, None] & (c < VALUE_WIDTH)[None, :],
    )


@triton.jit
def _read(lse, at, begin, end, exponent):
    """Of one read, its log mass and what it weighs, in base 2: [rows]. Both are -inf where it is empty."""
    own = tl.where((at >= begin) & (at < end), lse, float("-inf"))
    top = tl.max(own, 1)
    empty = top == float("-inf")
    mass = tl.sum(tl.exp2(own - tl.where(empty, 0.0, top)[:, None]), 1)
    mass = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, mass)))
    return mass, tl.where(empty, float("-inf"), exponent * mass)


@triton.jit(do_not_specialize=range(1, 17))
def merge(
    o_part,
    lse_part,
    out,
    lse,
    end_0,
    end_1,
    end_2,
    exponent_0,
    exponent_1,
    exponent_2,
    places,
    rows,
    group,
    out_request,
    out_row,
    out_head,
    kv_heads,
    READS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What ``split`` found, merged over splits by mass and over READS reads by mass ** exponent. Read ``i`` has the
    places from ``end_(i-1)`` to ``end_i``. Grid: (tiles of ROWS of the rows * group rows, kv heads * PARTS, requests).

    ``out`` [requests, rows, kv heads * group, VALUE_WIDTH]; ``lse`` fp32 [READS, requests, rows, kv heads * group],
    natural. CHUNK places are read at a time, of at most MOST.
    """
    y = tl.program_id(1)
    request = tl.program_id(2)
    requests = tl.num_programs(2)
    head = y % kv_heads
    part = y // kv_heads
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = i < rows * group
    row = i // group
    query = head * group + i % group
    first = (request * kv_heads + head).to(tl.int64) * places * rows * group + i

    place = tl.arange(0, MOST)[None, :]
    found = tl.load(
        lse_part + first[:, None] + place * (rows * group),
        mask=there[:, None] & (place < places),
        other=float("-inf"),
    )
    mass_0, z_0 = _read(found, place, 0, end_0, exponent_0)
    mass_1, z_1, mass_2, z_2 = mass_0, z_0, mass_0, z_0
    top = z_0
    if READS > 1:
        mass_1, z_1 = _read(found, place, end_0, end_1, exponent_1)
        top = tl.maximum(top, z_1)
    if READS > 2:
        mass_2, z_2 = _read(found, place, end_1, end_2, exponent_2)
        top = tl.maximum(top, z_2)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(z_0 - top)
    if READS > 1:
        total += tl.exp2(z_1 - top)
    if READS > 2:
        total += tl.exp2(z_2 - top)
    total = tl.where(total > 0.0, total, 1.0)

    if part == 0:
        lse_to = lse + (request.to(tl.int64) * rows + row) * (kv_heads * group) + query
        each = requests.to(tl.int64) * rows * kv_heads * group
        tl.store(lse_to, mass_0 * 0.6931471805599453, mask=there)
        if READS > 1:
            tl.store(lse_to + each, mass_1 * 0.6931471805599453, mask=there)
        if READS > 2:
            tl.store(lse_to + 2 * each, mass_2 * 0.6931471805599453, mask=there)

    c = part * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = c < VALUE_WIDTH
    o = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for begin in range(0, places, CHUNK):
        at = begin + tl.arange(0, CHUNK)[None, :]
        own = tl.load(
            lse_part + first[:, None] + at * (rows * group),
            mask=there[:, None] & (at < places),
            other=float("-inf"),
        )
        # a split's share of its read, times the read's of all
        mass = mass_0[:, None]
        z = z_0[:, None]
        if READS > 1:
            mass = tl.where(at < end_0, mass, mass_1[:, None])
            z = tl.where(at < end_0, z, z_1[:, None])
        if READS > 2:
            mass = tl.where(at < end_1, mass, mass_2[:, None])
            z = tl.where(at < end_1, z, z_2[:, None])
        some = own > float("-inf")
        share = tl.exp2(tl.where(some, own, 0.0) - tl.where(some, mass, 0.0))
        weight = share * tl.exp2(z - top[:, None]) / total[:, None]
        averages = tl.load(
            o_part + ((first[:, None] + at * (rows * group)) * VALUE_WIDTH)[:, :, None] + c[None, None, :],
            mask=some[:, :, None] & inside[None, None, :],
            other=0.0,
        )
        o += tl.sum(averages * weight[:, :, None], 1)
    to = request.to(tl.int64) * out_request + row.to(tl.int64) * out_row + query.to(tl.int64) * out_head
    tl.store(
        out + to[:, None] + c[None, :],
        o.to(out.dtype.element_ty),
        mask=there[:, None] & inside[None, :],
    )
