"""Multi-step drafting against recorded numbers: quotas, choices, scores, the uniform step, and the law of the output
that the toy drafters of the recording have, biased ones included, by every outcome of the noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from denoising import Toy, ToyDrafter, output_law, plain_law
from output_laws import mutant
from tables import total_variation

from foldspec.acceptance import make_rule
from foldspec.drafters import denoise
from foldspec.drafters.denoise import Masked, score
from foldspec.drafters.denoise_uniform import Ancestral, posterior
from foldspec.effort import Effort, above, balanced, dream, within
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.sampling import DraftSampling

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_diffusion.json").read_text())
CASES: dict[str, Any] = GOLDEN["diffusion"]
DRAWN = DraftSampling(temperature=1.0)
Canvas = Sequence[int | None]


def logs(probs: Any) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


class Given(Noise):
    """A draw of a law takes its likeliest, and a random id is ``token``."""

    def __init__(self, token: int = 0) -> None:
        super().__init__(0)
        self._token = token

    def whole(self, count: int, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        return self._token

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        return law.likeliest()


def revealed(effort: Effort, rows: Any, quota: str = "balanced", block: int | None = None) -> list[list[int]]:
    """Places that each step reveals, where the network always says the same."""
    block_of = Masked(effort, DRAWN, Given(), 0, len(rows), quota=quota, block=block)
    found = []
    while not block_of.done:
        before = block_of.masked
        block_of.step(logs([rows[i] for i in before]))
        found.append([i for i in before if i not in block_of.masked])
    assert block_of.steps_used == len(found) == block_of.proposal.steps
    return found


@pytest.mark.parametrize("quota, name", [("balanced", "static_transfer_counts"), ("dream", "dream_transfer_counts")])
def test_how_many_places_a_step_reveals(quota: str, name: str) -> None:
    """A step that reveals none is no step."""
    for case in CASES[name]:
        counts = {"balanced": balanced, "dream": dream}[quota](case["block"], case["steps"])
        assert counts == case["counts"]
        effort = Effort(steps=case["steps"], order="entropy")
        found = revealed(effort, [[0.5 + i / 40, 0.5 - i / 40] for i in range(case["block"])], quota)
        assert [len(step) for step in found] == [count for count in case["counts"] if count]


@pytest.mark.parametrize("order", ["dynamic", "dynamic_top1"])
def test_places_above_a_threshold(order: str) -> None:
    for case in CASES["dynamic_threshold"]:
        scores, least, threshold = case["confidence"], case["min_transfer"], case["threshold"]
        assert above(scores, threshold, least) == case["chosen"]
        steps = len(scores) // least  # as many as give this quota
        # the largest of each law is its confidence, which Given draws
        rows = [[value, *[(1 - value) / 19] * 19] for value in scores]
        effort = Effort(steps=steps, confidence=threshold + 1e-9, order=order)  # 0.9 is not above 0.9
        assert revealed(effort, rows)[0] == case["chosen"]


def test_places_within_an_entropy_bound() -> None:
    for case in CASES["entropy_bound"]:
        assert within(case["entropy"], case["gamma"]) == case["chosen"]


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 0.8, 2.0])
def test_the_entropy_bound_of_a_block(gamma: float) -> None:
    rows = [[0.9, 0.1], [0.6, 0.4], [0.99, 0.01], [0.8, 0.2]]
    entropies = [Law(logs(row)).entropy() for row in rows]
    assert revealed(Effort(entropy_bound=gamma), rows)[0] == sorted(within(entropies, gamma))


def test_scores() -> None:
    for case in CASES["confidence_scores"]:
        law = Law(logs(case["p"]))
        assert score("dynamic_top1", 0, law) == pytest.approx(case["top1"], abs=1e-9)
        assert score("topk_margin", 0, law) == pytest.approx(case["margin"], abs=1e-9)
        assert score("entropy", 0, law) == pytest.approx(case["neg_entropy"], abs=1e-9)
        assert score("static", 0, law, 1) == pytest.approx(case["p"][1], abs=1e-9)


def test_the_last_step_of_uniform_diffusion() -> None:
    for case in CASES["uniform_final_step"]:
        x, z, alpha = torch.tensor(case["x_theta"], dtype=torch.float64), case["z"], case["alpha_t"]
        assert posterior(x, z, alpha, 1.0).tolist() == pytest.approx(case["q"], abs=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_steps_of_an_ancestral_block_are_its_posteriors(steps: int) -> None:
    """Before step i the signal is i / K; the law that is kept is that of the last."""
    x, z = torch.tensor([0.2, 0.1, 0.4, 0.3], dtype=torch.float64), 3
    block = Ancestral(Effort(steps=steps), DRAWN, Given(z), 5, 1, 4)
    for i in range(steps):
        wanted = posterior(x, z, i / steps, (i + 1) / steps)
        block.step(x.log()[None])
        assert wanted.sum() == pytest.approx(1.0) and block.canvas == [int(wanted.argmax())]
        (z,) = block.canvas
    assert block.proposal.law(0).probs().tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


# ---------------------------------------------------------------------------------------------- the law of the output


def fixed(laws: dict[Any, Any]) -> Callable[[Any, Canvas], Any]:
    return lambda before, canvas: laws[tuple(canvas)]


FIRST = {0: [0.8, 0.2], 1: [0.3, 0.7]}  # of the left place, given the right one
SECOND = {0: [0.85, 0.15], 1: [0.25, 0.75]}  # of the right place, given the left one
TARGET = {(): [0.7, 0.3], (0,): [0.9, 0.1], (1,): [0.2, 0.8]}


def pair(first: Sequence[float]) -> Toy:
    """``first``: of the left place, given nothing; the right one has 0.6."""
    laws: dict[Any, Any] = {(None, None): (first, [0.6, 0.4])}
    for token in (0, 1):
        laws[None, token] = (FIRST[token], [1.0, 0.0])
        laws[token, None] = ([1.0, 0.0], SECOND[token])
    return Toy(lambda out: TARGET[out[:1]] if len(out) < 2 else [0.5, 0.5], fixed(laws), 2)


EVEN, FLAT = pair([0.6, 0.4]), pair([0.5, 0.5])  # of the flat one, an order by certainty takes the right place first
TWO: dict[str, tuple[Toy, Effort]] = {
    "one_step": (EVEN, Effort(q_mode="reveal_step")),
    "left_to_right": (EVEN, Effort(steps=2, order="sequential", q_mode="reveal_step")),
    "right_first_reveal_q": (FLAT, Effort(steps=2, order="topk_margin", q_mode="reveal_step")),
    "right_first_point_mass": (FLAT, Effort(steps=2, order="entropy", q_mode="exact")),
    "all_point_mass": (FLAT, Effort(steps=2, order="topk_margin", q_mode="point_mass")),
    "keep_most_confident_sample": (EVEN, Effort(steps=2, order="static", q_mode="reveal_step")),
}


@pytest.mark.parametrize("case", CASES["two_position_law"], ids=lambda case: case["mode"])
def test_the_law_of_two_places(case: dict[str, Any]) -> None:
    toy, effort = TWO[case["mode"]]
    drafter = ToyDrafter(toy, effort, DRAWN, whole=True)
    found, _ = output_law(toy, make_rule("exact"), drafter, 3, count=2)
    assert found == pytest.approx({(int(a), int(b)): mass for (a, b), mass in case["joint"].items()}, abs=1e-9)
    wanted = plain_law(toy, 2)
    assert total_variation(found, wanted) == pytest.approx(case["tv_joint"], abs=1e-9)
    first = sum(mass for out, mass in found.items() if out[0] == 0)
    assert abs(first - 0.7) == pytest.approx(case["tv_first_token"], abs=1e-9)
    assert bool(drafter.biased) == (case["tv_joint"] > 1e-9)


def three() -> Toy:
    """Given one place, the others know which it is and what it holds."""

    def network(before: Any, canvas: Canvas) -> Any:
        known = [(i, token) for i, token in enumerate(canvas) if token is not None]
        if not known:
            return [[0.55, 0.45], [0.7, 0.3], [0.6, 0.4]]
        ((kept, token),) = known
        x = [0.2 + 0.15 * ((place + 2 * kept + 3 * token) % 5) for place in range(3)]
        return [[a, 1 - a] for a in x]

    def target(output: Any) -> list[float]:
        x = 0.25 + 0.1 * ((len(output) + 2 * sum(output)) % 6)
        return [x, 1 - x]

    return Toy(target, network, 3)


def dynamic() -> Toy:
    def network(before: Any, canvas: Canvas) -> Any:
        left, right = canvas
        if left is None and right is None:
            return [0.8, 0.2], [0.7, 0.3]
        law = [0.65, 0.35] if (right if left is None else left) == 0 else [0.4, 0.6]
        return law, law

    laws = {(): [0.5, 0.5], (0,): [0.6, 0.4], (1,): [0.3, 0.7]}
    return Toy(lambda out: laws[out[:1]] if len(out) < 2 else [0.5, 0.5], network, 2)


def emitted(toy: Toy, effort: Effort, begin: Any = Masked, **how: Any) -> float:
    def made(*arguments: Any) -> Any:
        return begin(*arguments, **how)

    found, _ = output_law(
        toy, make_rule("exact"), ToyDrafter(toy, effort, DRAWN, made, whole=True), toy.places + 1, toy.places
    )
    return total_variation(found, plain_law(toy, toy.places))


@pytest.mark.parametrize("case", GOLDEN["emitted_law"], ids=lambda case: f"{case['example'][:3]} {case['q_mode']}")
def test_the_law_of_what_is_emitted(case: dict[str, Any]) -> None:
    mode = case["q_mode"]
    if case["example"].startswith("three"):  # one place, then two
        effort = Effort(steps=2, order="maskgit_plus", q_mode=mode)
        found = emitted(three(), effort, quota="dream")
    elif mode == "last_step_q":  # what foldspec does not do: the last step is told by its own tokens
        choice = "chosen = self._choose(laws, logits, ids, tokens, number)"
        wrong = mutant(denoise, choice, f"{choice}; last = len(chosen) == len(places)")["Masked"]
        found = emitted(dynamic(), Effort(confidence=0.6, order="dynamic", q_mode="exact"), wrong)
    else:
        found = emitted(dynamic(), Effort(confidence=0.6, order="dynamic", q_mode=mode))
    assert found == pytest.approx(case["tv_joint"], abs=1e-9)


@pytest.mark.parametrize("order", ["dynamic", "dynamic_top1"])
def test_a_threshold_is_exact_where_the_last_step_is_told_beforehand(order: str) -> None:
    """By the likeliest token; and by the drawn one, if what it may have ended counts as a point mass."""
    assert emitted(dynamic(), Effort(confidence=0.6, order=order, q_mode="exact")) < 1e-12
