"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v.

No key of the config announces them, so they are found in the file, as in any model over Llama's block. Nothing else
differs: ``sliding_window`` and ``max_window_layers`` mean nothing without ``use_sliding_window``, which is refused.
"""

from __future__ import annotations

from foldspec.models.llama import Llama

__all__ = ["Qwen2"]


class Qwen2(Llama):
    pass
