"""What all figures share: colours and marks, whether they can be drawn at all, and how they are kept.

matplotlib (extra ``bench``) is imported inside functions only."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from foldspec.bench.files import replace
from foldspec.errors import UsageError

__all__ = ["COLOURS", "GREY", "MARKS", "need_matplotlib", "save"]

# Okabe and Ito's eight, which stay apart for colour-blind eyes; the yellow darker, to be seen on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A900")
GREY = "#777777"
MARKS = "osD^vP*X"
DPI = 150
RULES: Any = {"svg.hashsalt": "foldspec"}  # the same bytes for the same figure


def need_matplotlib() -> None:
    """Raises :class:`UsageError` where it is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("figures need matplotlib", do="pip install 'foldspec[bench]'") from None


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """``name.png`` and ``name.svg`` of one of matplotlib's figures, each whole or as it was before; their paths. Raises
    :class:`OSError`."""
    from matplotlib import rc_context

    written = []
    for form in ("png", "svg"):
        data, path = BytesIO(), folder / f"{name}.{form}"
        with rc_context(RULES):
            figure.savefig(data, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else None)
        replace(path, data.getvalue())
        written.append(path)
    return written
