"""The kernel of RMSNorm. Imported inside functions alone."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("inner",))  # one kernel for any number of heads
def rms_norm(x, weight, y, eps, inner, outer_step, inner_step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: row ``r`` of x lies at ``r // inner`` outer and ``r % inner`` inner steps."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    seen = place < WIDTH
    source = x + row // inner * outer_step + row % inner * inner_step
    wide = tl.load(source + place, mask=seen, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    w = tl.load(weight + place, mask=seen, other=0.0)
    scaled = normed.to(w.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(y + row * WIDTH + place, scaled.to(y.dtype.element_ty), mask=seen)
