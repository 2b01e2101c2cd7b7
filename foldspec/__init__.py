"""foldspec: speculative decoding over long contexts. Start at :class:`Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foldspec.errors import FoldspecError
from foldspec.options import SamplingParams
from foldspec.records import Completion

if TYPE_CHECKING:
    from foldspec.engine import Engine

__all__ = ["Completion", "Engine", "FoldspecError", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Engine brings torch, which `foldspec --help` and report tools can do without
    if name == "Engine":
        from foldspec.engine import Engine

        return Engine
    raise AttributeError(f"module 'foldspec' has no attribute {name!r}")
