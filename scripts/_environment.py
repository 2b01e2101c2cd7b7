"""What scripts/demo and scripts/test share: a virtual environment inside the checkout. Standard library only.

It must be read by an old Python too, far enough to say which one is needed: no syntax newer than f-strings.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0"  # one known build for every machine without a GPU
GPU_TORCH = "torch>=2.11"  # on Linux, what PyPI has is the CUDA build
# What kernels are interpreted and compiled with in the tests, newest first. No extra of the package: a CUDA build of
# torch insists on a version of its own (2.13.0 on 3.7.1), so that each has a folder beside what is installed.
TRITONS = ("3.9.0", "3.6.0")
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def need_python() -> None:
    """Leave with one line if this Python is too old."""
    if sys.version_info < (3, 11):  # noqa: UP036
        found = platform.python_version()
        sys.exit(f"foldspec needs Python 3.11 or newer, this is {found}; try: python3.12 {sys.argv[0]}")


def ensure(name: str, extras: str) -> Path:
    """The Python of the environment ROOT/name with foldspec (editable) and ``extras`` installed in it.

    Made on the first call. Later calls find the stamp of the same settings and do nothing, or bring it up to date.
    """
    venv = ROOT / name
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = venv / "foldspec-installed.json"
    wanted = {
        "pyproject": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "checkout": str(ROOT),
        "torch": GPU_TORCH if has_nvidia_gpu() else CPU_TORCH,
        "extras": extras,
    }
    version = python_version(python)
    if version and stamp.exists() and stamp.read_text() == json.dumps(wanted):
        say(f"Environment {name} is up to date (Python {version}).")
        return python

    start = time.monotonic()
    if not version:
        make(venv)
    elif tuple(map(int, version.split(".")[:2])) < (3, 11):
        sys.exit(f"{venv} holds Python {version}, foldspec needs 3.11 or newer; move that folder away")
    stamp.unlink(missing_ok=True)
    install_torch(python, wanted["torch"])
    say(f"Installing foldspec[{extras}] and what it needs into {name}.")
    run([python, *PIP, "install", "-e", f"{ROOT}[{extras}]"], "the installation")
    stamp.write_text(json.dumps(wanted))
    say(f"Environment {name} is ready ({time.monotonic() - start:.0f} s).")
    return python


def has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def python_version(python: Path) -> str:
    """The version of a Python that has pip; empty if there is none or it does not run."""
    code = "import pip, platform; print(platform.python_version())"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def make(venv: Path) -> None:
    say(f"Making the virtual environment {venv} (Python {platform.python_version()}).")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)])
    if made.returncode:
        sys.exit("this Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv")


def install_torch(python: Path, requirement: str) -> None:
    index = os.environ.get("TORCH_INDEX_URL")
    code = "import importlib.metadata as m; m.version('torch')"
    if not subprocess.run([str(python), "-c", code], capture_output=True).returncode:
        say(f"torch is there; making sure that it is {requirement}.")
    elif index:
        say(f"Installing {requirement} from TORCH_INDEX_URL.")
    elif sys.platform == "linux":
        say(f"Installing {requirement} from pip's usual index.")
        print(
            "    For Linux, PyPI's build of torch may bring the CUDA libraries: about 3 GB to download, 6 GB on disk.\n"
            "    The CPU build is about 200 MB. To have it, stop here (Ctrl-C), and start again as\n"
            f"        TORCH_INDEX_URL=<the CPU wheel index that PyTorch's install page names> {sys.argv[0]}",
            flush=True,
        )
    else:
        say(f"Installing {requirement} (about 200 MB).")
    run([python, *PIP, "install", requirement, *(["--index-url", index] if index else [])], "installing torch")


def add_tritons(python: Path) -> None:
    """Put each of :data:`TRITONS` into a folder ``triton-VERSION`` of the environment, where it is missing. One that
    cannot be had is no reason to stop: the tests that need it fail and say so."""
    if sys.platform != "linux":  # there are no others
        return
    for version in TRITONS:
        folder = python.parent.parent / f"triton-{version}"
        if (folder / f"triton-{version}.dist-info").is_dir():
            continue
        say(f"Installing Triton {version} into {folder.name}, for the tests of its kernels.")
        unfinished = folder.with_name(f".{folder.name}")
        command = [python, *PIP, "install", "--no-deps", "--target", unfinished, f"triton=={version}"]
        if subprocess.run([str(part) for part in command], cwd=str(ROOT)).returncode:
            say(f"Triton {version} could not be installed; the tests that need it will fail.")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)


def run(command: list, what: str) -> None:
    """Run a command; if it fails, leave with its exit status after one line that names it."""
    code = subprocess.run([str(part) for part in command], cwd=str(ROOT)).returncode
    if code:
        print(f"==> {what} failed (exit status {code}); see above", file=sys.stderr, flush=True)
        sys.exit(code)
