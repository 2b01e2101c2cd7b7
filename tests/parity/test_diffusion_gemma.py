"""DiffusionGemma's encoder and decoder equal transformers' within 1e-4 in fp32, for canvases of any length behind
contexts of any length, however these were fed; a canvas leaves nothing behind; every deliberate mistake shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusion
import pytest
import tiny
import torch
import torch.nn.functional as F
from diffusion import WINDOW, denoise, encode
from oracles import close
from safetensors.torch import load_file

from foldspec.cache.paged import PagedCache
from foldspec.models import diffusion_gemma, gemma4
from foldspec.models.diffusion_gemma import DiffusionGemma, MixedBlock
from foldspec.models.layers import Matrix, masked_attention
from foldspec.models.mask import CAUSAL, FULL, Mask

STEPS = (48, 47, 46)
VOCABULARY = diffusion.CONFIG["text_config"]["vocab_size"]


def opened(model: DiffusionGemma, *requests: int, longest_pass: int = 21) -> PagedCache:
    """Rings are the least that serve such passes."""
    cache = tiny.paged_cache(model, longest_pass=longest_pass)
    for request in requests or (0,):
        cache.open(request)
    return cache


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return {k: v[0] if v.dim() > 1 else v for k, v in load_file(diffusion.GOLDEN / "golden.safetensors").items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion.write(tmp_path_factory.mktemp("diffusion"))


@pytest.fixture(scope="module")
def model(folder: Path) -> DiffusionGemma:
    return diffusion.load(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> diffusion.Oracle:
    return diffusion.Oracle(folder)


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_golden_checkpoint(golden: dict[str, torch.Tensor], kernels: str) -> None:
    """Layers of the encoder and what it stores; three steps that hand their processed logits on; the next block; a
    block of which three tokens and another one stay."""
    model = diffusion.load(diffusion.GOLDEN, kernels)
    cache, ids = opened(model), golden["input_ids"].tolist()
    for i, tap in enumerate(encode(model, cache, ids, taps=range(model.layer_count)).taps):
        close(tap, golden[f"enc.hidden.layer.{i:02d}"])
    for i, layer in enumerate(model.layout):
        first = len(ids) - layer.window + 1 if layer.window else 0
        for kept, name in zip(cache.entries(i, 0, first), "kv", strict=True):
            close(tiny.dense(kept).transpose(0, 1), golden[f"state.{name}.{i:02d}"])
    before = None
    for step in STEPS:
        close(
            denoise(model, cache, [golden[f"step{step}.canvas_in"].tolist()], before=before),
            golden[f"step{step}.logits"],
        )
        before = golden[f"step{step}.processed"]
    encode(model, cache, golden["block0_ids"].tolist())
    close(denoise(model, cache, [golden["canvas1_ids"].tolist()]), golden["block1.step48.logits"])
    kept = golden["rollback.kept_ids"].tolist()
    cache.truncate(0, len(ids) + len(kept) - 1)
    encode(model, cache, kept[-1:])
    close(denoise(model, cache, [golden["canvas1_ids"].tolist()]), golden["rollback.logits"])


@pytest.mark.parametrize("canvas", [1, 7, 20])
@pytest.mark.parametrize("context", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
def test_any_canvas_behind_any_context(
    model: DiffusionGemma, oracle: diffusion.Oracle, context: int, canvas: int
) -> None:
    """Contexts in chunks of 6, canvases shorter and longer than the trained one and than a window."""
    cache, ids, noisy = (
        opened(model, longest_pass=20),
        tiny.prompt(context, VOCABULARY),
        tiny.prompt(canvas, VOCABULARY),
    )
    for at in range(0, context, 6):
        encode(model, cache, ids[at : at + 6])
    before = 3 * torch.randn(canvas, VOCABULARY, generator=torch.Generator().manual_seed(canvas))
    close(denoise(model, cache, [noisy]), oracle.denoise(ids, noisy))
    close(denoise(model, cache, [noisy], before=before), oracle.denoise(ids, noisy, before))


def test_ragged_requests_in_one_pass(model: DiffusionGemma) -> None:
    """Each with a context and a canvas of its own, the same as alone."""
    contexts, canvases = (3, 31, 12), (9, 4, 1)
    cache = opened(model, 4, 7, 5, longest_pass=31)
    noisy = [tiny.prompt(n, VOCABULARY, seed=3) for n in canvases]
    before = torch.randn(sum(canvases), VOCABULARY, generator=torch.Generator().manual_seed(0))
    for request, context in zip((4, 7, 5), contexts, strict=True):
        encode(model, cache, tiny.prompt(context, VOCABULARY, seed=2), request)
    together = denoise(model, cache, noisy, (4, 7, 5), before).split(canvases)
    for request, canvas, own, found in zip((4, 7, 5), noisy, before.split(canvases), together, strict=True):
        close(denoise(model, cache, [canvas], (request,), own), found, 1e-5)


def test_a_canvas_leaves_nothing_behind(model: DiffusionGemma) -> None:
    """Nor what it said: the next first step is that of a cache that never saw one. Bit for bit."""
    found = []
    for steps in (0, 3):
        cache, before = opened(model, longest_pass=11), None
        encode(model, cache, tiny.prompt(11, VOCABULARY))
        for step in range(steps):
            before = denoise(model, cache, [tiny.prompt(9, VOCABULARY, seed=step)], before=before)
            assert cache.tables.length(0) == 11
        encode(model, cache, tiny.prompt(2, VOCABULARY, seed=8))
        found.append(denoise(model, cache, [tiny.prompt(9, VOCABULARY, seed=9)]))
    assert torch.equal(*found)


def test_weights_held_in_bfloat16(golden: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """In fp32 arithmetic they are the rounded ones, matrices of experts and the table of embeddings included."""
    tensors = load_file(diffusion.GOLDEN / "model.safetensors")
    rounded = {k: v.bfloat16().float() if v.dim() > 1 else v for k, v in tensors.items()}
    config = (diffusion.GOLDEN / "config.json").read_text()
    tiny.write_checkpoint(tmp_path, {}, rounded)
    (tmp_path / "config.json").write_text(config)
    found = []
    for each in (
        diffusion.load(tmp_path),
        diffusion.load(diffusion.GOLDEN, held=torch.bfloat16),
        diffusion.load(diffusion.GOLDEN, "reference", held=torch.bfloat16),
    ):
        cache = opened(each)
        encode(each, cache, golden["input_ids"].tolist())
        found.append(denoise(each, cache, [golden["canvas0_ids"].tolist()], before=golden["step48.processed"]))
    assert each.model.layers[0].experts.down_proj.weight.dtype == torch.bfloat16
    close(found[1], found[0], 1e-5)
    close(found[2], found[0], 1e-5)


def test_bfloat16_rounds_where_the_source_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over experts and bounds of logits are taken in fp32: most logits have the same bits. Rounded bounds
    show."""
    where, half = diffusion.write(tmp_path, moe_intermediate_size=24), torch.bfloat16
    model, oracle = diffusion.load(where, "eager", half), diffusion.Oracle(where, half)

    def near() -> float:
        found = []
        for seed in range(3):
            ids, canvas = tiny.prompt(20 + seed, VOCABULARY, seed=seed), tiny.prompt(12, VOCABULARY, seed=9 + seed)
            cache, before = tiny.paged_cache(model, longest_pass=40, dtype=half), None
            cache.open(0)
            encode(model, cache, ids)
            for _ in range(2):
                wanted = oracle.denoise(ids, canvas, before)
                found.append(float((denoise(model, cache, [canvas], before=before) == wanted).float().mean()))
                before = wanted.to(half) / 0.8
        return min(found)

    assert near() > 0.9
    monkeypatch.setattr(DiffusionGemma, "head", gemma4.Gemma4.head)
    assert near() < 0.5


# ------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_experts_are_a_sum_over_those_chosen(folder: Path, kernels: str) -> None:
    """Against the sum row by row; the others are not read; a row's bits are its own where the product's are."""
    experts = diffusion.load(folder, "reference").model.layers[1].experts
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 3], [3, 5], [3, 0], [5, 3], [0, 5], [3, 0], [0, 3], [5, 0], [3, 5]])
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
    wanted = torch.zeros(9, 40)
    for row in range(9):
        for e, w in zip(chosen[row].tolist(), weights[row], strict=True):
            gate, up = (experts.gate_up_proj.weight[e] @ x[row]).chunk(2)
            wanted[row] += w * (experts.down_proj.weight[e] @ (F.gelu(gate, approximate="tanh") * up))
    used = diffusion.load(folder, kernels).model.layers[1].experts
    for e in (1, 2, 4):
        used.gate_up_proj.weight[e] = used.down_proj.weight[e] = torch.nan
    found = used(x, chosen, weights)
    close(found, wanted, 1e-5)
    if kernels == "auto" and used.down_proj.packed:
        assert all(
            torch.equal(used(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1])[0], found[i]) for i in range(9)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_at_once(folder: Path, dtype: torch.dtype) -> None:
    """The one call of torch's that a GPU takes; some experts have no row, the first and the last too."""
    matrices = diffusion.load(folder, "reference", dtype).model.layers[1].experts.gate_up_proj
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    counts = torch.tensor([0, 4, 0, 0, 5, 0])
    torch.testing.assert_close(matrices.at_once(x, counts), matrices.grouped(x, counts))


def _copied(rows: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(rows)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_sums_of_rows(held: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table in several parts, the last one no whole panel."""
    monkeypatch.setattr("foldspec.models.layers._SOME", 32)
    draw = torch.Generator().manual_seed(0)
    rows, shares = torch.randn(75, 12, generator=draw).to(held), torch.rand(4, 75, generator=draw)
    kernels = tiny.kernels_of("reference")
    matrix = Matrix(75, 12, kernels)
    held_rows = torch.empty_like(rows)
    (kernels.pack if packed else _copied)(rows, held_rows)
    matrix.weight, matrix.packed = torch.nn.Parameter(held_rows, requires_grad=False), packed
    close(matrix.mixed(shares), shares @ rows.float(), 1e-5)


# ------------------------------------------------------------------------------------------------------------ mistakes

Mutation = Callable[[DiffusionGemma, pytest.MonkeyPatch], None]


def blocks(model: DiffusionGemma) -> list[MixedBlock]:
    return list(model.model.layers)  # type: ignore[arg-type]


def each(change: Callable[[Any], None]) -> Mutation:
    return lambda model, patch: [change(block) for block in blocks(model)] and None


def scalars(encoder: str, decoder: str) -> Mutation:
    """Whose scalar each of them takes."""

    def mutate(model: DiffusionGemma, patch: pytest.MonkeyPatch) -> None:
        for block, own in zip(blocks(model), model.encoder.layers, strict=True):
            held = {"encoder": own.layer_scalar.clone(), "decoder": block.layer_scalar.clone()}
            own.layer_scalar.copy_(held[encoder])
            block.layer_scalar.copy_(held[decoder])

    return mutate


def spans(change: Callable[[Mask, int, int, int | None], Any]) -> Mutation:
    """Other entries for rows of the decoder."""

    def mutate(model: DiffusionGemma, patch: pytest.MonkeyPatch) -> None:
        def other(*args: Any) -> Any:
            *rest, window, mask = args
            return masked_attention(*rest, window, Other() if mask == FULL else mask)

        class Other:
            def spans(self, start: int, count: int, window: int | None = None) -> Any:
                return change(FULL, start, count, window)

        patch.setattr(gemma4, "masked_attention", other)

    return mutate


def per_query(mask: Mask, start: int, count: int, window: int | None) -> Any:
    return tuple(max(0, start + r + 1 - (window or 1 << 20)) for r in range(count)), mask.spans(start, count)[1]


def blind(mask: Mask, start: int, count: int, window: int | None) -> Any:
    first, last = mask.spans(start, count, window)
    return (start,) * count if window else first, last


def bidirectional(model: DiffusionGemma, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gemma4, "masked_attention", lambda *args: masked_attention(*args[:-1], FULL))


def embedding(change: Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> Mutation:
    def mutate(model: DiffusionGemma, patch: pytest.MonkeyPatch) -> None:
        own = model.self_conditioning
        object.__setattr__(own, "embed", lambda x, soft: change(own, x, soft))

    return mutate


def weighted(own: Any, x: torch.Tensor, soft: torch.Tensor | None) -> torch.Tensor:
    return own.pre_norm(x if soft is None else own(own.pre_norm(soft), x))


def expected(change: Callable[[DiffusionGemma, torch.Tensor], torch.Tensor]) -> Mutation:
    return lambda model, patch: object.__setattr__(model, "_expected", lambda before: change(model, before))


def hard(model: DiffusionGemma, before: torch.Tensor) -> torch.Tensor:
    return model.embed(before.argmax(-1))


def unscaled(model: DiffusionGemma, before: torch.Tensor) -> torch.Tensor:
    return DiffusionGemma._expected(model, before) / model.embedding_scale


def cooled(model: DiffusionGemma, before: torch.Tensor) -> torch.Tensor:
    """As of raw logits: the temperature of the first step is 0.8, that of the second a little less."""
    return DiffusionGemma._expected(model, before * 0.8)


def swap(block: Any, one: str, other: str) -> None:
    a, b = getattr(block, one), getattr(block, other)
    setattr(block, one, b)
    setattr(block, other, a)


def normed_route(block: Any) -> None:
    router = block.router
    block.router = Kept(lambda x: router(block.pre_feedforward_layernorm_2(x)))


def raw_experts(block: Any) -> None:
    block.pre_feedforward_layernorm_2 = torch.nn.Identity()


class Kept(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def routed(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Mutation:
    def other(block: Any) -> None:
        router = block.router
        block.router = Kept(lambda x: change(*router(x)))

    return each(other)


def gated(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], part: str) -> Mutation:
    """Another gate, of the experts alone or of self-conditioning alone."""

    class Other:
        gelu_mul = staticmethod(f)

    def mutate(model: DiffusionGemma, patch: pytest.MonkeyPatch) -> None:
        if part == "conditioning":
            object.__setattr__(model.self_conditioning, "_gated", f)
        for block in blocks(model):
            if part == "experts":
                kernels = block.experts._kernels
                block.experts._kernels = Other()  # type: ignore[assignment]
                assert kernels is not block.experts._kernels

    return mutate


def shifted(model: DiffusionGemma, patch: pytest.MonkeyPatch) -> None:
    run = model._run

    def other(x: torch.Tensor, plan: Any, cache: PagedCache) -> Any:
        output = run(x, plan, cache)
        return type(output)(output.logits.roll(1, 0), output.taps)

    object.__setattr__(model, "_run", other)


MISTAKES: dict[str, Mutation] = {
    "the two scalars swapped": scalars("decoder", "encoder"),
    "the encoder with the decoder's scalars": scalars("decoder", "decoder"),
    "the decoder with the encoder's scalars": scalars("encoder", "encoder"),
    "a window for each row of the canvas": spans(per_query),
    "a window longer by one": spans(lambda mask, start, count, w: mask.spans(start, count, w and w + 1)),
    "a window shorter by one": spans(lambda mask, start, count, w: mask.spans(start, count, w and w - 1)),
    "no window": spans(lambda mask, start, count, w: mask.spans(start, count)),
    "sliding layers see the canvas alone": spans(blind),
    "a causal canvas": spans(lambda mask, start, count, w: CAUSAL.spans(start, count, w)),
    "an encoder that looks ahead": bidirectional,
    "row i predicts the next position": shifted,
    "the first step is not normed": embedding(
        lambda own, x, soft: x if soft is None else type(own).embed(own, x, soft)
    ),
    "the outer norm has the inner one's weight": embedding(weighted),
    "no outer norm": embedding(lambda own, x, soft: x if soft is None else own(own.pre_norm(soft), x)),
    "no inner norm": embedding(lambda own, x, soft: own.post_norm(x if soft is None else own(soft, x))),
    "no self-conditioning": embedding(lambda own, x, soft: own.post_norm(x)),
    "expectations added as they are": embedding(lambda own, x, soft: own.post_norm(x if soft is None else x + soft)),
    "expectations without the embedding's scale": expected(unscaled),
    "expectations of raw logits": expected(cooled),
    "the likeliest id in place of expectations": expected(hard),
    "self-conditioning with another gelu": gated(lambda a, b: F.gelu(a) * b, "conditioning"),
    "no MLP beside the experts": each(
        lambda block: setattr(block, "post_feedforward_layernorm_1", Kept(lambda x: 0 * x))
    ),
    "no experts": each(lambda block: setattr(block, "post_feedforward_layernorm_2", Kept(lambda x: 0 * x))),
    "norms after the two swapped": each(
        lambda block: swap(block, "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    ),
    "norms before the two swapped": each(
        lambda block: swap(block, "pre_feedforward_layernorm", "pre_feedforward_layernorm_2")
    ),
    "no norm of the two together": each(
        lambda block: setattr(block, "post_feedforward_layernorm", torch.nn.Identity())
    ),
    "experts read the raw stream": each(raw_experts),
    "routes by the stream with the norm's weight": each(normed_route),
    "routes without the norm": each(lambda block: setattr(block.router, "norm", torch.nn.Identity())),
    "routes without the scale": each(lambda block: block.router.scale.fill_(1.0)),
    "routes without the factor": each(lambda block: setattr(block.router, "_factor", 1.0)),
    "no scale of an expert's own": each(lambda block: block.router.per_expert_scale.fill_(1.0)),
    "all chosen weigh the same": routed(lambda e, w: (e, w.mean(-1, keepdim=True).expand_as(w))),
    "weights the other way round": routed(lambda e, w: (e, w.flip(-1))),
    "one expert fewer": routed(lambda e, w: (e[:, :-1], w[:, :-1])),
    "the next expert": routed(lambda e, w: ((e + 1) % 8, w)),
    "up in place of gate": gated(lambda a, b: F.gelu(b, approximate="tanh") * a, "experts"),
    "experts with silu": gated(lambda a, b: F.silu(a) * b, "experts"),
    "experts with another gelu": gated(lambda a, b: F.gelu(a) * b, "experts"),
    "no softcap": lambda model, patch: setattr(model, "softcap", None),
    "another softcap": lambda model, patch: setattr(model, "softcap", diffusion_gemma.SOFTCAP),
    "keys and values of the encoder with raw values": each(
        lambda block: setattr(block.self_attn, "v_norm", torch.nn.Identity())
    ),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_is_seen(
    golden: dict[str, torch.Tensor], mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = diffusion.load(diffusion.GOLDEN, "reference")
    if mistake is not None:
        MISTAKES[mistake](model, monkeypatch)
    cache = opened(model)
    encode(model, cache, golden["input_ids"].tolist())
    far, before = 0.0, None
    for step in STEPS[:2]:
        logits = denoise(model, cache, [golden[f"step{step}.canvas_in"].tolist()], before=before)
        far = max(far, float((logits - golden[f"step{step}.logits"]).abs().max()))
        before = golden[f"step{step}.processed"]
    assert far > 5e-4 if mistake is not None else far < 1e-5
