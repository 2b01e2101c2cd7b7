"""The oracle drafter of ``scripts/make_oracle_pair.py`` is accepted whole, and hardly at all once one thing is wrong.

Its margins leave rounding no say, and no training can excuse a low number. The mistakes are the classic silent ones:
they raise nothing, leave the output untouched (the target still decides every token) and only cost acceptance.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli.command import copied, with_text, word

from foldspec import Engine, SamplingParams
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.context.reader import ContextReader, Rotation
from foldspec.drafters.dflash import DFlash, DFlashConfig
from foldspec.models.base import ForwardPlan
from foldspec.models.llama import Llama
from foldspec.records import Completion

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_oracle_pair.py"
WINDOW = 24
ROUNDS = 10
CONTEXTS = ("full", "window", "fold")

Patch = pytest.MonkeyPatch


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_oracle_pair", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


oracle = _script()
BLOCK: int = oracle.BLOCK


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small gain nothing from a second thread, and lose much to its waiting on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oracle")
    oracle.build(folder)
    return folder


def _prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(1, oracle.P) for _ in range(length)]


def _generate(pair: Path, prompt: list[int], context: str, drafter: Path | None = None) -> Completion:
    """Whole blocks exactly fill the limit, so no round is cut short by it."""
    params = SamplingParams(max_tokens=1 + ROUNDS * BLOCK, ignore_eos=True)
    engine = Engine.load(target=str(pair / "target"), drafter=str(drafter or pair / "drafter"))
    try:
        return engine.using(context=context, window=WINDOW, alpha=2.0).generate(prompt, params)
    finally:
        engine.close()


# -------------------------------------------------------------------------------------------------- without a mistake


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("length", [1, 2, 10, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, 3 * WINDOW, 300])
def test_every_block_is_accepted(pair: Path, length: int, context: str) -> None:
    # n <= W is what the project asks for; the construction depends on distances 1 .. B only, so it holds beyond as well
    done = _generate(pair, _prompt(length), context)
    assert list(done.token_ids) == oracle.continuation(_prompt(length), len(done.token_ids))
    assert done.tau is not None and done.tau >= 0.95 * BLOCK
    assert [r.anchor_pos for r in done.rounds] == [length + i * BLOCK for i in range(ROUNDS)]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("room", "drafts"), [(1, []), (2, [0]), (3, [1]), (7, [5]), (8, [6]), (9, [6, 0])])
def test_the_last_block_is_cut_where_the_context_ends(
    pair: Path, monkeypatch: Patch, context: str, room: int, drafts: list[int]
) -> None:
    """Prompts that leave hardly room for a block of 7: no row is looked at that could not be kept."""
    prompt, ends, forward = _prompt(61), [], Llama.forward

    def watched(self: Llama, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> object:
        ends.append(max(start + count for start, count in zip(plan.rows.starts, plan.rows.counts, strict=True)))
        return forward(self, ids, plan, cache)

    monkeypatch.setattr(Llama, "forward", watched)
    options: dict[str, Any] = {"page_size": 16, "max_context": len(prompt) + room, "context": context, "window": WINDOW}
    with Engine.load(target=str(pair / "target"), drafter=str(pair / "drafter"), debug=True, **options) as engine:
        done = engine.generate(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
        assert done.finish_reason == "length"
        assert list(done.token_ids) == oracle.continuation(prompt, room)
        assert [len(r.drafted) for r in done.rounds] == [r.accepted for r in done.rounds] == drafts
        assert max(ends) == len(prompt) + room - 1  # the last token is never looked at
        tables = engine.resources.cache.tables
        assert tables.allocator.free_pages == tables.allocator.pages
        assert list(engine.generate(prompt[:9], SamplingParams(max_tokens=5)).token_ids) == oracle.continuation(
            prompt[:9], 5
        )


@pytest.mark.parametrize("by", ["id", "string"])
def test_a_stop_at_the_second_token_of_a_block_of_seven(pair: Path, tmp_path: Path, by: str) -> None:
    """All seven are right, two are delivered: ids, text, log-probabilities, rounds and tau end there."""
    folder = with_text(copied(tmp_path / "pair", pair))
    prompt = next(p for p in map(_prompt, range(20, 60)) if len(set(oracle.continuation(p, 8))) == 8)
    wanted = oracle.continuation(prompt, 8)[:3]
    how: dict[str, Any] = {"stop_ids": (wanted[2],)} if by == "id" else {"stop": (word(wanted[2]),)}
    with Engine.load(target=str(folder / "target"), drafter=str(folder / "drafter"), window=WINDOW) as engine:
        params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=1, **how)
        stream = engine.stream(prompt, params)
        pieces = list(stream)
    done = stream.completion
    (round_,) = done.rounds
    assert (len(round_.drafted), round_.accepted, list(round_.committed)) == (6, 6, wanted[1:])
    assert list(done.token_ids) == wanted == [token for piece in pieces for token in piece.token_ids]
    assert (done.finish_reason, done.stopped_by) == ("stop", *how.values())[:1] + next(iter(how.values()))
    assert (
        done.text
        == "".join(p.text for p in pieces)
        == " ".join(map(word, wanted[: 3 if by == "id" else 2])) + ("" if by == "id" else " ")
    )
    assert done.logprobs is not None and len(done.logprobs) == 3 and done.tau == 2.0


def test_the_target_is_a_plain_llama(pair: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(pair / "target")
    prompt = _prompt(12)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
    assert ids[len(prompt) :] == oracle.continuation(prompt, 40)


def test_drafting_never_runs_the_target(pair: Path, monkeypatch: Patch) -> None:
    drafting, forward, propose = [], Llama.forward, DFlash.propose

    def watched_propose(self: DFlash, *args: object) -> object:
        drafting.append(self)
        try:
            return propose(self, *args)  # type: ignore[arg-type]
        finally:
            drafting.pop()

    def watched_forward(self: Llama, *args: object) -> object:
        assert not drafting
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DFlash, "propose", watched_propose)
    monkeypatch.setattr(Llama, "forward", watched_forward)
    assert _generate(pair, _prompt(10), "full").tau == BLOCK


def test_the_same_seed_gives_the_same_files(pair: Path, tmp_path: Path) -> None:
    oracle.build(tmp_path)
    files = sorted(p.relative_to(pair) for p in pair.rglob("*") if p.is_file())
    assert files and all((tmp_path / f).read_bytes() == (pair / f).read_bytes() for f in files)


# ---------------------------------------------------------------------------------------------------- with one mistake


def taps_shifted(by: int) -> Callable[[Patch, Path], None]:
    """Every tap taken one layer on: "input of layer i" for "output of layer i", or its mirror image."""

    def apply(_: Patch, drafter: Path) -> None:
        path = drafter / "config.json"
        config = json.loads(path.read_text())
        nested = config["dflash_config"]
        nested["target_layer_ids"] = [i + by for i in nested["target_layer_ids"]]
        path.write_text(json.dumps(config))

    return apply


def rows_late(patch: Patch, _: Path) -> None:
    """Entry j gets the taps of row j-1 (one request, absorbed in order)."""
    absorb = DFlash.absorb
    before: list[torch.Tensor] = []

    def late(self: DFlash, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        if rows.starts[0] == 0:
            before[:] = [tap[:1] for tap in taps]
        shifted = [torch.cat([old, tap[:-1]]) for old, tap in zip(before, taps, strict=True)]
        before[:] = [tap[-1:].clone() for tap in taps]
        absorb(self, rows, tokens, shifted)

    patch.setattr(DFlash, "absorb", late)


def positions_shifted(by: int) -> Callable[[Patch, Path], None]:
    """Context entry j rotated as if at j + by; the block stays at n, one too far with -1 and one too near with +1."""

    class Shifted:
        def __init__(self, rope: Rotation) -> None:
            self._rope = rope

        def rotate(self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
            return self._rope.rotate(x, (positions + by).clamp(min=0), alone=alone)

    def apply(patch: Patch, _: Path) -> None:
        absorb = ContextReader.absorb

        def moved(self: ContextReader, rows: Rows, *args: object) -> None:
            true = {request: self._held[request].ropes for request in rows.requests}
            for request, ropes in true.items():
                self._held[request].ropes = tuple(Shifted(rope) for rope in ropes)
            try:
                absorb(self, rows, *args)  # type: ignore[arg-type]
            finally:
                for request, ropes in true.items():
                    self._held[request].ropes = ropes

        patch.setattr(ContextReader, "absorb", moved)

    return apply


def labels_shifted(by: int) -> Callable[[Patch, Path], None]:
    """Drafts begin at slot 1 + by; with -1, a z-lab drafter is read by DeepSpec's convention."""

    def apply(patch: Patch, _: Path) -> None:
        read = DFlashConfig.from_config.__func__  # type: ignore[attr-defined]

        def from_config(cls: type[DFlashConfig], *args: object) -> DFlashConfig:
            config: DFlashConfig = read(cls, *args)
            return dataclasses.replace(config, first_row=config.first_row + by)

        patch.setattr(DFlashConfig, "from_config", classmethod(from_config))

    return apply


MISTAKES = {
    "taps one layer late": taps_shifted(1),
    "taps one layer early": taps_shifted(-1),
    "rows one late": rows_late,
    "positions one high": positions_shifted(1),
    "positions one low": positions_shifted(-1),
    "labels one high": labels_shifted(1),
    "labels one low": labels_shifted(-1),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("length", [10, 64])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_costs_the_acceptance(
    pair: Path, tmp_path: Path, monkeypatch: Patch, mistake: str, length: int, context: str
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(pair / "drafter", drafter)
    MISTAKES[mistake](monkeypatch, drafter)
    done = _generate(pair, _prompt(length), context, drafter)
    assert done.tau is not None and done.tau < 2
    assert list(done.token_ids) == oracle.continuation(_prompt(length), len(done.token_ids))
