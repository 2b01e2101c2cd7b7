"""verify against the rules by themselves, which decide one request at a time on the host: in torch, in CUDA C++ that
runs here on the CPU, and in Triton, interpreted. Then what only whole batches show: laws, large vocabularies, and
planted mistakes, each of which must be found."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from tritons import interpreted
from verifying import EACH, SHIM, Shim, differences, some_pass

from foldspec import SamplingParams
from foldspec.acceptance import RULES, make_rule
from foldspec.acceptance.on_device import OnDevice
from foldspec.errors import UsageError
from foldspec.kernels.build import compiler_command
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.verify import CASES, Blocks, Case, Facts, Verify, reference
from foldspec.kernels.verify.cuda import CudaVerify
from foldspec.kernels.verify.filters import cuts
from foldspec.noise import philox

ROOT = Path(__file__).parents[2]
IN_TRITON = "tests/interpreted/test_verify.py"
RULES_OF_ALL = list(EACH.values())


def shim(order: int = 0, *changes: tuple[str, str]) -> Verify:
    built = Shim("verify.cu", changes)
    built.order(order)
    return CudaVerify(built)


def test_every_rule_has_a_case() -> None:
    """A rule without one decides by itself, on the host; none may have to."""
    cases = {name: rule.case() for name, rule in EACH.items()}
    assert {name for name, case in cases.items() if case is None} == set()
    assert {case.kind for case in cases.values() if case is not None} == set(CASES)
    assert {name.split()[0] for name in EACH} == {*RULES, "forced"}


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.slow)])
def test_torch_decides_as_the_rules_do(seeds: range) -> None:
    assert differences(reference.verify, [some_pass(seed) for seed in seeds], RULES_OF_ALL) == []


@pytest.mark.parametrize(
    ("order", "seeds"), [(0, range(4)), (7, range(4, 7)), pytest.param(3, range(7, 60), marks=pytest.mark.slow)]
)
def test_cuda_decides_as_the_rules_do(order: int, seeds: range) -> None:
    assert differences(shim(order), [some_pass(seed) for seed in seeds], RULES_OF_ALL) == []


def test_triton_decides_as_the_rules_do() -> None:
    interpreted("not slow", IN_TRITON)


@pytest.mark.slow
def test_triton_decides_as_the_rules_do_at_length() -> None:
    interpreted("slow", IN_TRITON)


# ------------------------------------------------------------------------------------------------------------ the noise


def test_the_bits_of_a_million_keys() -> None:
    """Of CUDA as of torch, whose own are those of Random123 (``unit/test_noise.py``)."""
    counters = some_counters(1_000_000)
    words = torch.empty(len(counters), 4, dtype=torch.int64)
    built = Shim("noise_bits.cu")
    run = built.function("noise_bits", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p])
    run(counters.data_ptr(), len(counters), words.data_ptr())
    assert torch.equal(words, words_of(counters))


def some_counters(count: int) -> torch.Tensor:
    """[count, 6]: four words of a counter and two of a key, from all over 32 bits."""
    chance = torch.Generator().manual_seed(5)
    counters = torch.randint(0, 1 << 32, (count, 6), generator=chance)
    counters[0], counters[1] = 0, (1 << 32) - 1
    return counters


def words_of(counters: torch.Tensor) -> torch.Tensor:
    c = counters.unbind(1)
    return torch.stack(philox(c[:4], (c[4], c[5])), dim=1)


# ------------------------------------------------------------------------------------------------------- large and many


def blocks(
    case: Case,
    requests: int,
    drafts: int,
    vocabulary: int,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    q: bool = True,
    filtered: bool = False,
    seed: int = 0,
) -> Blocks:
    """Drafts that follow their laws, by chance of their own; every request has the same rows."""
    chance = torch.Generator().manual_seed(seed)
    logits = (1.3 * torch.randn(drafts + 1, vocabulary, generator=chance)).to(dtype)
    own = logits[:drafts].float() + 0.8 * torch.randn(drafts, vocabulary, generator=chance)
    if q:
        tokens = torch.multinomial(own.softmax(-1), requests, replacement=True, generator=chance).T.contiguous()
    else:
        tokens = logits[:drafts].argmax(-1).repeat(requests, 1)
        tokens[torch.arange(requests), torch.arange(requests) % drafts] += 1
    whole = torch.arange(requests)
    floor = last = None
    if filtered:
        rows = torch.ones(drafts + 1, dtype=torch.float64)
        floor, last = cuts(logits, rows * temperature, rows.long() * 50, rows * 0.9, rows * 1e-3)
    return Blocks(
        case,
        temperature == 0,
        logits,
        torch.zeros_like(whole),
        torch.full_like(whole, drafts),
        tokens,
        torch.full_like(whole, 7),
        torch.stack((whole, whole + 3), -1),
        torch.full((requests,), temperature, dtype=torch.float64),
        case.by_draft(drafts, "cpu"),
        floor,
        last,
        own if q else None,
        torch.arange(drafts).repeat(requests, 1) if q else None,
        torch.full_like(whole, 2) if case.kind == "forced" else None,
    )


def same(verify: Verify, given: Blocks) -> None:
    found, wanted = verify(given), reference.verify(given)
    for a, b in zip(found, wanted, strict=True):
        assert a.tolist() == b.tolist()


LARGE = {
    "greedy": ("exact", {"temperature": 0.0, "q": False, "dtype": torch.bfloat16}),
    "exact": ("exact", {"dtype": torch.bfloat16}),
    **{name: (name, {}) for name in EACH if name not in ("exact",)},
    "filtered": ("cactus leniency=0.5", {"filtered": True}),
    "lenience at zero": ("lenience leniency=0.3", {"temperature": 0.0}),
    "mixture at zero": (next(name for name in EACH if "mixture" in name), {"temperature": 0.0}),
}
EVERYDAY = ("greedy", "exact")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.slow) for n in LARGE])
def test_a_vocabulary_of_262144_and_16_rows(name: str) -> None:
    rule, about = LARGE[name]
    case = EACH[rule].case()
    assert case is not None
    same(shim(), blocks(case, 1, 15, 262_144, **about))


@pytest.mark.parametrize("count", [500, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_first_token_follows_its_law(share: float, count: int) -> None:
    """Theorem 1: that of linear is (1 - lambda) p + lambda q, and lambda 0 is p."""
    given = blocks(Case("linear", (share,)), count, 1, 24, seed=3)
    found = shim()(given)
    first = torch.where(found.accepted > 0, given.drafts[:, 0], found.token)
    assert given.q is not None
    p, q = given.logits[0].double().softmax(-1), given.q[0].double().softmax(-1)
    law = (1 - share) * p + share * q
    assert stats.chisquare(torch.bincount(first, minlength=24), law * count).pvalue > 1e-3
    chance = float(torch.minimum(law, q).sum())
    assert stats.binomtest(int((found.accepted > 0).sum()), count, chance).pvalue > 1e-3
    wrong = stats.chisquare(torch.bincount(first, minlength=24), q * count).pvalue
    assert wrong < 1e-6  # there is power in it


# ----------------------------------------------------------------------------------------------------- planted mistakes

BEGIN = "static_cast<int64_t>(blockIdx.x) * CHUNK, end = min(v.vocabulary, begin + CHUNK)"
MISTAKES = {
    "a barrier less": ("  __syncthreads();\n  mine = warp_best(", "  mine = warp_best("),
    "a barrier less, sums": ("  __syncthreads();\n  x = warp_sum(lane", "  x = warp_sum(lane"),
    "of equal ones the higher id": ("return a.id < b.id ? a : b;", "return a.id > b.id ? a : b;"),
    "the last id that is kept": ("id <= last)", "id < last)"),
    "no filter": ("temperature > 0 && v.floor != nullptr", "false"),
    "lambda of the first draft": ("allowed = (1 - v.shares[place])", "allowed = (1 - v.shares[0])"),
    "not strictly less": ("* q < allowed", "* q <= allowed"),
    "noise of the row before": ("uniform(v.positions[request] + place,", "uniform(v.positions[request] + place - 1,"),
    "seeds of 32 bits": ("static_cast<uint32_t>(key[1]));\n  return", "0);\n  return"),
    "noise of the other id": ("noise[odd] = -log", "noise[1 - odd] = -log"),
    "the purpose of a residual": ("r.residual ? RESIDUAL : TARGET", "TARGET"),
    "residual of p": ("- r.times * q, mass", "- 0 * q, mass"),
    "how cactus scales p": ("d.times = others / (others - step)", "d.times = 1"),
    "entropy": ("warm ? total - also : 0.0", "0.0"),
    "what p rules out": ("found[3 + place] = place < accepted &&", "found[3 + place] ="),
    "rows that are not finite": ("while (sound <= count && drafts[sound].finite)", "while (sound <= count)"),
    "one chunk for all": (f"{BEGIN};\n  Best<float>", f"{BEGIN.replace('blockIdx.x', '0')};\n  Best<float>"),
}


def ruled_out() -> Blocks:
    """Drafts that neither law has: u q(y) and p(y) are 0."""
    given = blocks(Case("exact"), 4, 3, 40)
    assert given.q is not None
    given.logits[:, 1] = given.q[:, 1] = -torch.inf
    given.drafts[:] = 1
    return given


# what shows a mistake that requests of one chunk do not
SHOWN_BY: dict[str, Callable[[], Blocks]] = {
    "a barrier less": lambda: blocks(Case("exact"), 4, 5, 9000),
    "a barrier less, sums": lambda: blocks(Case("exact"), 4, 5, 9000),
    "one chunk for all": lambda: blocks(Case("exact"), 2, 5, 9000, temperature=0.0, q=False),
    "not strictly less": ruled_out,
    "what p rules out": lambda: blocks(Case("linear", (0.2,)), 4, 5, 40, temperature=0.0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "a barrier less" else pytest.mark.slow) for n in MISTAKES]
)
def test_a_planted_mistake_is_found(name: str) -> None:
    wrong = shim(7, MISTAKES[name])
    if name in SHOWN_BY:
        with pytest.raises(AssertionError):
            same(wrong, SHOWN_BY[name]())
    else:
        assert any(differences(wrong, [some_pass(seed)], RULES_OF_ALL) for seed in range(60))


def test_a_barrier_that_only_some_threads_reach_ends_the_process() -> None:
    change = "  mine = warp_best(mine);\n", "  if (threadIdx.x == 0) __syncthreads();\n  mine = warp_best(mine);\n"
    done = in_a_process(f"same(shim(0, {change!r}), blocks(Case('exact'), 1, 2, 50, temperature=0.0, q=False))")
    assert done.returncode == -6 and "a barrier that not all threads" in done.stderr


@pytest.mark.slow
def test_no_undefined_behaviour() -> None:
    done = in_a_process(
        "flags = '-fsanitize=undefined', '-fno-sanitize-recover=all'\n"
        "run = CudaVerify(Shim('verify.cu', (), *flags))\n"
        "assert differences(run, [some_pass(seed) for seed in range(8)], RULES_OF_ALL) == []\n"
        "same(run, blocks(Case('exact'), 2, 3, 9000, dtype=torch.bfloat16))"
    )
    assert (done.returncode, done.stderr) == (0, "")


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    head = "import sys; sys.path[:0] = ['tests', 'tests/kernels', 'scripts']\nfrom test_verify import *\n"
    head += "from verifying import *\nfrom foldspec.kernels.verify.cuda import CudaVerify\n"
    return subprocess.run([sys.executable, "-c", head + code], cwd=ROOT, capture_output=True, text=True)


# -------------------------------------------------------------------------------------------------------------- at work


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("drafts", [0, 5])
def test_torch_looks_at_nothing_on_the_host(drafts: int, greedy: bool) -> None:
    """So that it may be part of a CUDA graph."""
    with FakeTensorMode():
        whole, real = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
        by_draft = whole[:, None].repeat(1, drafts)
        rows = torch.zeros(3 * (drafts + 1), dtype=torch.float64)
        logits = torch.zeros(len(rows), 101, dtype=torch.bfloat16)
        floor, last = cuts(logits, rows, rows.long(), rows, rows)
        for kind in CASES:
            case = Case(kind, (0.5,), 0.5, 0.3, "exact_kl", relaxed=True, mixture=kind == "linear")
            shares = torch.zeros(drafts, dtype=torch.float64)
            given = Blocks(
                case, greedy, logits, whole, whole, by_draft, whole, torch.zeros(3, 2, dtype=torch.int64), real,
                shares, floor, last, torch.zeros(4, 101), by_draft, whole,
            )  # fmt: skip
            assert [tuple(x.shape) for x in reference.verify(given)] == [(3,), (3,), (3,), (3, drafts)]


PARAMS = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.9, seed=4, top_k=30)]


@pytest.mark.parametrize("rule", ["exact", "match", "typical"])
def test_an_engine_that_decides_on_the_device_says_the_same(rule: str) -> None:
    pair = tiny.PAIRS / "a_llama_zlab"
    with tiny.Engine.load(target=str(pair / "target"), drafter=str(pair / "drafter"), accept=rule) as engine:
        prompts = [[5, 6, 7], [9, 8, 7, 6]]
        wanted = engine.generate(prompts, PARAMS)
        calls = []

        def verify(given: Blocks) -> Any:
            calls.append(len(given.counts))
            return reference.verify(given)

        engine._rounds.rule = OnDevice(make_rule(rule), verify)
        found = engine.generate(prompts, PARAMS)
        assert [(c.token_ids, c.rounds) for c in found] == [(c.token_ids, c.rounds) for c in wanted]
        assert 2 in calls


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


GPU, CPU = Facts("cuda", torch.bfloat16), Facts("cpu", torch.float32)


@pytest.mark.parametrize("which", ["triton", "torch"])
def test_without_nvcc_one_line_says_so(which: str, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    monkeypatch.setitem(sys.modules, "triton", there if which == "triton" else None)
    kernels = Kernels("auto", Library(tmp_path / "kernels"))
    kernels.choose("verify", CPU)
    assert kernels.notices == ()  # nobody asked for it
    kernels.choose("verify", GPU)
    kernels.choose("verify", GPU)
    word = {"triton": "Triton", "torch": "torch"}[which]
    assert kernels.notices == (
        f"CUDA verification kernel not built (nvcc was not found on the path); using the {word} implementation, same "
        "results; install CUDA's nvcc, or name its folder in CUDA_HOME",
    )
    choice = kernels.choices[-1]
    assert choice.name == {"triton": "triton", "torch": "reference"}[which]
    assert dict(choice.refused)["cuda"] == "not compiled: nvcc was not found on the path"


def test_without_nvcc_it_is_an_error_where_it_was_asked_for(gpu: None, tmp_path: Path) -> None:
    kernels = Kernels("cuda", Library(tmp_path / "kernels", nvcc=str(tmp_path / "nvcc")))
    with pytest.raises(UsageError, match=r"cuda: not compiled: .*nvcc was not found"):
        kernels.choose("verify", GPU)


def test_what_it_does_not_do(tmp_path: Path) -> None:
    cuda = CudaVerify(Library(tmp_path).gpu)
    assert cuda.supports(CPU) == "runs on a GPU, not on cpu"
    assert cuda.supports(Facts("cuda", torch.float16)) == "reads float32 and bfloat16, not float16"


def test_it_is_built_once_for_each_kind_of_gpu(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for nvcc that makes the functions for this CPU."""
    log, nvcc = tmp_path / "log", tmp_path / "nvcc"
    real = " ".join(compiler_command(None))
    options = f"-std=c++17 -O0 -w -fPIC -shared -I{SHIM} -x c++"
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 13.0 && exit\n'
        'for word; do case "$word" in -arch=*) echo "$word" >> ' + str(log) + ';; *.cu) source="$word";; esac; '
        f'last="$word"; done\nexec {real} {options} "$source" -o "$last"\n'
    )
    nvcc.chmod(0o755)
    for capability in ((9, 0), (9, 0), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        kernels = Kernels("auto", Library(tmp_path / "kernels", nvcc=str(nvcc)))
        kernels.choose("verify", GPU)
        assert kernels.choices[0].name == "cuda" and kernels.notices == ()
    assert log.read_text().split() == ["-arch=sm_90", "-arch=sm_80"]
    run: Callable[[Blocks], Any] = CudaVerify(Library(tmp_path / "kernels", nvcc=str(nvcc)).gpu)
    same(run, blocks(Case("exact"), 2, 3, 50))
