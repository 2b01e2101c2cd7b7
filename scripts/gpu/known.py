"""Nothing is compiled on a GPU that the ahead-of-time gate has not compiled before: a kernel that nobody has looked at
may take a minute to compile, spill, or not start at all.

Triton asks a hook before it compiles anything. This one compares what it is about to compile with every configuration
of the gate (``tests/ahead_of_time.py``), for the architecture that is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ahead_of_time

__all__ = ["Unknown", "gate", "unwatched"]

Shape = tuple[Any, ...]


class Unknown(AssertionError):
    """A kernel was asked for in a form that the gate does not know."""


def known(sm: int) -> dict[Shape, str]:
    """What the gate compiles -> its name."""
    from triton.backends.compiler import GPUTarget

    target, found = GPUTarget("cuda", sm, 32), {}
    for name, configuration in ahead_of_time.configurations(sm).items():
        source, options = ahead_of_time.source(configuration, target)
        how = {"num_warps": options["num_warps"], "num_stages": options["num_stages"]}
        found[_shape(source.fn, source.signature, source.constants, source.attrs, how)] = name
    return found


def _shape(function: Any, signature: Any, constants: Any, attributes: Any, how: dict[str, Any]) -> Shape:
    def written(x: Any) -> str:
        return repr(getattr(x, "value", x))

    def name(path: tuple[int, ...]) -> str:
        return ".".join([function.arg_names[path[0]], *map(str, path[1:])])

    return (
        f"{function.fn.__module__}.{function.fn.__qualname__}",
        tuple(signature.items()),
        tuple(sorted((name(path), written(value)) for path, value in constants.items())),
        tuple(sorted((name(path), str(value)) for path, value in attributes.items() if value)),
        tuple(sorted(how.items())),
    )


@contextlib.contextmanager
def gate(sm: int, compiling: bool = True) -> Iterator[dict[str, int]]:
    """Within this, :class:`Unknown` is raised in the place of compiling what is not known. Gives how often each known
    configuration was compiled; without ``compiling`` none is, and launches do nothing."""
    import triton

    shapes, met = known(sm), dict[str, int]()

    def hook(*, fn: Any, compile: dict[str, Any], **more: Any) -> bool:
        how = {"num_warps": compile["num_warps"], "num_stages": compile["num_stages"]}
        shape = _shape(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], how)
        if shape not in shapes:
            raise Unknown(f"{fn.name}: {_difference(shape, list(shapes))}")
        met[shapes[shape]] = met.get(shapes[shape], 0) + 1
        return not compiling

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield met
    finally:
        triton.knobs.runtime.jit_cache_hook = before


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within this, anything is compiled: for checks of numbers alone that go through more variants of a kernel, none of
    them larger, than rounds ask for."""
    import triton

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, None
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def _difference(shape: Shape, shapes: list[Shape]) -> str:
    """Where it differs from the most similar one."""
    same = [other for other in shapes if other[0] == shape[0]]
    if not same:
        return "the gate has no configuration of it"

    def parts(of: Shape) -> set[Any]:
        return {(i, part) for i, group in enumerate(of[1:]) for part in group}

    nearest = min(same, key=lambda other: len(parts(other) ^ parts(shape)))
    here = sorted(str(part[1]) for part in parts(shape) - parts(nearest))
    there = sorted(str(part[1]) for part in parts(nearest) - parts(shape))
    return f"not in the gate: {', '.join(here) or 'nothing'} in the place of {', '.join(there) or 'nothing'}"
