"""Mistakes in the attention kernels, or in what their caller gives them: each must show, in a case that passes without
them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import folded
import pytest
import torch
from folded import Case

from foldspec.kernels import multi_read_attention as room
from foldspec.kernels.multi_read_attention import triton, triton_kernels

SOURCE = Path(triton_kernels.__file__).read_text(encoding="utf-8")
# the ring of the second request has turned twice, and its first row is empty in the last of four far splits
PLAIN = Case((25, 70), 7, 3, 16, window=16)
TWO_HEADS = replace(PLAIN, kv=2)
WIDE = Case((20,), 7, 1, 512, window=8)


@dataclass(frozen=True)
class Mutant:
    what: str
    old: str
    new: str
    case: Case = PLAIN
    splits: tuple[int, int] = (1, 4)


MUTANTS = [
    Mutant("a row's first entry is left out", "j[None, :] >= row_first", "j[None, :] > row_first"),
    Mutant("a row sees one entry too many", "j[None, :] < row_last", "j[None, :] <= row_last"),
    Mutant("what lies behind the last entry is loaded", "tl.minimum(j, end - 1)", "tl.minimum(j, end)"),
    Mutant("the far read has the near one's scale", "scale = scale_b", "scale = scale_a"),
    Mutant("an empty split has a mass", 'tl.full([BLOCK_M], float("-inf"), tl.float32), mask', "0.0 * row, mask"),
    Mutant("far splits count near ones", "count = splits - splits_a", "count = splits", PLAIN, (1, 3)),
    Mutant("far splits begin late", "index = s - splits_a", "index = s"),
    Mutant("a split ends where its last block does", "end = tl.minimum(begin + each, high)", "end = begin + each"),
    Mutant("the sum is not scaled to a new peak", "mass * shrink +", "mass +"),
    Mutant("the output is not scaled to a new peak", "o * shrink[:, None],", "o,"),
    Mutant("a ring does not wrap", "key_entry - wrap, key_entry)", "key_entry, key_entry)"),
    Mutant("a ring's turns are not taken off", "origin = begin // wrap * wrap", "origin = 0"),
    Mutant("another request's keys", "key_table_b + request.to(tl.int64) * key_pages_b", "key_table_b"),
    Mutant("another request's values", "value_table_a + request.to(tl.int64) * value_pages_a", "value_table_a"),
    Mutant("entries of a page in the wrong order", "(entry & page_mask)\n", "(page - 1 - (entry & page_mask))\n"),
    Mutant("another kv head's keys", "k_base + head.to(tl.int64) * k_head", "k_base + 0 * k_head", TWO_HEADS),
    Mutant("another kv head's values", "v_base + head.to(tl.int64) * v_head", "v_base + 0 * v_head", TWO_HEADS),
    Mutant("another query head", "i % group).to(tl.int64) * q_head", "i // rows).to(tl.int64) * q_head"),
    Mutant(
        "both programs read one half of the values",
        "c = part * BLOCK_V + tl.arange(0, BLOCK_V)\n    q_at",
        "c = tl.arange(0, BLOCK_V)\n    q_at",
        WIDE,
    ),
    Mutant("alpha is left out of the merge", "exponent * mass)", "mass)"),
    Mutant("the near read has no part in the whole", "total += tl.exp2(z_1 - top)", "total = tl.exp2(z_1 - top)"),
    Mutant("a far split weighs as a near one", "z = tl.where(at < end_0,", "z = tl.where(at <= end_0,"),
    Mutant("a far split counts as near", "place, 0, end_0,", "place, 0, end_0 + 1,"),
    Mutant("a split's share is of nothing", "- tl.where(some, mass, 0.0)", "- 0.0 * tl.where(some, mass, 0.0)"),
    Mutant("masses in base 2", "mass_1 * 0.6931471805599453", "mass_1"),
    Mutant("heads in the wrong order", "query = head * group + i % group", "query = head * group + (i + 1) % group"),
]


def right(case: Case, splits: tuple[int, int]) -> bool:
    reads, expected = folded.made(case)
    reads = [replace(read, splits=count) for read, count in zip(reads, splits, strict=True)]
    output = triton.device_attention(reads, torch.full_like(reads[0].q, torch.nan))
    return all(
        torch.allclose(found.double(), true, atol=1e-5, rtol=1e-5)
        for i, (out, lse) in enumerate(expected)
        for found, true in ((output.out[i], out), (output.lse[:, i], lse))
    )


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small case has several tiles of rows, blocks of entries and splits."""
    monkeypatch.setattr(triton, "tiles", lambda *facts: triton.Tiles(16, 16, 4, 1))


@pytest.mark.parametrize("case", [PLAIN, TWO_HEADS, WIDE], ids=str)
def test_without_a_mistake_it_passes(case: Case) -> None:
    assert right(case, (1, 4))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_mistakes_in_the_kernels_show(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SOURCE.count(mutant.old) == 1
    path = tmp_path / "mutated_kernels.py"
    path.write_text(SOURCE.replace(mutant.old, mutant.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutated_kernels", path)
    assert spec is not None and spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    monkeypatch.setattr(room, "triton_kernels", mutated)
    assert not right(mutant.case, mutant.splits)


CALLERS = {
    "the far query turned one place too far": {"far_shift": 1},
    "the far query at the window's edge": {"far_shift": -PLAIN.block},
    "keys and queries turned backwards": {"turn": -1},
    "a far set one entry too large": {"far_more": 1},
    "a far set one entry too small": {"far_more": -1},
}


@pytest.mark.parametrize("what", CALLERS)
def test_mistakes_of_the_caller_show(what: str) -> None:
    assert not right(replace(PLAIN, **CALLERS[what]), (1, 4))
