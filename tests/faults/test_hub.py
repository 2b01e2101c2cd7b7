"""Resolving a checkpoint against a hub that misbehaves, in a process of its own (HF_ENDPOINT is read at import)."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.hub_server import Hub, serve

from foldspec.checkpoints.resolve import explain, resolve
from foldspec.errors import CheckpointError, ResourceError, UsageError

ROOT = Path(__file__).parents[2]
COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 1600,  # resolve looks at names and sizes, not into the file
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"x" * 50,
}
# The hub library waits between its retries, and resumes by chunks of 10 MB; the tests have less of both. A free-space
# figure may be given.
DRIVER = """
import json, sys, time
from pathlib import Path
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 50_000
time.sleep = lambda seconds: None
from foldspec.checkpoints.resolve import resolve
from foldspec.errors import FoldspecError
ref, revision, offline, cache, free = json.loads(sys.argv[1])
if free is not None:
    import shutil, types
    shutil.disk_usage = lambda path: types.SimpleNamespace(free=free)
try:
    steps = []
    cache = cache and Path(cache)
    r = resolve(ref, revision=revision, offline=offline, cache_dir=cache, progress=lambda *a: steps.append(a))
    answer = {"path": str(r.path), "names": sorted(p.name for p in r.path.iterdir()), "steps": steps[-1:]}
    print(json.dumps(answer | {"repo": r.repo, "revision": r.revision}))
except FoldspecError as error:
    print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub(dict(FILES))) as hub:
        yield hub


def start(hub_url: str, cache: Path, *, revision=None, offline=False, free=None, shared=False) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env |= {"HF_ENDPOINT": hub_url, "PYTHONPATH": str(ROOT), "HF_HOME": str(cache / "home"), "HF_HUB_DISABLE_XET": "1"}
    arguments = json.dumps([Hub.repo, revision, offline, None if shared else str(cache / "hub"), free])
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", DRIVER, arguments], env=env, stdout=pipe, stderr=pipe, text=True)


def run(hub: Hub | str, cache: Path, **how) -> dict:
    process = start(hub if isinstance(hub, str) else hub.url, cache, **how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err, err  # nothing but our own line
    answer = json.loads(out)
    if "error" in answer:
        assert "\n" not in answer["error"]
    return answer


def complete(answer: dict) -> bool:
    path = Path(answer["path"])
    return answer["names"] == ["config.json", "model.safetensors", "tokenizer.json"] and all(
        (path / name).read_bytes() == FILES[name] for name in answer["names"]
    )


def test_a_branch_is_fetched_and_its_commit_reported_then_the_commit_needs_no_network(hub, tmp_path):
    answer = run(hub, tmp_path)
    assert complete(answer) and answer["revision"] == COMMIT and answer["repo"] == Hub.repo
    assert answer["steps"][0][0] == "download" and answer["steps"][0][1] == answer["steps"][0][2] > 400_000
    assert not any("pytorch_model.bin" in r or "onnx" in r for r in hub.requests)
    seen = len(hub.requests)
    assert complete(run(hub, tmp_path, revision=COMMIT))
    assert complete(run(hub, tmp_path, offline=True))
    assert len(hub.requests) == seen


def test_a_pinned_commit_is_fetched_into_the_cache_that_all_programs_share(hub, tmp_path):
    answer = run(hub, tmp_path, revision=COMMIT, shared=True)
    assert complete(answer) and Path(answer["path"]).is_relative_to(tmp_path / "home" / "hub")


@pytest.mark.parametrize(
    ("status", "code", "says", "exit_code"),
    [
        (401, "", "HF_TOKEN", 3),
        (403, "", "HF_TOKEN", 3),
        (401, "GatedRepo", "licence", 3),
        (403, "GatedRepo", "licence", 3),
        (404, "RepoNotFound", "not on the hub", 3),
        (503, "", "HTTP 503", 4),
    ],
)
def test_every_refusal_is_one_line(hub, tmp_path, status, code, says, exit_code):
    hub.status, hub.error_code = status, code
    answer = run(hub, tmp_path)
    assert says in answer["error"] and Hub.repo in answer["error"] and answer["code"] == exit_code


@pytest.mark.parametrize(("status", "exit_code"), [(403, 3), (503, 4)])
def test_a_refusal_of_one_file_leaves_no_checkpoint(hub, tmp_path, status, exit_code):
    hub.status, hub.only = status, "resolve"
    assert run(hub, tmp_path)["code"] == exit_code
    assert "not (or not wholly) in the cache" in run(hub, tmp_path, offline=True)["error"]
    hub.status = None
    assert complete(run(hub, tmp_path))


def test_an_unknown_revision(hub, tmp_path):
    answer = run(hub, tmp_path, revision="v9")
    assert answer == {"error": "tiny/model: the repository has no revision v9", "code": 3}


def test_no_server_at_all(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    answer = run(f"http://127.0.0.1:{port}", tmp_path)
    assert answer["code"] == 4 and "check the network" in answer["error"]


def test_a_hub_that_went_away_leaves_the_cached_branch_usable(hub, tmp_path):
    run(hub, tmp_path)
    hub.status = 503
    assert complete(run(hub, tmp_path))


def test_a_cut_connection_is_resumed_by_range(hub, tmp_path):
    hub.cut = 150_000
    assert complete(run(hub, tmp_path))
    assert hub.ranges == ["bytes=150000-"]


def test_a_body_that_stays_cut_is_never_taken_as_complete(hub, tmp_path):
    hub.cut, hub.cut_always = 150_000, True
    assert run(hub, tmp_path)["code"] == 4
    assert not list((tmp_path / "hub").rglob("model.safetensors"))
    assert run(hub, tmp_path, offline=True)["code"] == 3
    hub.cut, hub.cut_always = None, False
    assert complete(run(hub, tmp_path))


def test_a_process_killed_in_mid_download_leaves_nothing_that_looks_complete(hub, tmp_path):
    hub.stall = True
    process = start(hub.url, tmp_path)
    assert hub.stalled.wait(30)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    hub.stall = False
    hub.released.set()
    assert run(hub, tmp_path, offline=True)["code"] == 3
    assert complete(run(hub, tmp_path))


def test_the_disk_is_asked_before_the_download(hub, tmp_path):
    answer = run(hub, tmp_path, free=1000)
    assert answer["code"] == 4 and "are free" in answer["error"]
    assert not any("resolve" in request for request in hub.requests)


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "hub").write_text("a file where the cache should be")
    answer = run(hub, tmp_path)
    assert answer["code"] == 4 and "cannot write to the cache" in answer["error"]


def test_a_repository_of_pickles(hub, tmp_path):
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}
    answer = run(hub, tmp_path)
    assert answer["code"] == 3 and "no safetensors" in answer["error"]


def test_a_repository_without_one_of_its_shards(hub, tmp_path):
    hub.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    assert run(hub, tmp_path)["code"] == 3


def test_offline_opens_no_socket(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(CheckpointError, match="run once without --offline"):
        resolve("tiny/model", cache_dir=tmp_path, offline=True)
    with pytest.raises(CheckpointError, match="run once without --offline"):
        resolve("tiny/model", revision=COMMIT, cache_dir=tmp_path, offline=True)
    assert not list(tmp_path.iterdir())


def test_a_cached_commit_opens_no_socket(tmp_path, monkeypatch):
    folder = tmp_path / "models--tiny--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    found = resolve("tiny/model", revision=COMMIT, cache_dir=tmp_path)
    assert found.path == folder and found.revision == COMMIT
    (folder / "model.safetensors").unlink()  # a partial copy is no copy
    with pytest.raises(CheckpointError):
        resolve("tiny/model", revision=COMMIT, cache_dir=tmp_path, offline=True)


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name").path == Path("org/name")  # a folder that exists wins over the hub
    assert resolve(str(tmp_path)).repo is None
    for ref in ("./nothing", "/nothing/here", "~/no-such-folder-of-foldspec"):
        with pytest.raises(CheckpointError, match="no such folder"):
            resolve(ref)
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        resolve("word")
    with pytest.raises(UsageError):
        resolve(str(tmp_path), revision="main")


def test_disk_full_while_downloading():
    error = explain(OSError(errno.ENOSPC, "No space left on device", "/cache/blob"), "a/b", None)
    assert isinstance(error, ResourceError) and str(error).startswith("/cache/blob: the disk is full")


# As DRIVER, of a task's data: what is there afterwards, and how often the hub was asked.
TASK_DRIVER = """
import json, sys, time
time.sleep = lambda seconds: None
from foldspec.errors import FoldspecError
from foldspec.tasks import make_task
from foldspec.tasks.data import Access
task = make_task("gsm8k", Access(offline=json.loads(sys.argv[1])))
try:
    ids = [item.id for item in task.items(lambda prompt: (1,), 512, 9, 0)]
    print(json.dumps({"ids": ids, "revision": task.facts()["revision"]}))
except FoldspecError as error:
    print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


def rows_of_gsm8k(hub_url: str, home: Path, offline: bool) -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env |= {"HF_ENDPOINT": hub_url, "PYTHONPATH": str(ROOT), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    words = [sys.executable, "-c", TASK_DRIVER, json.dumps(offline)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def test_a_task_reads_its_data_at_the_pinned_commit(tmp_path: Path) -> None:
    """From the hub once, then from its cache without a socket; where neither has it, one line says what to do."""
    from foldspec.tasks.gsm8k import GSM8K

    rows = (ROOT / "tests" / "golden" / "tasks" / "rows" / "test.jsonl").read_bytes()
    files = {"test.jsonl": rows, "train.jsonl": b"x", "README.md": b"y"}
    commit = str(GSM8K.origin.revision)
    with serve(Hub({}, commit=commit, more={"openai/gsm8k": files})) as hub:
        missing = rows_of_gsm8k(hub.url, tmp_path, offline=True)
        assert not hub.requests and missing["code"] == 4
        fetched = rows_of_gsm8k(hub.url, tmp_path, offline=False)
        assert len(fetched["ids"]) == 4 and fetched["revision"] == commit
        assert not any("train" in path or "README" in path for path in hub.requests)
        asked = len(hub.requests)
        assert rows_of_gsm8k(hub.url, tmp_path, offline=True) == fetched and len(hub.requests) == asked
    with serve(Hub({}, status=403, error_code="GatedRepo")) as hub:
        gated = rows_of_gsm8k(hub.url, tmp_path / "other", offline=False)
    down = rows_of_gsm8k("http://127.0.0.1:9", tmp_path / "other", offline=False)
    for answer, says in ((missing, "is not in the hub's cache"), (gated, "is gated"), (down, "cannot be fetched")):
        assert says in answer["error"] and "\n" not in answer["error"]
        assert f"hf download openai/gsm8k --repo-type dataset --revision {commit} " in answer["error"]
