"""Dummies of the pairs that ship: at full size what they need, and each of them cut to two layers."""

from __future__ import annotations

import pytest
from cli.command import main, refused

from foldspec.checkpoints.registry import load_registry

DUMMY = ("--load-format", "dummy", "--threads", 1, "--max-batch", 1)
SMALL = ("--lengths", 24, "--limit", 1, "--max-new", 4, "--warmup", 0, "--bootstrap", 100)
PAIRS = load_registry().pairs


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan comes before anything is allocated or looked for."""
    monkeypatch.setattr("foldspec.memory.free_memory", lambda device: 20_000_000_000)
    done = main("bench", "gemma-4-31b-diffusiongemma", *DUMMY, *SMALL, "--quiet")
    said = refused(done, 4, "not enough memory on cpu", "in all", "fewer --dummy-layers")
    assert float(said.partition("weights ")[2].split()[0]) > 60  # GB: 30.7e9 parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PAIRS))
def test_every_pair(name: str) -> None:
    """Heads and vocabularies are whole: the process has held the target's at least."""
    small = (*SMALL, "--dummy-layers", 2, "--max-context", 512, "--format", "json")
    done = main("bench", name, *DUMMY, *small)
    assert done.code == 0, done
    assert done.json["summary"] or done.json["tasks"][0]["excluded"]["clock"]
    config = PAIRS[name].target.config.get("text_config") or PAIRS[name].target.config
    assert done.json["env"]["peak_mem_bytes"] > 2 * config["vocab_size"] * config["hidden_size"]
    assert ("full" in done.json["methods"]) != ("decodes alone" in done.err)
    assert "dummy weights (2 of" in done.err
