"""The round loop names no drafter, no context method and no acceptance rule: it cannot branch on which one runs."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from foldspec import acceptance, context, drafters
from foldspec.acceptance.base import AcceptanceRule
from foldspec.context.base import ContextMethod
from foldspec.drafters.base import Drafter, DrafterNetwork
from foldspec.schedule import prefill, rounds, scheduler

SOURCE = Path(inspect.getfile(rounds)).read_text(encoding="utf-8")
BASES = (AcceptanceRule, ContextMethod, Drafter, DrafterNetwork)
BASE_NAMES = {base.__name__ for base in BASES}


def forbidden() -> set[str]:
    """Names in the three registries, of the modules and classes behind them, and of every file in those rooms."""
    names: set[str] = set()
    for registry in (context.METHODS, acceptance.RULES, drafters.ARCHITECTURES, drafters.MODEL_FREE):
        for name, where in registry.items():
            module, _, attribute = where.partition(":")
            names |= {name, module.rpartition(".")[2], attribute}
            classes = vars(import_module(module)).values()
            names |= {c.__name__ for c in classes if isinstance(c, type) and issubclass(c, BASES)} - BASE_NAMES
    for room in (context, acceptance, drafters):
        names |= {path.stem for path in Path(inspect.getfile(room)).parent.glob("*.py")}
    return names - {"__init__", "base"}


def named(source: str) -> set[str]:
    """The forbidden words that a source has, anywhere: code, strings, comments."""
    words = {word.lower() for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", source)}
    return {name for name in forbidden() if name.lower() in words}


def test_the_list_of_names_is_whole() -> None:
    known = {
        "full",
        "window",
        "fold",
        "exact",
        "dflash",
        "DFlash",
        "DFlashDraftModel",
        "Qwen3DSparkModel",
        "Fold",
        "reader",
        "lookup",
        "prompt_lookup",
        "PromptLookup",
    }
    assert known <= forbidden()


def test_the_round_loop_names_none() -> None:
    assert named(SOURCE) == set()


@pytest.mark.parametrize("module", [scheduler, prefill])
def test_what_drives_it_names_none(module: ModuleType) -> None:
    assert named(Path(inspect.getfile(module)).read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "line",
    ['if context == "fold":', "from foldspec.drafters.dflash import DFlash", "# exact needs no noise", "Window()"],
)
def test_a_name_would_be_noticed(line: str) -> None:
    assert named(f"{SOURCE}\n{line}\n")


def test_it_asks_for_no_class() -> None:
    """What it imports of those rooms are their bases, for annotations; nothing is told apart by its type."""
    tree = ast.parse(SOURCE)
    imported = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    rooms = {
        module for module, _ in imported if module and module.startswith(("foldspec.c", "foldspec.d", "foldspec.a"))
    }
    assert rooms <= {
        "foldspec.acceptance.base",
        "foldspec.drafters.base",
        "foldspec.cache.paged",
        "foldspec.cache.rows",
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called & {"isinstance", "issubclass", "type", "getattr", "hasattr"} == set()
