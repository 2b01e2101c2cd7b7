"""Train a drafter for a target: write its texts, learn from them, export a checkpoint that foldspec loads.

    python scripts/train_drafter.py data smollm2-135m --data DIR [--source code:NAME=FOLDER ...] [--sequences 4096]
    python scripts/train_drafter.py train smollm2-135m --data DIR --out DIR [--kind dflash] [--steps 4000]

``data`` lets the target continue prompts greedily and keeps its tapped states beside the texts, shard by shard.
``train`` learns from them and ends with ``OUT/drafter/``: config.json and model.safetensors. Both go on where they
were stopped, also by ``kill -9``, and give the same result as if they had not been: shard k and step s depend on the
seed and on their own number alone. No file is read that ``foldspec bench`` draws its texts from.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from training.dflash import Trainee, config_of, draft_vocabulary
from training.generate import RoundedProducts, generate
from training.loop import Plan, train
from training.prompts import Prompts, Source
from training.store import Text, Texts, read, read_texts, write_json, write_shard

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.engine import cache_folder
from foldspec.errors import FoldspecError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.loading import FoundPair, find_pair, load_pair
from foldspec.models.base import ForwardPlan
from foldspec.options import EngineOptions
from foldspec.resources import pick_device, pick_dtype

SHARD = 384  # sequences


def load_target(options: argparse.Namespace, kernels: Kernels) -> tuple[FoundPair, torch.dtype, torch.device]:
    """The target alone, with its weights."""
    settings = EngineOptions(device=options.device, dtype=options.dtype, cache_dir=cache_folder())
    found = find_pair(options.pair, options.target, "none", options=settings, kernels=kernels)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device, found)
    rounded = isinstance(kernels, RoundedProducts) and device.type == "cpu" and dtype == torch.float32
    load_pair(found, dtype=dtype, device=device, weights="bfloat16" if rounded else "auto", kernels=kernels)
    return found, dtype, device


def spread_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Tapped layers as the published drafters choose theirs: evenly from the second to the third from last."""
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def make_data(options: argparse.Namespace) -> None:
    """The ``data`` command."""
    compiled = Library(cache_folder() / "kernels")
    kernels = Kernels("auto", compiled) if options.exact_products else RoundedProducts("auto", compiled)
    found, dtype, device = load_target(options, kernels)
    if found.tokenizer is None:
        raise UsageError("the target has no tokenizer", where="data")
    sources = [Source("stdlib", Path(sysconfig.get_path("stdlib")), "code"), *options.source]
    longest = min(288, options.length * 9 // 16)  # the text needs room too
    prompts = Prompts(sources, found.tokenizer, found.template, shortest=min(48, longest // 2), longest=longest)
    taps = options.taps or spread_taps(found.model.layer_count)
    plan = {
        "target": found.target.source,
        "taps": taps,
        "seed": options.seed,
        "length": options.length,
        "sources": {source.name: source.kind for source in sources},
        "products": "exact" if options.exact_products else "rounded",
    }
    options.data.mkdir(parents=True, exist_ok=True)
    manifest = options.data / "data.json"
    if manifest.exists() and json.loads(manifest.read_text())["plan"] != json.loads(json.dumps(plan)):
        raise UsageError("was made by other settings", where=str(options.data), do="name another folder")
    print(f"prompts from {prompts.counts} files, taps {list(taps)}", flush=True)
    write_json(manifest, {"plan": plan, "files": prompts.counts})
    worker, workers = options.worker
    for shard in range(worker, -(-options.sequences // SHARD), workers):
        path = options.data / f"shard-{shard:05d}.safetensors"
        if path.exists():
            continue
        drawn = prompts.draw(random.Random(f"{options.seed}/{shard}"))
        started = time.perf_counter()
        texts = list(
            generate(
                found.model,
                [next(drawn) for _ in range(SHARD)],
                taps=taps,
                stop_ids=found.stop_ids,
                length=options.length,
                batch=options.batch,
                dtype=dtype,
                device=device,
            )
        )
        write_shard(path, texts)
        written, seconds = sum(one.written for one in texts), time.perf_counter() - started
        print(f"shard {shard}: {written} tokens written, {seconds:.0f} s", flush=True)


def train_dflash(options: argparse.Namespace) -> None:
    """The ``train`` command for ``--kind dflash``."""
    # on torch alone: compiled kernels hold weights in a layout of their own, and are not needed for one text
    found, dtype, device = load_target(options, Kernels("reference"))
    facts = json.loads((options.data / "data.json").read_text())["plan"]
    if facts["target"] != found.target.source:
        raise UsageError(f"holds texts of {facts['target']['name']}", where=str(options.data), do="name its target")
    sides = read_texts(options.data, shortest=12)
    count = found.model.layer_count
    begin = options.begin_as or tuple(range(count - options.layers, count))
    vocabulary = None
    if options.draft_vocab:
        texts, prompts = zip(*(split(one) for one in sides[0]), strict=True)
        vocabulary = draft_vocabulary(texts, prompts, options.draft_vocab, found.model.vocabulary)
    config = config_of(
        found.target.config,
        layout=options.layout,
        layers=options.layers,
        block=options.block,
        taps=facts["taps"],
        mask_id=options.mask_id,
        draft_ids=options.draft_vocab or None,
        markov_rank=options.markov_rank,
    )
    torch.manual_seed(options.seed)
    head_dtype = torch.float32 if options.full_precision else torch.bfloat16
    trainee = Trainee(config, found.model, vocabulary, device, head_dtype)
    trainee.start(dict(found.model.named_parameters()), begin, magnitudes(found, dtype, sides[0], facts["taps"], begin))
    for weight in trainee.parameters():
        weight.requires_grad_(True)
    plan = Plan(
        steps=options.steps,
        seed=options.seed,
        sequences=options.batch,
        anchors=options.anchors,
        first_part=options.first_part,
        first_anchors=options.first_anchors,
        decay=options.decay,
        rate=options.rate,
        warm_up=0.03,
        bf16=not options.full_precision,
    )
    size = sum(weight.numel() for weight in trainee.parameters())
    print(
        f"{len(sides[0])} texts, {sides[0].written} tokens; {len(sides[1])} for validation; {size} weights", flush=True
    )
    train(
        trainee,
        plan,
        sides,
        options.out,
        save_every=options.save_every,
        say=lambda line: print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True),
        stop_after=options.stop_after,
    )
    trainee.export(options.out / "drafter")


def split(sequence: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target wrote of a text, and its prompt."""
    ids, _ = read(sequence)
    return ids[sequence.prompt :], ids[: sequence.prompt]


@torch.inference_mode()
def magnitudes(
    found: FoundPair, dtype: torch.dtype, texts: Texts, taps: Sequence[int], layers: Sequence[int]
) -> dict[str, float]:
    """Root mean squares of the target on the first text: of taps, and of the heads of q and k of some layers. The first
    four tokens do not count: their states are huge."""
    ids, _ = read(texts[0])
    model, wanted = found.model, sorted({*taps, *(layer - 1 for layer in layers)})
    cache = PagedCache(model.cache_spec(dtype), pages=-(-len(ids) // 64), page_size=64, device=model.head_weight.device)
    cache.open(0)
    plan = ForwardPlan(Rows.of([0], [0], [len(ids)]), tuple(wanted), ())
    output = dict(zip(wanted, model(ids.to(model.head_weight.device), plan, cache).taps, strict=True))
    found_rms = {f"tap/{tap}": rms(output[tap][4:]) for tap in taps}
    for layer in layers:
        block: Any = model.get_submodule(f"model.layers.{layer}")
        q, k, _ = block.self_attn.inputs(block.input_layernorm(output[layer - 1]))
        found_rms[f"q/{layer}"], found_rms[f"k/{layer}"] = rms(q[4:]), rms(k[4:])
    return found_rms


def rms(x: torch.Tensor) -> float:
    return x.float().pow(2).mean(-1).sqrt().mean().item()


def parse_source(text: str) -> Source:
    kind, _, rest = text.partition(":")
    name, _, folder = rest.partition("=")
    if kind not in ("code", "prose") or not name or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not code:NAME=FOLDER or prose:NAME=FOLDER with a folder that is there"
        )
    return Source(name, Path(folder), kind)


def parse_share(text: str) -> tuple[int, int]:
    worker, _, workers = text.partition("/")
    return int(worker), int(workers)


def parse_taps(text: str) -> tuple[int, ...]:
    return tuple(int(layer) for layer in text.split(","))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("pair", nargs="?", help="a pair of checkpoints.yaml; its target counts")
    common.add_argument("--target", help="a folder or hub id instead")
    common.add_argument("--data", type=Path, required=True, metavar="DIR", help="where the texts and taps are kept")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--device", default="auto")
    common.add_argument("--dtype", default="auto", help="of the target's arithmetic")
    common.add_argument("--threads", type=int, default=1)

    data = commands.add_parser("data", parents=[common], help="let the target write")
    data.add_argument(
        "--source",
        type=parse_source,
        action="append",
        default=[],
        metavar="KIND:NAME=FOLDER",
        help="code or prose to draw prompts from, beside Python's own library",
    )
    data.add_argument("--sequences", type=int, default=4096, help="texts in all; some 200 tokens each")
    data.add_argument(
        "--worker",
        type=parse_share,
        default=(0, 1),
        metavar="I/N",
        help="write each N-th shard from the I-th on: for N processes at once",
    )
    data.add_argument("--length", type=int, default=512, help="tokens of a sequence at most, prompt and text")
    data.add_argument("--taps", type=parse_taps, help="tapped layers, comma-separated")
    data.add_argument("--batch", type=int, default=128, help="sequences at once")
    data.add_argument("--exact-products", action="store_true", help="fp32 products on a CPU; slower")
    data.set_defaults(run=make_data)

    learn = commands.add_parser("train", parents=[common], help="learn from the texts")
    learn.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints, the curve, the drafter")
    learn.add_argument("--kind", choices=["dflash"], default="dflash")
    learn.add_argument("--layout", choices=["deepspec", "zlab"], default="deepspec", help="the published format")
    learn.add_argument("--layers", type=int, default=2)
    learn.add_argument("--block", type=int, default=7, help="rows of a block")
    learn.add_argument("--mask-id", type=int, required=True, help="an id of the target that its texts never hold")
    learn.add_argument("--begin-as", type=parse_taps, help="layers of the target to begin as; default: its last")
    learn.add_argument("--draft-vocab", type=int, default=16_384, help="ids that can be drafted; 0: all")
    learn.add_argument("--markov-rank", type=int, default=0)
    learn.add_argument("--steps", type=int, default=4000)
    learn.add_argument("--batch", type=int, default=4, help="sequences a step and worker")
    learn.add_argument("--anchors", type=int, default=48, help="blocks a sequence")
    learn.add_argument("--first-part", type=float, default=0.25, help="share of steps that train the first row alone")
    learn.add_argument("--first-anchors", type=int, default=224)
    learn.add_argument("--decay", type=float, default=4.0, help="gamma of the weights of later rows")
    learn.add_argument("--rate", type=float, default=1e-3)
    learn.add_argument("--full-precision", action="store_true", help="fp32 products")
    learn.add_argument("--save-every", type=int, default=200)
    learn.add_argument("--stop-after", type=int, help="end at this step, as if stopped")
    learn.set_defaults(run=lambda options: {"dflash": train_dflash}[options.kind](options))
    return top


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    try:
        options.run(options)
    except FoldspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
