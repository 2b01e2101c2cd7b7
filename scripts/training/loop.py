"""The training loop: steps that depend on the seed and their own number, a checkpoint now and then, the curve."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import nn

from foldspec.errors import ResourceError, UsageError
from training.store import Texts

__all__ = ["Learner", "Plan", "Report", "export", "train"]


@dataclass(frozen=True)
class Plan:
    """What a run does; a checkpoint goes on only under the plan that it was made by. Kinds of drafters add to it.

    ``sequences``     sequences a step (and worker)
    ``decay``         a draft's weight falls by e with so many drafts before it
    ``warm_up``       share of the steps in which the rate rises to ``rate``
    """

    steps: int
    seed: int
    sequences: int
    decay: float
    rate: float
    warm_up: float
    bf16: bool
    validation: int = 96  # sequences that a measurement reads

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to 2% of the rate."""
        warm = max(1, round(self.warm_up * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

    def begins_as(self, other: dict[str, Any], steps: int) -> bool:
        """Whether the first ``steps`` steps are those of another plan of this kind, given by its values."""
        return False


@dataclass(frozen=True)
class Report:
    """A measurement on validation texts. ``tau``: 1 + leading right drafts, mean over anchors. ``reach`` [drafts]:
    share of anchors, of those with so many drafts, at which at least so many lead."""

    step: int
    tau: float
    reach: tuple[float, ...]
    by_kind: dict[str, float]
    anchors: int


P = TypeVar("P", bound=Plan)


class Learner(nn.Module, ABC, Generic[P]):
    """A drafter in training. Its parameters that require a gradient learn; all of them are in the checkpoint.

    ``device``  where it computes
    """

    device: torch.device

    @abstractmethod
    def step_loss(self, plan: P, texts: Texts, step: int, rank: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss [] of a step on texts that depend on the plan's seed, ``step`` and ``rank`` alone; and what the
        curve notes beside it."""

    @abstractmethod
    def validate(self, plan: P, texts: Texts) -> Iterator[tuple[str, int, list[int]]]:
        """On validation texts, the same at every call: the text's kind, how many drafts a round makes, and at each
        anchor how many of them lead with being right."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """config.json and model.safetensors in bf16, as foldspec loads them."""


def export(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a drafter's folder; the weights are there whole or not at all. What is no integer becomes bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: t.detach().cpu() for name, t in tensors.items()}
    kept = {name: (t.bfloat16() if t.is_floating_point() else t).contiguous() for name, t in kept.items()}
    save_file(kept, folder / "model.part")
    (folder / "model.part").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def train(
    trainee: Learner[P],
    plan: P,
    sides: tuple[Texts, Texts],
    out: Path,
    *,
    save_every: int,
    say: Callable[[str], None],
    stop_after: int | None = None,
    made: dict[str, Any] | None = None,
) -> Report:
    """Train to the end of the plan, from the last checkpoint in ``out`` if there is one; ``made``: what else that
    checkpoint must have been made by. Raises :class:`UsageError` for one that was not, for an ``out`` where another
    process trains, and when the loss is no number any more.

    With ``torchrun`` (or RANK and WORLD_SIZE set) every worker draws its own batch and gradients are averaged.
    """
    rank, workers = _workers()
    weights = [p for p in trainee.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
    out.mkdir(parents=True, exist_ok=True)
    saved, curve = out / "last.pt", out / "curve.jsonl"
    held = FileLock(out / "lock", timeout=0) if rank == 0 else None
    try:
        if held is not None:
            held.acquire()
    except Timeout:
        raise UsageError("another process trains there", where=str(out)) from None
    step = 0
    if saved.exists():
        step = _go_on(saved, plan, made, trainee, optimizer)
        say(f"going on from step {step}")
    if rank == 0:
        _cut(curve, step)
    losses: list[float] = []
    while step < min(plan.steps, stop_after or plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step)
        with torch.autocast(trainee.device.type, torch.bfloat16, enabled=plan.bf16):
            loss, notes = trainee.step_loss(plan, sides[0], step, rank)
        optimizer.zero_grad()
        loss.backward()
        if workers > 1:
            for weight in weights:
                if weight.grad is not None:
                    dist.all_reduce(weight.grad)
                    weight.grad /= workers
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise UsageError(f"the loss is {losses[-1]} at step {step}", where=str(out), do="lower --rate")
        if rank == 0:
            with curve.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": losses[-1], **notes}) + "\n")
        if step % 20 == 0:
            noted = "".join(f"  {name} {value}" for name, value in notes.items())
            say(f"step {step}  loss {sum(losses) / len(losses):.4f}{noted}  rate {plan.rate_at(step):.1e}")
            losses.clear()
        if rank == 0 and (step % save_every == 0 or step == plan.steps):
            state = {"plan": asdict(plan), "made": made, "step": step, "trainee": trainee.state_dict()}
            _save(saved, {**state, "optimizer": optimizer.state_dict()})
            report = measure(trainee, plan, sides[1], step)
            _say_report(report, out, say)
    if held is not None:
        held.release()
    return measure(trainee, plan, sides[1], step)


def _save(path: Path, state: dict[str, Any]) -> None:
    """The whole checkpoint, or the one before. Raises :class:`ResourceError`."""
    part = path.with_suffix(".part")
    try:
        torch.save(state, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch's writer has an error of its own for a full disk
        part.unlink(missing_ok=True)
        raise ResourceError(f"cannot be written ({error!s:.100})", where=str(path)) from None


def _go_on(
    saved: Path, plan: Plan, made: dict[str, Any] | None, trainee: Learner[Any], optimizer: torch.optim.Optimizer
) -> int:
    """Load a checkpoint; its step. Raises :class:`UsageError` for one that was made by another plan. A plan of more or
    fewer steps is no other one if all steps so far would have been the same."""
    own = asdict(plan)
    wanted = {"plan": own, "made": made}
    try:
        state = torch.load(saved, map_location="cpu", weights_only=True)
        step, weights, moments = int(state["step"]), state["trainee"], state["optimizer"]
        before = {"made": made, "plan": state["plan"]} | {k: v for k, v in state.items() if k == "made"}
        if plan.begins_as({**own, "steps": before["plan"]["steps"]}, step):
            before["plan"] = {**before["plan"], "steps": plan.steps}
    except Exception as error:  # of pickle, zip and torch
        what = f"is no checkpoint ({type(error).__name__})"
        raise UsageError(what, where=str(saved), do="remove it to begin anew, or name another --out") from None
    differing = list(_differences(before, wanted))
    if not 0 <= step <= plan.steps:
        differing.append("step")
    if differing:
        what = f"was made by another plan: {', '.join(differing)}"
        raise UsageError(what, where=str(saved), do="name another --out")
    try:
        trainee.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"does not fit this drafter ({error!s:.100})"
        raise UsageError(what, where=str(saved), do="name another --out") from None
    return step


def _differences(a: Any, b: Any, name: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(a.get(key), b.get(key), str(key))
    elif a != b:
        yield name


def measure(trainee: Learner[P], plan: P, sequences: Texts, step: int) -> Report:
    """tau on validation texts: the same anchors at every measurement."""
    leading: list[int] = []
    able: list[int] = []
    by_kind: dict[str, list[int]] = defaultdict(list)
    with torch.autocast(trainee.device.type, torch.bfloat16, enabled=plan.bf16):
        for kind, drafts, found in trainee.validate(plan, sequences):
            leading += found
            able += [drafts] * len(found)
            by_kind[kind] += found
    return Report(
        step,
        1 + sum(leading) / max(1, len(leading)),
        tuple(sum(n > k for n in leading) / max(1, sum(n > k for n in able)) for k in range(max(able, default=0))),
        {kind: 1 + sum(found) / len(found) for kind, found in sorted(by_kind.items())},
        len(leading),
    )


def _workers() -> tuple[int, int]:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"no group of workers ({error!s:.100})", where="WORLD_SIZE", do="use torchrun") from None
    return dist.get_rank(), dist.get_world_size()


def _cut(curve: Path, step: int) -> None:
    """Drop what a stopped run wrote of the curve after its last checkpoint."""
    if curve.exists():
        kept = [
            line for line in curve.read_text(encoding="utf-8", errors="replace").splitlines() if _step(line) <= step
        ]
        part = curve.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(part, curve)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a torn last line
        return math.inf


def _say_report(report: Report, out: Path, say: Callable[[str], None]) -> None:
    reach = " ".join(f"{share:.2f}" for share in report.reach)
    kinds = " ".join(f"{kind} {tau:.2f}" for kind, tau in report.by_kind.items())
    say(f"validation at step {report.step}: tau {report.tau:.3f} ({reach}) {kinds}")
    with (out / "validation.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(report)) + "\n")
