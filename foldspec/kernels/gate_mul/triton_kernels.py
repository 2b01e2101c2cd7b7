"""The kernel of gate_mul. Imported inside functions alone."""

import triton
import triton.language as tl


@triton.jit
def gate_mul(gate, up, y, gate_step, up_step, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of one row a program; grid (rows, blocks of a row). Both gates are x times a sigmoid:
    ``(1 + tanh(u)) / 2 = sigmoid(2 u)``."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = place < width
    x = tl.load(gate + row * gate_step + place, mask=seen, other=0.0)
    wide = x.to(tl.float32)
    if GELU:
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # 2 sqrt(2 / pi)
    else:
        slope = wide
    opened = (wide / (1.0 + tl.exp(-slope))).to(x.dtype).to(tl.float32)
    other = tl.load(up + row * up_step + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(y + row * width + place, (opened * other).to(y.dtype.element_ty), mask=seen)
