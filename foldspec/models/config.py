"""config.json through checked getters: a value that is missing or of the wrong kind is named, never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foldspec.errors import CheckpointError

__all__ = ["ModelConfig"]

# What changes the maths of a model and is not supported in any: the key, and its value that changes nothing.
UNSUPPORTED = {
    "quantization_config": None,
    "use_sliding_window": False,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
}


class ModelConfig:
    """One config.json (or a part of it) and the name to use for it in errors; ``folder``: where it was read."""

    def __init__(self, values: dict[str, Any], where: str, folder: Path | None = None) -> None:
        self.values, self.where, self.folder = values, where, folder

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read ``folder/config.json``. Raises :class:`CheckpointError`."""
        path = Path(folder) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError("no config.json", where=str(folder), do="name a checkpoint folder") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot be read as JSON ({error})", where=str(path)) from None
        if not isinstance(values, dict):
            raise CheckpointError("is not a JSON object", where=str(path))
        return cls(values, str(path), path.parent)

    def error(self, what: str, do: str = "") -> CheckpointError:
        return CheckpointError(what, where=self.where, do=do)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def part(self, key: str) -> ModelConfig:
        """A nested object; an empty one where the key is absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return ModelConfig(value, f"{self.where} {key}")

    def text(self) -> ModelConfig:
        """A target's own settings: those of ``text_config`` where the file is a multimodal wrapper's, else all of it.

        ``tie_word_embeddings`` holds if either says so. Raises :class:`CheckpointError` for what :data:`UNSUPPORTED`
        names, in both: it must be asked for once by every model.
        """
        self.refuse(**UNSUPPORTED)
        if not self.has("text_config"):
            return self
        text = self.part("text_config")
        text.refuse(**UNSUPPORTED)
        tied = self.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
        return ModelConfig({**text.values, "tie_word_embeddings": tied}, text.where)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, of ``kind``. Without a default (None), an absent key or null is an error."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(f"{key} must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}")
        return value

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 26) -> int:
        """``high`` is beyond any model: a larger number would exhaust the memory before it is found to be wrong."""
        value: int = self.get(key, int, default)
        if not low <= value <= high:
            raise self.error(f"{key} must be in {low} .. {high}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. JSON as Python reads it may also hold NaN and Infinity."""
        value = self.get(key, (int, float), default)
        if value is not default and not 0 < value < 1e30:
            raise self.error(f"{key} must be a positive number, not {value}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, bool, default))

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.get(key, list)
        if not value or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.error(f"{key} must be a list of whole numbers, not {value!r}")
        return tuple(value)

    @property
    def dtype(self) -> str:
        """Of the weights, as either spelling gives it, here or in a wrapper's ``text_config``; bfloat16 where neither
        does."""
        for place in (self, self.part("text_config")):
            for key in ("dtype", "torch_dtype"):
                if place.has(key):
                    return str(place.get(key, str))
        return "bfloat16"

    @property
    def architecture(self) -> str:
        """The first entry of ``architectures``."""
        value = self.get("architectures", list)
        if not value or not isinstance(value[0], str):
            raise self.error(f"architectures must name a class, not {value!r}")
        return value[0]

    def refuse(self, **harmless: Any) -> None:
        """Refuse keys that change the maths and are not supported; ``harmless`` gives values that change nothing."""
        for key, neutral in harmless.items():
            value = self.values.get(key)
            if value is not None and value != neutral:
                raise self.error(f"{key} = {value!r} is not supported")
