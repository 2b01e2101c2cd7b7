"""A drafter of another target is refused from the configs alone, before any weight is read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from foldspec import Engine
from foldspec.checkpoints.pairing import check_pair
from foldspec.errors import CheckpointError, PairError
from foldspec.records import DrafterFacts

FITS = DrafterFacts(where="drafter", width=64, vocabulary=512, taps=(0, 1, 2), target_layers=4, mask_id=511)
TARGET: dict[str, Any] = {"target": "target", "width": 64, "layers": 4, "vocabulary": 512}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"width": 96}, "it was made for hidden size 96, the target has 64"),
    ({"target_layers": 5}, "it was made for 5 layers, the target has 4"),
    ({"vocabulary": 500}, "it was made for 500 ids, the target has 512"),
    ({"taps": (0, 2, 1)}, "its tapped layers [0, 2, 1] do not increase"),
    ({"taps": (0, 1, 1)}, "its tapped layers [0, 1, 1] do not increase"),
    ({"taps": (-1, 1)}, "its tapped layers [-1, 1] are not all in 0 .. 2"),
    ({"taps": (0, 3)}, "its tapped layers [0, 3] are not all in 0 .. 2"),
    ({"taps": (1, 9)}, "its tapped layers [1, 9] are not all in 0 .. 2"),
    ({"mask_id": 512}, "its mask id 512 is outside the target's 512 ids"),
]


def test_a_pair_that_fits() -> None:
    check_pair(FITS, **TARGET)
    check_pair(dataclasses.replace(FITS, target_layers=None, mask_id=None, taps=(2,)), **TARGET)
    check_pair(dataclasses.replace(FITS, taps=()), **TARGET)  # a drafter that reads no layer


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_does_not_fit_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PairError) as error:
        check_pair(dataclasses.replace(FITS, **changes), **TARGET)
    wanted = f"drafter: is not a drafter for target: {message}; name the drafter's own target"
    assert str(error.value) == wanted and error.value.exit_code == 3


@pytest.mark.parametrize("fault", ["width", "layers", "vocabulary", "taps", "mask"])
def test_an_engine_refuses_the_pair_before_it_reads_a_weight(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of both files fit their own configs: nothing but the pairing can tell."""
    target: dict[str, Any] = dict(tiny.TARGET)
    drafter = json.loads(json.dumps(tiny.ZLAB))
    if fault == "width":
        target["hidden_size"] = 40
    elif fault == "layers":
        target["num_hidden_layers"] = 5
    elif fault == "vocabulary":
        target["vocab_size"] = 130
    elif fault == "taps":
        drafter["dflash_config"]["target_layer_ids"] = [0, 3]
    else:
        drafter["dflash_config"]["mask_token_id"] = 128
    tiny.write_target(tmp_path / "target", target)
    tiny.write_drafter(tmp_path / "drafter", drafter)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("foldspec.checkpoints.weights._read", never)
    with pytest.raises(PairError, match="is not a drafter for"):
        Engine.load(target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))


def test_a_pair_with_swapped_weights_is_refused(tmp_path: Path) -> None:
    """A drafter of the right names but other shapes, as from another revision of the repository."""
    tiny.write_target(tmp_path / "target")
    folder = tiny.write_drafter(tmp_path / "drafter", tiny.ZLAB)
    three = {**tiny.ZLAB, "dflash_config": {**tiny.ZLAB["dflash_config"], "target_layer_ids": [0, 1, 2]}}
    other = tiny.write_drafter(tmp_path / "other", three)
    shutil.copy(other / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        Engine.load(target=str(tmp_path / "target"), drafter=str(folder))
