"""Build an oracle pair by hand: a tiny Llama with a planted next token, and a z-lab DFlash drafter that knows the plan.

    python scripts/make_oracle_pair.py OUT_DIR [--seed 0] [--check]

writes OUT_DIR/target and OUT_DIR/drafter; ``--check`` then reads them back and prints tau, intact and with one
mistake at a time. Nothing is trained and nothing of foldspec or transformers is imported, so the pair stays an
independent judge.

The target. Tokens are residues mod a prime P and the next one is ``a * previous + b * current (mod P)``. (a, b) makes
the recurrence run through all P^2 - 1 non-zero pairs before it repeats, so a token alone says nothing about the next
one. A token x lives in the residual stream as ``wave(x)``: cos and sin of 2 pi k x / P for every frequency k. That
turns the arithmetic into exact network parts: times a constant is a permutation of frequencies (a linear map), a sum
is a complex product (SwiGLU gives products: silu(g) u - silu(-g) u = g u), and the head's dot product with wave(y)
peaks at the right y. Layer 0 has a previous-token head; the last layer's MLP forms the sum.

The taps. Every layer before the last overwrites a scratch channel with wave(m_i * x_j), another m_i per layer, and
three times louder on layers that are not tapped. The drafter decodes half the frequencies from each tap; the layer
beside a tap yields, loudly, a well-formed wrong token.

The drafter. Slot r must say A_r * x_{n-1} + B_r * x_n. x_n is the anchor's embedding, x_{n-1} exists only in the
tapped state of row n-1. In layer 0, head d looks exactly d rows back; where it meets the anchor (in slot d) it brings
wave(B_d * x_n) and the slot's number. In layer 1, head d acts in slot d alone: it looks d + 1 rows back, at row n-1,
and brings wave(A_d * x_{n-1}); the MLP multiplies the two. If row n-1 is not where it should be, these heads fall on
row n-2, or half on the anchor, which is made to answer louder than a context row.

Everything depends on relative distance only, and every distance that is not wanted gets e^-20 of the attention or
less: tau is B at any length the target declares (checked to 4,000 tokens), so this pair tells right from wrong and
says nothing about context methods. All of it is finally turned into a random orthonormal basis of the residual
stream, so that no coordinate means anything by itself. The one blind spot: the state (0, 0) repeats itself, and x = 0
survives a wrong tap.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["BLOCK", "P", "build", "coefficients", "continuation"]

P = 31  # a prime; ids below P are the tokens
MODES = (P - 1) // 2
WAVE = 2 * MODES  # width of wave(x)
BOS, EOS, MASK_ID, VOCAB = P, [P + 1, P + 2], P + 3, P + 4  # no logit of the target ever favours these

BLOCK = 7  # anchor + 6 drafts
HEAD_DIM = 32  # holds a wave and a flag
TARGET_LAYERS, TARGET_HEADS, TARGET_KV_HEADS, TARGET_THETA = 6, 4, 2, 10_000.0
TAPS = (1, 3)
DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_THETA = BLOCK - 1, 2, 1_000.0
PRODUCTS = 4 * MODES  # real products in one complex product of waves
INTERMEDIATE = 2 * PRODUCTS
EPS = 1e-6
SHARP = 30.0  # attention logits at the wanted distance stand at least 0.68 * SHARP above every other one
LOUD = 3.0

# Channels of the residual stream, in coordinates before the random basis.
TOKEN, FIRST, SECOND, OUT = (slice(i * WAVE, (i + 1) * WAVE) for i in range(4))
PREVIOUS, SCRATCH = FIRST, SECOND  # what the target keeps there
FROM_ANCHOR, FROM_CONTEXT = FIRST, SECOND  # what the drafter keeps there
IS_TOKEN = 4 * WAVE  # 1 on every embedding but the mask's
IS_MASK = IS_TOKEN + 1  # 4 on the mask embedding (as long as a token's) and on context rows
SLOT = IS_MASK  # SLOT + r marks slot r = 1 .. BLOCK - 1
HIDDEN = SLOT + BLOCK

Weights = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------ the planted function


@cache
def coefficients(seed: int = 0) -> tuple[int, int]:
    """(a, b) of next = a * previous + b * current mod P, with the full period P^2 - 1."""
    pairs = [(a, b) for a in range(1, P) for b in range(1, P) if _period(a, b) == P * P - 1 and all(_usable(a, b))]
    return pairs[torch.randint(len(pairs), (), generator=_generator(seed)).item()]  # type: ignore[index]


def continuation(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """The ``count`` ids that the target generates after ``prompt``."""
    a, b = coefficients(seed)
    ids = [prompt[-2] if len(prompt) > 1 else prompt[-1], prompt[-1]]  # a lone token counts as its own predecessor
    for _ in range(count):
        ids.append((a * ids[-2] + b * ids[-1]) % P)
    return ids[2:]


def _period(a: int, b: int) -> int:
    state, steps = (b % P, (a + b * b) % P), 1
    while state != (1, b):
        if steps > P * P:
            return 0
        state, steps = (state[1], (a * state[0] + b * state[1]) % P), steps + 1
    return steps


def _powers(a: int, b: int) -> list[tuple[int, int]]:
    """[(A_r, B_r)] for r = 0 .. BLOCK - 1: x_{n+r} = A_r * x_{n-1} + B_r * x_n."""
    rows = [(1, 0), (0, 1)]
    while len(rows) <= BLOCK:
        rows.append(tuple((a * u + b * v) % P for u, v in zip(rows[-2], rows[-1], strict=True)))  # type: ignore[arg-type]
    return rows[1:]


def _usable(a: int, b: int) -> list[bool]:
    """Neither token may drop out of a draft: no multiplier of a slot is 0."""
    return [A != 0 and B != 0 for A, B in _powers(a, b)[1:]]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------------- network parts


def wave(ids: Tensor) -> Tensor:
    angle = 2 * math.pi / P * ids.double()[:, None] * torch.arange(1, MODES + 1)
    return torch.cat([angle.cos(), angle.sin()], 1)


def times(m: int) -> Tensor:
    """The matrix that takes wave(x) to wave(m * x): frequency k of m * x is frequency k * m of x, folded at P / 2."""
    out = torch.zeros(WAVE, WAVE, dtype=torch.float64)
    for k in range(1, MODES + 1):
        source = k * m % P
        sign, source = (1, source) if source <= MODES else (-1, P - source)
        out[k - 1, source - 1] = 1
        out[MODES + k - 1, MODES + source - 1] = sign
    return out


def zeros(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.float64)


def unit(coordinate: int) -> Tensor:
    """One row that reads a single coordinate of the residual stream."""
    return torch.eye(HIDDEN, dtype=torch.float64)[coordinate : coordinate + 1]


def reading(channel: slice, matrix: Tensor) -> Tensor:
    """Rows that apply ``matrix`` to one channel of the residual stream."""
    out = zeros(len(matrix), HIDDEN)
    out[:, channel] = matrix
    return out


def mlp(left: Tensor, right: Tensor, write: Tensor) -> dict[str, Tensor]:
    """SwiGLU weights that add ``write @ (left @ x * right @ x)``; each product takes the units (g, u) and (-g, -u)."""
    pad = INTERMEDIATE - 2 * len(left)
    return {
        "mlp.gate_proj": F.pad(torch.cat([left, -left]), (0, 0, 0, pad)),
        "mlp.up_proj": F.pad(torch.cat([right, -right]), (0, 0, 0, pad)),
        "mlp.down_proj": F.pad(torch.cat([write, write], 1), (0, pad)),
    }


def wave_product(first: Tensor, second: Tensor) -> dict[str, Tensor]:
    """OUT += wave(u + v), where ``first @ x`` is wave(u) and ``second @ x`` is wave(v)."""
    (cos1, sin1), (cos2, sin2) = first.chunk(2), second.chunk(2)
    write, one = zeros(HIDDEN, PRODUCTS), torch.eye(MODES, dtype=torch.float64)
    write[OUT] = torch.cat([torch.cat([one, -one, 0 * one, 0 * one], 1), torch.cat([0 * one, 0 * one, one, one], 1)])
    return mlp(torch.cat([cos1, sin1, sin1, cos1]), torch.cat([cos2, sin2, cos2, sin2]), write)


def at_distance(d: int, theta: float) -> Tensor:
    """A query for keys ``at_distance(0)``: the logit is sum cos(freq * (d - distance)), greatest at distance d."""
    angle = d * theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    return torch.cat([angle.cos(), -angle.sin()])[:, None]


def head(h: int) -> slice:
    return slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)


def norm_weight(squared_length: float) -> Tensor:
    """Makes an RMSNorm the identity on rows of this length, so that matrices can be written without scale factors."""
    return torch.full((HIDDEN,), math.sqrt(squared_length / HIDDEN + EPS), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- the two networks


def target_weights(a: int, b: int, scratch: list[int]) -> Weights:
    """The target in plain coordinates; ``scratch[i]`` is the multiplier that layer i leaves in the scratch channel."""
    embedding = zeros(VOCAB, HIDDEN)
    embedding[:, TOKEN], embedding[:, IS_TOKEN] = wave(torch.arange(VOCAB)), 1  # special ids read as their residue
    embedding[MASK_ID] = 0
    embedding[MASK_ID, IS_MASK] = math.sqrt(MODES + 1)
    lm_head = zeros(VOCAB, HIDDEN)
    lm_head[:P, OUT] = wave(torch.arange(P))
    out = {"model.embed_tokens": embedding, "lm_head": lm_head}

    length, held = MODES + 1.0, zeros(WAVE, WAVE)  # squared length of a row; what the scratch channel holds
    scratch_length = 0.0
    for i in range(TARGET_LAYERS):
        name, q_width, kv_width = f"model.layers.{i}.", TARGET_HEADS * HEAD_DIM, TARGET_KV_HEADS * HEAD_DIM
        out[name + "input_layernorm"] = norm_weight(length)
        q, k, v, o = zeros(q_width, HIDDEN), zeros(kv_width, HIDDEN), zeros(kv_width, HIDDEN), zeros(HIDDEN, q_width)
        if i == 0:  # the last query head, with the last K/V head, copies the previous token
            sharp = SHARP * math.sqrt(HEAD_DIM)
            q[head(TARGET_HEADS - 1)] = sharp * at_distance(1, TARGET_THETA) @ unit(IS_TOKEN)
            k[head(TARGET_KV_HEADS - 1)] = at_distance(0, TARGET_THETA) @ unit(IS_TOKEN)
            v[head(TARGET_KV_HEADS - 1)][:WAVE] = reading(TOKEN, times(1))
            o[PREVIOUS, head(TARGET_HEADS - 1)] = F.pad(times(1), (0, HEAD_DIM - WAVE))
            length += MODES
        out |= {name + f"self_attn.{p}_proj": w for p, w in zip("qkvo", (q, k, v, o), strict=True)}
        out[name + "post_attention_layernorm"] = norm_weight(length)
        if i < TARGET_LAYERS - 1:
            gain = 1.0 if i in TAPS else LOUD
            new, write = gain * times(scratch[i]), zeros(HIDDEN, WAVE)
            write[SCRATCH] = times(1)
            parts = mlp(unit(IS_TOKEN).expand(WAVE, -1), reading(TOKEN, new - held), write)
            length += gain**2 * MODES - scratch_length
            held, scratch_length = new, gain**2 * MODES
        else:
            parts = wave_product(reading(PREVIOUS, times(a)), reading(TOKEN, times(b)))
            length += MODES
        out |= {name + part: w for part, w in parts.items()}
    return out | {"model.norm": norm_weight(length)}


def drafter_weights(a: int, b: int, scratch: list[int]) -> Weights:
    """The drafter in plain coordinates."""
    everywhere = unit(IS_TOKEN) + unit(IS_MASK) / math.sqrt(MODES + 1)  # reads 1 on all block and context rows

    fc = zeros(HIDDEN, len(TAPS) * HIDDEN)
    for t, layer in enumerate(TAPS):  # even frequencies from the one tap, odd ones from the other
        mine = (torch.arange(MODES) % len(TAPS) == t).repeat(2).double()[:, None]
        fc[FROM_CONTEXT, t * HIDDEN : (t + 1) * HIDDEN] = mine * reading(SCRATCH, times(pow(scratch[layer], -1, P)))
    fc[IS_MASK, IS_TOKEN] = math.sqrt(MODES + 1)  # not IS_TOKEN: context rows must not look like the anchor
    out = {"fc": fc, "hidden_norm": norm_weight(2 * MODES + 1)}

    unit_query = math.sqrt(SHARP * math.sqrt(HEAD_DIM) / 2)  # q_norm and k_norm make both vectors sqrt(2) * at_distance
    lengths = [(MODES + 1, MODES + 1), (2 * MODES + 2, 3 * MODES + 2)]  # of mask rows, before attention and before MLP
    for i, (before, between) in enumerate(lengths):
        q, k, v, o = (
            zeros(DRAFT_HEADS * HEAD_DIM, HIDDEN),
            zeros(DRAFT_KV_HEADS * HEAD_DIM, HIDDEN),
            zeros(DRAFT_KV_HEADS * HEAD_DIM, HIDDEN),
            zeros(HIDDEN, DRAFT_HEADS * HEAD_DIM),
        )
        for g in range(DRAFT_KV_HEADS):
            k[head(g)] = at_distance(0, DRAFT_THETA) @ everywhere
            if i == 0:
                v[head(g)][:WAVE] = reading(TOKEN, times(1))
                v[head(g)][WAVE] = unit(IS_TOKEN)
            else:
                v[head(g)][:WAVE] = reading(FROM_CONTEXT, times(1)) + reading(TOKEN, LOUD * times(1))
        for d in range(1, BLOCK):
            far, near = at_distance(d + i, DRAFT_THETA), at_distance(0, DRAFT_THETA)
            A, B = _powers(a, b)[d]
            if i == 0:
                q[head(d - 1)] = far @ everywhere
                o[FROM_ANCHOR, head(d - 1)] = F.pad(times(B), (0, HEAD_DIM - WAVE))
                o[SLOT + d, (d - 1) * HEAD_DIM + WAVE] = 1
            else:  # in other slots the head rests on its own row, whose value is 0
                q[head(d - 1)] = near @ everywhere + (far - near) @ unit(SLOT + d)
                o[FROM_CONTEXT, head(d - 1)] = F.pad(times(A), (0, HEAD_DIM - WAVE))
        idle = mlp(zeros(0, HIDDEN), zeros(0, HIDDEN), zeros(HIDDEN, 0))
        parts = wave_product(reading(FROM_ANCHOR, times(1)), reading(FROM_CONTEXT, times(1))) if i else idle
        name = f"layers.{i}."
        out |= {name + f"self_attn.{p}_proj": w for p, w in zip("qkvo", (q, k, v, o), strict=True)}
        out |= {name + part: w for part, w in parts.items()}
        out[name + "input_layernorm"] = norm_weight(before)
        out[name + "post_attention_layernorm"] = norm_weight(between)
        for part in ("q_norm", "k_norm"):
            out[name + "self_attn." + part] = torch.full((HEAD_DIM,), unit_query, dtype=torch.float64)
    return out | {"norm": norm_weight(4 * MODES + 2)}


def turned(weights: Weights, basis: Tensor) -> Weights:
    """The same network with its residual stream in another orthonormal basis; uniform norm weights commute with it."""
    out = {}
    for name, w in weights.items():
        if name == "fc":
            w = basis @ w @ torch.kron(torch.eye(len(TAPS)), basis.T)
        elif name.endswith(("o_proj", "down_proj")):
            w = basis @ w
        elif w.dim() == 2:
            w = w @ basis.T
        out[name + ".weight"] = w.float().contiguous()
    return out


# ------------------------------------------------------------------------------------------------------------ the files


def build(out_dir: Path, seed: int = 0) -> None:
    """Write ``out_dir``/target and ``out_dir``/drafter; the same seed gives the same bytes on the same machine."""
    generator = _generator(seed)
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64))[0]
    scratch = (torch.randperm(P - 2, generator=generator)[: TARGET_LAYERS - 1] + 2).tolist()  # distinct, never 0 or 1
    a, b = coefficients(seed)
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": EPS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }
    target = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": TARGET_HEADS,
        "num_key_value_heads": TARGET_KV_HEADS,
        "rope_theta": TARGET_THETA,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    drafter = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": TARGET_LAYERS,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_KV_HEADS,
        "rope_theta": DRAFT_THETA,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": BLOCK,
        "tie_word_embeddings": True,
        "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": MASK_ID},
    }
    _write(out_dir / "target", shared | target, turned(target_weights(a, b, scratch), basis))
    _write(out_dir / "drafter", shared | drafter, turned(drafter_weights(a, b, scratch), basis))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    (out_dir / "target" / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def _write(folder: Path, config: dict[str, object], weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------- --check: a reference loop, mistakes


@dataclass(frozen=True)
class Mistake:
    """Tap layers i + taps; feed row j with row j - rows; place context row j at j + positions; read slot r + labels."""

    taps: int = 0
    rows: int = 0
    positions: int = 0
    labels: int = 0
    no_context: bool = False


MISTAKES = {
    "intact": Mistake(),
    "taps + 1": Mistake(taps=1),
    "taps - 1": Mistake(taps=-1),
    "rows + 1": Mistake(rows=1),
    "rows - 1": Mistake(rows=-1),
    "positions + 1": Mistake(positions=1),
    "positions - 1": Mistake(positions=-1),
    "labels + 1": Mistake(labels=1),
    "labels - 1": Mistake(labels=-1),
    "anchor only": Mistake(no_context=True),
}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half-split rotary embedding of x [rows, heads, HEAD_DIM]."""
    angle = positions[:, None, None].double() * theta ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
    weights = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def swiglu(x: Tensor, w: Weights, name: str) -> Tensor:
    gate, up, down = (w[f"{name}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def run_target(w: Weights, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [rows, vocabulary] and the raw output of every decoder layer [layers, rows, hidden]."""
    x, positions, states = w["model.embed_tokens.weight"][ids], torch.arange(len(ids)), []
    for i in range(TARGET_LAYERS):
        name = f"model.layers.{i}."
        h = rms_norm(x, w[name + "input_layernorm.weight"])
        q, k, v = ((h @ w[f"{name}self_attn.{p}_proj.weight"].T).view(len(h), -1, HEAD_DIM) for p in "qkv")
        q, k = rotated(q, positions, TARGET_THETA), rotated(k, positions, TARGET_THETA)
        x = x + attend(q, k, v, positions[:, None] >= positions) @ w[name + "self_attn.o_proj.weight"].T
        x = x + swiglu(rms_norm(x, w[name + "post_attention_layernorm.weight"]), w, name)
        states.append(x)
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T, torch.stack(states)


def draft(
    w: Weights, target: Weights, anchor: int, features: Tensor, mistake: Mistake, window: int | None
) -> list[int]:
    """BLOCK - 1 ids after ``anchor``, from the tapped states [n, taps * hidden] of the rows before it."""
    n = len(features)
    context_at, block_at = torch.arange(n) + mistake.positions, torch.arange(n, n + BLOCK)
    c = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = target["model.embed_tokens.weight"][[anchor] + [MASK_ID] * (BLOCK - 1)]
    near = block_at[:, None] - torch.arange(n) < (window + BLOCK if window else n + BLOCK)
    allowed = torch.cat([near, torch.ones(BLOCK, BLOCK, dtype=torch.bool)], 1)
    at = torch.cat([context_at, block_at])
    for i in range(2):
        name = f"layers.{i}."
        h = rms_norm(x, w[name + "input_layernorm.weight"])
        q, k, v = (
            (rows @ w[f"{name}self_attn.{p}_proj.weight"].T).view(len(rows), -1, HEAD_DIM)
            for p, rows in (("q", h), ("k", torch.cat([c, h])), ("v", torch.cat([c, h])))
        )
        q = rotated(rms_norm(q, w[name + "self_attn.q_norm.weight"]), block_at, DRAFT_THETA)
        k = rotated(rms_norm(k, w[name + "self_attn.k_norm.weight"]), at, DRAFT_THETA)
        x = x + attend(q, k, v, allowed) @ w[name + "self_attn.o_proj.weight"].T
        x = x + swiglu(rms_norm(x, w[name + "post_attention_layernorm.weight"]), w, name)
    answers = (rms_norm(x, w["norm.weight"]) @ target["lm_head.weight"].T).argmax(-1).tolist()
    slots = [min(r + mistake.labels, BLOCK - 1) for r in range(1, BLOCK)]
    return [answers[r] for r in slots]


def tau(
    w: Weights, target: Weights, ids: list[int], states: Tensor, start: int, mistake: Mistake, window: int | None
) -> float:
    """Tokens a round while the drafter works through ``ids[start:]``, which the target chose; the first is the anchor.

    Rows of committed tokens do not depend on what follows them, so one forward over all ids gives every round's states.
    """
    tapped = torch.cat([states[i + mistake.taps] for i in TAPS], -1)
    if mistake.no_context:
        tapped = torch.zeros_like(tapped)
    n, rounds = start, 0
    while n < len(ids) - 1:
        rows = (torch.arange(n) - mistake.rows).clamp(min=0)
        drafted = draft(w, target, ids[n], tapped[rows], mistake, window)
        agreed = 0
        while agreed < len(drafted) and n + agreed + 1 < len(ids) and drafted[agreed] == ids[n + agreed + 1]:
            agreed += 1
        n, rounds = min(n + agreed + 1, len(ids) - 1), rounds + 1
    return (n - start) / rounds


def check(out_dir: Path, seed: int) -> bool:
    """Print the taus of the written files; True if intact is B everywhere and every mistake stays below 2."""
    torch.set_num_threads(1)
    target, drafter = (load_file(out_dir / part / "model.safetensors") for part in ("target", "drafter"))
    lengths, generator = (1, 2, 10, 23, 24, 64, 300, 1000), _generator(seed + 1)
    runs, gap = [], math.inf
    for length in lengths:
        prompt = torch.randint(1, P, (length,), generator=generator).tolist()
        ids = prompt + continuation(prompt, 10 * BLOCK + 1, seed)
        logits, states = run_target(target, torch.tensor(ids))
        if logits[length - 1 : -1].argmax(-1).tolist() != ids[length:]:
            raise SystemExit(f"the target does not follow its plan (prompt of {length})")
        top = logits[length - 1 : -1].topk(2).values
        gap = min(gap, (top[:, 0] - top[:, 1]).min().item())
        runs.append((ids, states, length))
    a, b = coefficients(seed)
    print(f"next = {a} * previous + {b} * current mod {P}; B = {BLOCK}; least top-2 gap of the target {gap:.2f}")
    print("prompt tokens          " + "".join(f"{length:8d}" for length in lengths))
    good = True
    for name, mistake in MISTAKES.items():
        for window in (None, 24):
            taus = [tau(drafter, target, *run, mistake, window) for run in runs]
            good &= min(taus) == BLOCK if name == "intact" else max(taus) < 2
            print(f"{name:14s} {'window' if window else 'full':8s}" + "".join(f"{t:8.2f}" for t in taus))
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the oracle pair (see the top of this file).")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="read the files back and print tau, intact and mistaken")
    args = parser.parse_args()
    build(args.out_dir, args.seed)
    if args.check and not check(args.out_dir, args.seed):
        raise SystemExit("the oracle does not separate right from wrong")


if __name__ == "__main__":
    main()
