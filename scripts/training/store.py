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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foldspec.errors import UsageError
from training.generate import Continuation

__all__ = ["Texts", "begin_data", "read_plan", "read_texts", "write_json", "write_shard"]


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one step."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def begin_data(folder: Path, plan: dict[str, Any], files: dict[str, int]) -> None:
    """Note in ``data.json`` what the shards of a folder are made by. Raises :class:`UsageError` if those that are there
    were made by another plan or of other files."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "data.json"
    now = json.loads(json.dumps({"plan": plan, "files": files}))
    if not manifest.exists():
        if any(folder.glob("shard-*.safetensors")):
            raise UsageError("has shards but no data.json", where=str(folder), do="name another folder")
        write_json(manifest, now)
        return
    before = _manifest(folder)
    differing = [name for name, value in now["plan"].items() if before["plan"].get(name) != value]
    differing += ["files of the sources"] if before.get("files") != files else []
    if differing:
        what = f"was made by other settings: {', '.join(differing)}"
        raise UsageError(what, where=str(folder), do="name another folder")


def read_plan(folder: Path) -> dict[str, Any]:
    """What the shards of a folder are made by. Raises :class:`UsageError`."""
    if not (folder / "data.json").exists():
        raise UsageError("has no data.json", where=str(folder), do="make the texts first, with the data command")
    plan: dict[str, Any] = _manifest(folder)["plan"]
    return plan


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "data.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        taps, target = manifest["plan"]["taps"], manifest["plan"]["target"]
    except (ValueError, KeyError, TypeError, RecursionError):
        taps = target = None
    if not isinstance(target, dict) or not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise UsageError("does not say what the texts were made by", where=str(path), do="name another folder")
    return manifest


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
    for left in path.parent.glob(f"{path.stem}.*.part"):  # by a worker that was killed
        left.unlink(missing_ok=True)
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


def read_texts(
    folder: Path, *, shortest: int, width: int | None = None, vocabulary: int | None = None
) -> tuple[Texts, Texts]:
    """(training, validation) sequences of all shards in which the target wrote at least ``shortest`` tokens.

    Raises :class:`UsageError` for a shard that is torn, or of other taps (``width`` in all) or ids than the target's,
    and where one side has no text.
    """
    sides = Texts(), Texts()
    for shard in sorted(folder.glob("shard-*.safetensors")):
        try:
            found = _index(shard, width, vocabulary)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"is torn, or no shard of this target ({type(error).__name__}: {error!s:.100})"
            raise UsageError(why, where=str(shard), do="remove it and run the data command again") from None
        for text in found:
            if text.tokens - text.prompt >= shortest:
                sides[text.validation].append(text)
    for side, name in zip(sides, ("training", "validation"), strict=True):
        if not side:
            raise UsageError(f"holds no text for {name}", where=str(folder), do="make more, with the data command")
    return sides


def _index(shard: Path, width: int | None, vocabulary: int | None) -> list[Text]:
    with safe_open(shard, "pt") as file:
        ids, taps, kind = file.get_tensor("ids"), file.get_slice("taps").get_shape(), file.get_slice("taps").get_dtype()
        texts, start = [], 0
        for entry in json.loads((file.metadata() or {})["sequences"]):
            texts.append(Text(shard, start, **entry))
            if not 0 < texts[-1].prompt < texts[-1].tokens or type(texts[-1].validation) is not bool:
                raise ValueError("an entry of its index is not that of a text")
            start += texts[-1].tokens
    if ids.ndim != 1 or len(taps) != 2 or not start == len(ids) == taps[0]:
        raise ValueError(f"{start} tokens in its index, {list(ids.shape)} ids, taps {taps}")
    if (ids.dtype, kind) != (torch.int32, "BF16"):
        raise ValueError(f"ids of {ids.dtype}, taps of {kind}")
    if width is not None and taps[1] != width:
        raise ValueError(f"taps of width {taps[1]}, not {width}")
    if vocabulary is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"ids that are not among the target's {vocabulary}")
    return texts


def read(sequence: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n] int64 and taps [n, taps * width] bf16."""
    ids, taps = _shard(sequence.shard)
    rows = slice(sequence.start, sequence.start + sequence.tokens)
    return ids[rows].long(), taps[rows]


@cache
def _shard(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    file = safe_open(path, "pt")  # mapped: what is not looked at is not read
    return file.get_tensor("ids"), file.get_tensor("taps")
