"""verify in every version against the acceptance rules by themselves, on the host (``tests/verifying.py``)."""

from __future__ import annotations

import shutil
from typing import Any

import ahead_of_time
import torch
import verifying

from foldspec.acceptance import make_rule
from foldspec.kernels.verify import Blocks, Decided, Verify
from foldspec.kernels.verify.cuda import CudaVerify
from foldspec.noise import Noise
from gpu.known import unwatched
from gpu.rows import Absent, Numbers, Wrong
from gpu.setting import Setting, poisoned

__all__ = ["large_blocks", "verifier", "verify_large", "verify_rules"]

PASSES, DRY_PASSES = 40, 1  # of requests, a rule


def verifier(setting: Setting, version: str) -> Verify:
    """A version of verify; dry, the CUDA source compiled for this CPU. Raises :class:`Absent`."""
    if version == "cuda" and setting.dry:
        if shutil.which("c++") is None:
            raise Absent("no C++ compiler")
        return CudaVerify(verifying.Shim())
    if version == "cuda" and ahead_of_time.find_nvcc() is None:
        raise Absent("no nvcc")
    return setting.kernels(version).verify


def verify_rules(setting: Setting, version: str) -> Numbers:
    """Every rule with every option, on requests of every kind, against the rules by themselves on the host."""
    verify = verifier(setting, version)

    def there(blocks: Blocks) -> Decided:
        moved: dict[str, Any] = {
            name: x.to(setting.device) if isinstance(x, torch.Tensor) else x for name, x in vars(blocks).items()
        }
        # laws and vocabularies that no pair has: their variants are not the gate's
        with poisoned(), unwatched():
            decided = verify(Blocks(**moved))
        return Decided(*(x.cpu() for x in decided))

    passes = [verifying.some_pass(seed) for seed in range(DRY_PASSES if setting.dry else PASSES)]
    rules = list(verifying.EACH.values())
    differing = verifying.differences(there, passes, rules)
    if differing:
        raise Wrong(f"{len(differing)} decisions are others, the first: {differing[0]}"[:300])
    return {"decisions": sum(len(each.requests) for each in passes) * len(rules)}


def large_blocks(setting: Setting, rows: int, vocabulary: int, greedy: bool, accepted: int) -> Blocks:
    """A request whose first drafts are the argmax of their rows."""
    case = make_rule("exact").case()
    assert case is not None
    logits = torch.randn(rows, vocabulary, generator=setting.draw(), device=setting.device).to(setting.dtype)
    drafts = logits[: rows - 1].float().argmax(-1)
    if accepted < rows - 1:
        drafts[accepted] = (drafts[accepted] + 1) % vocabulary

    def number(value: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=setting.device)

    return Blocks(
        case,
        greedy,
        logits,
        first=number([0]),
        counts=number([rows - 1]),
        drafts=drafts[None],
        positions=number([1000]),
        keys=number([Noise(7).key]),
        temperatures=number([0.0 if greedy else 1.0], torch.float64),
        shares=case.by_draft(rows - 1, setting.device),
    )


def verify_large(setting: Setting, version: str) -> Numbers:
    rows, vocabulary = (3, 5000) if setting.dry else (16, 262_144)
    verify = verifier(setting, version)
    for accepted in (0, rows // 2, rows - 1):
        blocks = large_blocks(setting, rows, vocabulary, True, accepted)
        with poisoned():
            decided = verify(blocks)
        token = int(blocks.logits[accepted].float().argmax())
        found = int(decided.accepted[0]), int(decided.token[0]), int(decided.sound[0])
        if found != (accepted, token, rows):
            raise Wrong(f"(accepted, token, sound rows) are {found} and should be {(accepted, token, rows)}")
    return {"rows": rows, "vocabulary": vocabulary}
