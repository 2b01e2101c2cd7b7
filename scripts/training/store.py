"""Training data on disk: shards of sequences with their taps, written whole or not at all, read by mapping."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from training.generate import Continuation

__all__ = ["Texts", "read_texts", "write_json", "write_shard"]


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one step."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def write_shard(path: Path, continuations: Sequence[Continuation]) -> None:
    """One file: ids int32 and taps bf16 of all sequences end to end, and a description of each in the header.

    The last token of a sequence has no taps (it was never run): its row is zero.
    """
    taps = []
    for one in continuations:
        rows = torch.cat(one.taps)
        taps.append(torch.cat([rows, rows.new_zeros(len(one.ids) - len(rows), rows.shape[1])]))
    index = [{"tokens": len(one.ids), "prompt": len(one.prompt.ids), **_facts(one)} for one in continuations]
    ids = torch.tensor([token for one in continuations for token in one.ids], dtype=torch.int32)
    part = path.with_suffix(f".{os.getpid()}.part")
    save_file({"ids": ids, "taps": torch.cat(taps)}, part, metadata={"sequences": json.dumps(index)})
    os.replace(part, path)


def _facts(one: Continuation) -> dict[str, Any]:
    facts = asdict(one.prompt)
    del facts["ids"]
    return facts


@dataclass(frozen=True)
class Text:
    """Where one sequence lies: its shard, first row, length and the length of its prompt."""

    shard: Path
    start: int
    tokens: int
    prompt: int
    kind: str
    source: str
    validation: bool


class Texts(list[Text]):
    """Texts of one side of the split."""

    @property
    def written(self) -> int:
        """Tokens that the target wrote."""
        return sum(s.tokens - s.prompt for s in self)


def read_texts(folder: Path, *, shortest: int) -> tuple[Texts, Texts]:
    """(training, validation) sequences of all shards in which the target wrote at least ``shortest`` tokens."""
    sides = Texts(), Texts()
    for shard in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(shard, "pt") as file:
            index = json.loads(file.metadata()["sequences"])
        start = 0
        for entry in index:
            if entry["tokens"] - entry["prompt"] >= shortest:
                sides[entry["validation"]].append(Text(shard, start, **entry))
            start += entry["tokens"]
    return sides


def read(sequence: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n] int64 and taps [n, taps * width] bf16."""
    ids, taps = _shard(sequence.shard)
    rows = slice(sequence.start, sequence.start + sequence.tokens)
    return ids[rows].long(), taps[rows]


@cache
def _shard(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    file = safe_open(path, "pt")  # mapped: what is not looked at is not read
    return file.get_tensor("ids"), file.get_tensor("taps")
