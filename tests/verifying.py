"""For the tests of verify: requests of every kind, with laws of every kind, and the rules by themselves to compare
with; and its CUDA source, compiled to run on a CPU (``shim/cuda_runtime.h``)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foldspec.acceptance import RULES, make_rule
from foldspec.acceptance.base import AcceptanceRule
from foldspec.acceptance.on_device import OnDevice
from foldspec.engine import cache_folder
from foldspec.forcing import parse
from foldspec.kernels.build import compiler_command, csrc_path
from foldspec.kernels.verify import Verify
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import PointMass, Proposal, Sampled, Verdict
from foldspec.sampling import DraftSampling, Law, target_laws
from foldspec.schedule.request import Request

SHIM = Path(__file__).parent / "shim"
VOCABULARY = 57
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "linear": [
        {"leniency": 0.3},
        {"leniency": (0.0, 0.5, 1.0)},
        {"leniency": (0.4, 0.0, 0.4), "at_zero": "mixture_argmax"},
    ],
    "lenience": [{"leniency": 0.3}, {"leniency": 0.5, "residual": "relaxed"}, {"leniency": 1.0}],
    "cactus": [
        {"leniency": 0.5},
        {"leniency": 1.0, "divergence": "exact_kl", "residual": "verifier"},
        {"leniency": 0.2, "divergence": "modified"},
        {"leniency": 0.1, "divergence": "tv"},
        {"leniency": 0.1, "divergence": "chi2"},
        {"leniency": 0.0},
    ],
    "typical": [{}, {"epsilon": 0.01, "factor": 1.0}],
}
# by name: every rule with every option, and what forces acceptance
EACH: dict[str, AcceptanceRule] = {
    " ".join([name, *(f"{key}={value}" for key, value in options.items())]): make_rule(name, **options)
    for name in RULES
    for options in OPTIONS.get(name, [{}])
} | {f"forced {spec}": make_rule("exact", parse(spec)) for spec in ("2", "tau=2.5", "0.9,0.4")}


class Pass(NamedTuple):
    """What a rule is asked about in one pass."""

    logits: torch.Tensor
    requests: list[Request]
    proposals: list[Proposal]
    noises: list[Noise]

    def decide(self, rule: AcceptanceRule) -> list[tuple[Any, ...]]:
        """What comes of each verdict: what is committed, what is counted, and whether the request fails."""
        targets = target_laws(self.logits, self.requests, self.proposals)
        verdicts = rule.decide(targets, self.proposals, self.noises)
        return [outcome(*each) for each in zip(verdicts, self.proposals, [t.sound for t in targets], strict=True)]


def outcome(verdict: Verdict, proposal: Proposal, sound: int) -> tuple[Any, ...]:
    """As ``Rounds`` looks at it: nothing of rows that are not finite."""
    outside = tuple(row for row in verdict.outside if row < min(sound, verdict.accepted))
    return verdict.run(proposal)[:sound], min(verdict.accepted, sound), outside, verdict.accepted >= sound, sound


def some_pass(seed: int, vocabulary: int = VOCABULARY) -> Pass:
    """One to four requests: greedy and sampled, filtered and penalized; drafts that are points, drawn, settled, drawn
    from part of the vocabulary or in float64; ties, bf16, and rows that are not finite."""
    chance, torch_chance = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [chance.randint(0, 6) for _ in range(chance.randint(1, 4))]
    logits = 1.5 * torch.randn(sum(counts) + len(counts), vocabulary, generator=torch_chance)
    if chance.random() < 0.3:
        logits = (logits * 2).round() / 2
    if chance.random() < 0.3:
        logits = logits.bfloat16()
    requests, noises, proposals, row = [], [], [], 0
    for i, count in enumerate(counts):
        noises.append(Noise(chance.getrandbits(64)))
        prompt, output = (tuple(chance.choices(range(vocabulary), k=k)) for k in (4, chance.randint(0, 3)))
        params = _params(chance)
        requests.append(Request(i, prompt, 1000, frozenset([5]), params=params, output=list(output)))
        own = logits[row : row + count].float()
        proposals.append(_proposal(own, noises[-1], len(prompt) + len(output) - 1, chance, torch_chance))
        row += count + 1
    if chance.random() < 0.15:
        logits = logits.clone()
        logits[chance.randrange(len(logits)), chance.randrange(vocabulary)] = chance.choice([math.nan, math.inf])
    return Pass(logits, requests, proposals, noises)


def _params(chance: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"temperature": chance.choice([0.0, 0.7, 1.0, 1.3])}
    if chance.random() < 0.3:
        options["top_k"] = chance.randint(1, 20)
    if chance.random() < 0.3:
        options["top_p"] = chance.choice([0.3, 0.9])
    if chance.random() < 0.2:
        options["min_p"] = chance.choice([0.05, 0.3])
    if chance.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    if chance.random() < 0.2:
        options |= {"logit_bias": {3: 1.5}, "min_tokens": chance.randint(0, 6)}
    return SamplingParams(**options)


def _proposal(
    own: torch.Tensor, noise: Noise, anchor: int, chance: random.Random, torch_chance: torch.Generator
) -> Proposal:
    vocabulary, kind = own.shape[1], chance.random()
    if kind < 0.4:
        return PointMass(
            tuple(int(row.argmax()) if chance.random() < 0.7 else chance.randrange(vocabulary) for row in own)
        )
    how = DraftSampling(temperature=chance.choice([0.8, 1.2]), top_k=chance.choice([0, 0, 10]))
    drafts: Sampled[Law] = how.begin(noise, anchor)
    for i, row in enumerate(own):
        logits = row + 0.7 * torch.randn(vocabulary, generator=torch_chance)
        if kind < 0.55:
            ids = torch.arange(0, vocabulary, 2)
            drafts.draw(how.law(logits[ids], ids))
        else:
            drafts.draw(how.law(logits.double() if kind < 0.65 else logits))
        if kind > 0.9 and i % 2:
            drafts.settle(i)
    return drafts


def differences(verify: Verify, passes: Sequence[Pass], rules: Sequence[AcceptanceRule]) -> list[Any]:
    """Where an implementation decides otherwise than the rules by themselves."""
    found = []
    for i, each in enumerate(passes):
        for rule in rules:
            wanted, own = each.decide(rule), each.decide(OnDevice(rule, verify))
            found += [(i, rule.law(), a, b) for a, b in zip(wanted, own, strict=True) if a != b]
    return found


class Shim:
    """CUDA sources compiled for this CPU, with ``changes`` to their text."""

    reason = None

    def __init__(self, source: str = "verify.cu", changes: Sequence[tuple[str, str]] = (), *flags: str) -> None:
        self.library = ctypes.CDLL(str(_compiled(source, tuple(changes), flags)))

    def function(self, name: str, arguments: list[Any], result: Any = None) -> Any:
        function = self.library[f"foldspec_{name}"]
        function.argtypes, function.restype = arguments, result
        return function

    def order(self, seed: int) -> None:
        """In which random order threads run; 0: in that of their numbers."""
        self.library.shim_order(seed)


@functools.cache
def _compiled(source: str, changes: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> Path:
    """Kept like a compiled kernel, by its text."""
    texts = {path.name: path.read_text() for folder in (csrc_path() / "cuda", SHIM) for path in folder.iterdir()}
    for old, new in changes:
        assert sum(text.count(old) for text in texts.values()) == 1, old
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-fPIC", "-shared", "-fvisibility=hidden", *flags]
    command = [*compiler_command(None), *options, "-x", "c++", source]
    name = hashlib.sha256(repr((sorted(texts.items()), command)).encode()).hexdigest()[:24]
    kept = cache_folder() / "kernels" / f"shim-{name}.so"
    if not kept.exists():
        folder = kept.with_suffix(".sources")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(text)
        # quotes name the folder of the file itself, so its neighbours are found first; brackets, only -I
        subprocess.run([*command, "-I.", "-o", "library.so"], cwd=folder, check=True, capture_output=True, text=True)
        (folder / "library.so").replace(kept)
        shutil.rmtree(folder)
    return kept
