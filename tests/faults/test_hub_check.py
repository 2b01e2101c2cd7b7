"""``foldspec check`` of a pair that is on the hub alone: configs and headers come over, weights do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from cli.command import ORACLE, PAIR, ROOT, lend_kernels
from faults.hub_server import Hub, serve

# One process for all tests, since torch takes long to import: it runs a command a line, each with a registry and with
# caches of its own. (HF_ENDPOINT is read at import.)
DRIVER = """
import contextlib, io, json, os, sys
from pathlib import Path
import foldspec.checkpoints.registry as registry
from foldspec.cli import main
from huggingface_hub import constants
for line in sys.stdin:
    home, words = json.loads(line)
    registry.registry_path = lambda: Path(home) / "checkpoints.yaml"
    constants.HF_HUB_CACHE = str(Path(home) / "hf")
    os.environ["FOLDSPEC_CACHE"] = str(Path(home) / "cache")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
COMMIT = Hub({}).commit


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Desk(NamedTuple):
    """The process, the hub that it asks, and a home for one test."""

    process: subprocess.Popen[str]
    hub: Hub
    home: Path

    def run(self, *words: object) -> tuple[int, str, str]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(self.home), [str(word) for word in words]]) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        return code, out, err

    def register(self, **changes: object) -> None:
        """Write a registry of the pair ``tiny``, whose target's config is the file's but for ``changes``."""
        config = {**json.loads((PAIR / "target" / "config.json").read_text()), **changes}
        sources = {"tiny/model": {"config": config}, "tiny/drafter": {"kind": "dflash", "revision": COMMIT}}
        pairs = {"tiny": {"target": "tiny/model", "drafter": "tiny/drafter", "window": 24}}
        (self.home / "checkpoints.yaml").write_text(yaml.safe_dump({"checkpoints": sources, "pairs": pairs}))


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[subprocess.Popen[str], Hub]]:
    with serve(Hub({})) as hub:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        env |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", DRIVER], env=env, stdin=pipe, stdout=pipe, text=True) as process:
            yield process, hub
            process.communicate()
        assert process.returncode == 0


@pytest.fixture
def desk(process: tuple[subprocess.Popen[str], Hub], tmp_path: Path) -> Desk:
    desk = Desk(*process, tmp_path)
    fresh = Hub(files(PAIR / "target"), more={"tiny/drafter": files(PAIR / "drafter")}, url=desk.hub.url)
    vars(desk.hub).update(vars(fresh))
    lend_kernels(tmp_path / "cache")
    desk.register()
    return desk


def weights(home: Path) -> list[Path]:
    return list((home / "hf").rglob("*.safetensors"))


def asked(hub: Hub) -> list[str]:
    return [r for r in hub.requests if r.endswith(".safetensors")]


def test_headers_are_enough(desk: Desk) -> None:
    """A target in two shards, a drafter whose header is longer than the hub library's first guess; then the real thing
    is loaded, and checked again."""
    hub, home, drafter = desk.hub, desk.home, desk.hub.more["tiny/drafter"]
    drafter["model.safetensors"] = padded(drafter["model.safetensors"], 150_000)
    shard(hub.files)
    large = sum(len(b) for inside in (hub.files, drafter) for n, b in inside.items() if n.endswith(".safetensors"))
    code, out, err = desk.run("check", "tiny", "--json")
    assert (code, err) == (0, ""), err
    report: dict[str, Any] = json.loads(out)
    assert report["pair"]["verdict"] == "the drafter was made for this target" and report["pair"]["block"] == 6
    assert report["pair"]["weights on this disk"] is False and hub.commit in report["pair"]["target"]
    assert not weights(home)
    assert all(r.startswith("GET") for r in asked(hub)) and len(hub.ranges) == len(asked(hub)) == 4  # one of them twice
    assert hub.sent < 600_000 < large
    code, _, err = desk.run("generate", "tiny", "-p", "x", "--offline")
    assert code == 3 and "not (or not wholly) in the cache" in err  # the small files are no checkpoint

    assert desk.run("generate", "tiny", "--prompt-ids", "5,6", "--max-tokens", "3")[0] == 0
    assert len(weights(home)) >= 3
    seen = len(asked(hub))
    code, out, _ = desk.run("check", "tiny", "--json")
    assert code == 0 and json.loads(out)["pair"]["weights on this disk"] is True and len(asked(hub)) == seen
    assert desk.run("check", "--target", "tiny/model", "--offline")[0] == 0
    assert json.loads(desk.run("models", "--json")[1])["pairs"]["tiny"]["on disk"] is True
    hub.status = 503  # what was there stays usable
    assert desk.run("check", "tiny")[0] == 0


def test_what_is_wrong_with_a_pair_is_found_on_the_hub(desk: Desk) -> None:
    desk.hub.more["tiny/drafter"] = files(ORACLE / "drafter")
    code, _, err = desk.run("check", "tiny")
    assert code == 3 and "is not a drafter for" in err and "made for 3 layers, the target has 4" in err
    assert not weights(desk.home)


def test_a_file_counts_and_what_it_contradicts_is_told(desk: Desk) -> None:
    desk.register(rms_norm_eps=0.5, max_position_embeddings=77)
    real = json.loads((PAIR / "target" / "config.json").read_text())
    lines = [
        f"foldspec: tiny/model: {key} is {real[key]} in its file, which counts; the registry says {known}"
        for key, known in (("max_position_embeddings", 77), ("rms_norm_eps", 0.5))
    ]
    code, out, err = desk.run("check", "tiny", "--json")
    assert code == 0 and sorted(err.splitlines()) == lines and "made for this target" in out
    assert json.loads(out)["pair"]["context"] == real["max_position_embeddings"]
    code, _, err = desk.run("generate", "tiny", "--prompt-ids", "5,6", "--max-tokens", "2")
    assert code == 0 and lines == sorted(line for line in err.splitlines() if "registry says" in line)
    assert desk.run("check", "--target", "tiny/model")[2] == ""  # a hub id alone is not the registry's


def test_a_target_of_the_registry_that_no_class_runs(desk: Desk) -> None:
    desk.register(architectures=["Qwen2ForCausalLM"], quantization_config={"bits": 4})
    code, _, err = desk.run("check", "tiny")
    assert code == 3 and "the registry's config of tiny/model" in err and desk.hub.requests == []


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda hub: hub.files.update({"model.safetensors": b"\x10" + bytes(7) + b"{not json,,,,,,}"}), 3, "malformed"),
        (lambda hub: hub.files.update({"model.safetensors": bytes(4)}), 3, "malformed"),
        (lambda hub: hub.files.update({"model.safetensors": b"\xff" * 20_000}), 3, "malformed"),
        (lambda hub: hub.files.update({"model.safetensors": hub.files["model.safetensors"][:700_000]}), 3, "truncated"),
        (lambda hub: hub.files.pop("config.json"), 3, "no config.json"),
        (lambda hub: hub.files.pop("model.safetensors"), 3, "holds no safetensors"),
        (lambda hub: vars(hub).update(status=403, error_code="GatedRepo"), 3, "gated"),
        (lambda hub: vars(hub).update(status=503, only="model.safetensors"), 4, "HTTP 503"),
        (lambda hub: hub.more.clear(), 3, "tiny/drafter: not on the hub"),
    ],
)
def test_faults_are_one_line(desk: Desk, change: Any, code: int, says: str) -> None:
    change(desk.hub)
    done = desk.run("check", "tiny")
    assert done[0] == code and done[1] == "" and done[2].count("\n") == 1 and says in done[2], done


def shard(inside: dict[str, bytes]) -> None:
    """Split ``model.safetensors`` into two files and an index."""
    from safetensors.torch import load, save

    tensors = load(inside.pop("model.safetensors"))
    names = sorted(tensors)
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    inside |= {file: save({name: tensors[name] for name in some}) for file, some in parts.items()}
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    inside["model.safetensors.index.json"] = json.dumps(index).encode()


def padded(content: bytes, more: int) -> bytes:
    """The same file with spaces at the end of its header, which the format allows."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * more
    return len(header).to_bytes(8, "little") + header + content[8 + length :]
