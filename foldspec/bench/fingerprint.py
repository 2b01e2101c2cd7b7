"""Which weights a bench ran on: a folder of the same name may have been trained into again before ``--resume``."""

from __future__ import annotations

import hashlib

from foldspec.checkpoints.headers import Weights

__all__ = ["fingerprint"]

PIECES, PIECE = 1024, 1 << 16  # what is read of a file that is larger than all of them; training changes every byte


def fingerprint(weights: Weights) -> str:
    """One word for the tensors of a checkpoint, 64 MB of each file at most read."""
    digest = hashlib.sha256()
    for path in sorted({entry.file for entry in weights.entries.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= PIECES * PIECE:
                digest.update(file.read())
            else:
                for i in range(PIECES):
                    file.seek(i * (size - PIECE) // (PIECES - 1))
                    digest.update(file.read(PIECE))
    return digest.hexdigest()[:16]
