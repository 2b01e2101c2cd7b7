"""The kernel of rotate_append. Imported inside functions alone."""

import triton
import triton.language as tl


@triton.jit
def move_rows(
    rows,
    into,
    slots,
    cos,
    sin,
    steps,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row of one move a program; grid (rows, heads of all moves). Every number is at its own place in
    the block and meets the other of its pair there: what does not turn has angle 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    for i in tl.static_range(len(HEADS)):
        if (head >= 0) & (head < HEADS[i]):
            row_step, head_step, slot_step, place_step, cos_step, sin_step = steps[i]
            seen = place < WIDTHS[i]
            source = rows[i] + row * row_step + head.to(tl.int64) * head_step
            x = tl.load(source + place, mask=seen)
            if HALVES[i] > 0:
                low = place < HALVES[i]
                turns = place < 2 * HALVES[i]
                pair = tl.where(low, place, place - HALVES[i])
                other = tl.where(low, place + HALVES[i], place - HALVES[i])
                y = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
                c = tl.load(cos[i] + row * cos_step + pair, mask=turns, other=1.0).to(tl.float32)
                s = tl.load(sin[i] + row * sin_step + pair, mask=turns, other=0.0).to(tl.float32)
                x = x.to(tl.float32) * c + y * tl.where(low, -s, s)
            slot = row
            if slots[i] is not None:
                slot = tl.load(slots[i] + row).to(tl.int64)
            target = into[i] + slot * slot_step + head.to(tl.int64) * place_step
            tl.store(target + place, x.to(into[i].dtype.element_ty), mask=seen)
        head -= HEADS[i]
