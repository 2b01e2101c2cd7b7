"""Running what a model wrote: a process of its own, with limits of time and memory, in an empty folder that goes away.

This is no sandbox. The program runs as this user: it can read and write the user's files, start processes and reach the
network. It is run only where ``--allow-code-execution`` was given; a container or a machine of its own is the place.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

__all__ = ["passes"]

MEMORY = 4 << 30  # bytes of address space
FILE = 16 << 20  # bytes that a file may grow to

# The word goes out on the old standard output only when the last line of the program was reached: an exit, whatever its
# status, says nothing. The program's own standard output goes nowhere.
_RUN = """
import os, resource, sys
seconds, memory, size, word = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv.pop()
for name, most in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
code, told = sys.stdin.read(), os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
exec(compile(code, "program", "exec"), {"__name__": "__main__"})
os.write(told, word.encode())
"""


def passes(program: str, seconds: float) -> bool:
    """Whether a program runs to its end without an error, within ``seconds`` and :data:`MEMORY`."""
    word = secrets.token_hex(16)
    limits = [str(int(seconds) + 1), str(MEMORY), str(FILE)]
    with tempfile.TemporaryDirectory(prefix="foldspec-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN, *limits, word],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            told = b""
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it started goes with it
            process.communicate()
    return told == word.encode()
