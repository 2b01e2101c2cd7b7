"""Triton's interpreter, which runs kernels on a CPU: whether this process is for it, and a repair of its bf16.

A kernel is interpreted or not from its definition on, so such tests have processes of their own, which
``kernels/test_triton.py`` starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# whose interpreters multiply the bits of bf16 numbers as integers, and round to bf16 by cutting off
VERSIONS = ("3.6.", "3.9.")


def repair() -> None:
    """From now on the interpreter widens bf16 before a product and rounds to nearest; any other arithmetic on bf16 is
    an error, as it would be wrong. That of 3.6 counts loops with a newer numpy, too."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    assert triton.__version__.startswith(VERSIONS), f"look at the interpreter of {triton.__version__} again"
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def is_half(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def wide(x: Any) -> Any:
        if not is_half(x):
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def half(x: Any) -> Any:
        numbers = torch.from_numpy(np.ascontiguousarray(x.data, dtype=np.float32))
        return handle(numbers.bfloat16().view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if is_half(x) == (to.scalar == tl.bfloat16):
            return cast(self, x, to)
        return half(x) if to.scalar == tl.bfloat16 else cast(self, wide(x), to)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        assert not is_half(a) and not is_half(b), "the interpreter computes with bits of bf16: widen it first"
        return binary(self, a, b, op)

    if triton.__version__.startswith("3.6."):
        patch = interpreter._patch_lang_tensor

        def patch_lang_tensor(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

        interpreter._patch_lang_tensor = patch_lang_tensor

    # what lies on a CPU is used where it is, and is not copied onto itself after a launch: it may be addresses alone
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None
    builder.cast_impl, builder.create_dot, builder.binary_op = cast_impl, create_dot, binary_op
