"""Which operations give a row the same bits alone and among others, on this machine.

Verification decides like plain decoding, by construction, only over operations that do. torch promises it for none;
this prints what it does here, beside the compiled kernels: for each operation the numbers of rows at which some row
differs from the same row computed alone.

    python scripts/check_row_bits.py [--threads N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from foldspec.engine import cache_folder
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.linear import Facts
from foldspec.kernels.multi_read_attention import Entries, ReadArgs

ROWS = (2, 3, 5, 8, 16, 33)


def differing(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[int]:
    alone = torch.cat([run(x[i : i + 1].clone()) for i in range(len(x))])
    return [rows for rows in ROWS if not torch.equal(run(x[:rows].clone()), alone[:rows])]


def attention(kernels: Kernels, heads: int, kv_heads: int, width: int, length: int) -> Callable[..., torch.Tensor]:
    """Every row sees all ``length`` entries, so that nothing but the number of rows changes."""
    keys, values = (Entries(torch.randn(length, kv_heads, width), ((0, length),)) for _ in range(2))

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        q = x.view(rows, heads, width)
        (output,) = kernels.multi_read_attention(
            [[ReadArgs(q, keys, values, (0,) * rows, (length,) * rows, width**-0.5)]]
        )
        return output.out.flatten(1)

    return run


def cases(kernels: Kernels) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor], int]]:
    """(what it is, rows [n, width] -> rows, width)."""
    for out, width in ((1536, 576), (576, 1536), (48, 32)):
        weight = torch.randn(out, width)
        packed = kernels.compiles("linear", Facts("cpu", torch.float32, torch.float32, packed=True))
        if packed:
            kernels.pack(weight.clone(), weight)
        yield f"linear {width} -> {out}", partial(kernels.linear, weight=weight, packed=packed), width
    for width in (576, 577, 1531, 1536):
        yield f"silu_mul {width}", lambda x: kernels.silu_mul(x, x), width
        yield f"rms_norm {width}", partial(kernels.rms_norm, weight=torch.ones(width), eps=1e-5), width
    for heads, kv_heads, width in ((9, 3, 64), (32, 8, 128)):
        for length in (100, 1500):
            run = attention(kernels, heads, kv_heads, width, length)
            yield f"attention {heads}/{kv_heads} x {width}, {length} entries", run, heads * width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    library = Library(cache_folder() / "kernels")
    if library.reason:
        print(f"compiled kernels: {library.reason}")
    for name, kernels in (("torch", Kernels()), ("compiled", Kernels("auto", library))):
        for what, run, width in cases(kernels):
            found = differing(run, 3 * torch.randn(max(ROWS), width))
            print(f"{name:8}  {what:36}  {'differs at ' + str(found) if found else 'same bits'}")


if __name__ == "__main__":
    main()
