"""Train a drafter for a target: write its texts, learn from them, export a checkpoint that foldspec loads.

    python scripts/train_drafter.py data smollm2-135m --data DIR [--source code:NAME=FOLDER ...] [--sequences 4096]
    python scripts/train_drafter.py train smollm2-135m --data DIR --out DIR --mask-id 16 [--kind dflash|masked]

``data`` lets the target continue prompts greedily and keeps its tapped states beside the texts, shard by shard.
``train`` learns from them and ends with ``OUT/drafter/``: config.json and model.safetensors. Both go on where they
were stopped, also by ``kill -9``, and give the same result as if they had not been: shard k and step s depend on the
seed and on their own number alone. No file is read that ``foldspec bench`` draws its texts from.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from training.dflash import DFlashPlan, Trainee, config_of, draft_vocabulary
from training.generate import RoundedProducts, generate
from training.loop import Learner, Plan, train
from training.masked import MaskedPlan, MaskedTrainee, masked_config
from training.options import fill, parser
from training.prompts import Prompts, Source
from training.store import Text, Texts, begin_data, read, read_plan, read_texts, write_shard

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.engine import cache_folder
from foldspec.errors import FoldspecError, ResourceError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.loading import FoundPair, find_pair, load_pair
from foldspec.models.base import ForwardPlan
from foldspec.models.llama import Llama
from foldspec.options import EngineOptions
from foldspec.resources import pick_device, pick_dtype

SHARD = 384  # sequences


def load_target(options: argparse.Namespace, kernels: Kernels) -> tuple[FoundPair, torch.dtype, torch.device]:
    """The target alone, with its weights."""
    settings = EngineOptions(
        device=options.device, dtype=options.dtype, threads=options.threads, cache_dir=cache_folder()
    )
    torch.set_num_threads(options.threads)
    found = find_pair(options.pair, options.target, "none", options=settings, kernels=kernels)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device, found)
    rounded = isinstance(kernels, RoundedProducts) and device.type == "cpu" and dtype == torch.float32
    load_pair(found, dtype=dtype, device=device, weights="bfloat16" if rounded else "auto", kernels=kernels)
    return found, dtype, device


def spread_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Tapped layers as the published drafters choose theirs: evenly from the second to the third from last."""
    if layers < 4:
        return tuple(range(layers))
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))


def check_layers(option: str, layers: Sequence[int], low: int, high: int) -> None:
    """Raises :class:`UsageError` for layers that are not in ``low .. high``."""
    wrong = [layer for layer in layers if not low <= layer <= high]
    if wrong or not layers:
        raise UsageError(f"names {wrong or 'none'}, of the target's layers {low} .. {high}", where=option)


def make_data(options: argparse.Namespace) -> None:
    """The ``data`` command."""
    compiled = Library(cache_folder() / "kernels")
    kernels = Kernels("auto", compiled) if options.exact_products else RoundedProducts("auto", compiled)
    found, dtype, device = load_target(options, kernels)
    if found.tokenizer is None:
        raise UsageError("the target has no tokenizer.json", where=str(found.target.folder))
    if options.length > found.model.max_positions:
        raise UsageError(f"is more than the target's {found.model.max_positions} positions", where="--length")
    sources = [Source("stdlib", Path(sysconfig.get_path("stdlib")), "code"), *options.source]
    longest = min(288, options.length * 9 // 16)  # the text needs room too
    prompts = Prompts(sources, found.tokenizer, found.template, shortest=min(48, longest // 2), longest=longest)
    taps = options.taps or spread_taps(found.model.layer_count)
    check_layers("--taps", taps, 0, found.model.layer_count - 1)
    if list(taps) != sorted(set(taps)):
        raise UsageError("must be in order, each once", where="--taps")
    plan = {
        "target": found.target.source,
        "taps": taps,
        "seed": options.seed,
        "length": options.length,
        "sources": [f"{source.kind}:{source.name}" for source in sources],
        "products": "exact" if options.exact_products else "rounded",
    }
    begin_data(options.data, plan, prompts.counts)
    print(f"prompts from {prompts.counts} files, taps {list(taps)}", flush=True)
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


def learn(options: argparse.Namespace) -> None:
    """The ``train`` command."""
    # on torch alone: compiled kernels hold weights in a layout of their own, and are not needed for one text
    found, dtype, device = load_target(options, Kernels("reference"))
    facts = read_plan(options.data)
    if facts["target"] != found.target.source:
        name = facts["target"].get("name")
        raise UsageError(f"holds texts of {name}", where=str(options.data), do="name its target")
    model = found.model
    check_layers(f"{options.data}, taps", facts["taps"], 0, model.layer_count - 1)
    if options.mask_id >= model.vocabulary:
        what = f"must be at most {model.vocabulary - 1} for this target, not {options.mask_id}"
        raise UsageError(what, where="--mask-id")
    check, make = {"dflash": (check_dflash, make_dflash), "masked": (check_masked, make_masked)}[options.kind]
    begin = check(options, found)
    if len(begin) != options.layers:
        raise UsageError(f"names {len(begin)} layers, the drafter has {options.layers}", where="--begin-as")
    width = len(facts["taps"]) * model.width
    shortest = max(12, options.block if options.kind == "masked" else 0)
    sides = read_texts(options.data, shortest=shortest, width=width, vocabulary=model.vocabulary)
    torch.manual_seed(options.seed)
    common = {
        "steps": options.steps,
        "seed": options.seed,
        "sequences": options.batch,
        "decay": options.decay,
        "rate": options.rate,
        "bf16": not options.full_precision,
    }
    trainee, plan = make(options, found, dtype, device, sides[0], facts["taps"], begin, common)
    for weight in trainee.parameters():
        weight.requires_grad_(True)
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
        made={"config": trainee.config, "begin": list(begin), "data": facts},
    )
    trainee.export(options.out / "drafter")


def check_dflash(options: argparse.Namespace, found: FoundPair) -> tuple[int, ...]:
    """The layers to begin as. Raises :class:`UsageError` for options that do not fit the target."""
    layers = found.model.layer_count
    for option, value, most in (
        ("--draft-vocab", options.draft_vocab, found.model.vocabulary),
        ("--layers", options.layers, layers - 1),
    ):
        if value > most:
            raise UsageError(f"must be at most {most} for this target, not {value}", where=option)
    if options.markov_rank and options.layout != "deepspec":
        raise UsageError(f"is nothing that {options.layout} has", where="--markov-rank", do="use --layout deepspec")
    begin: tuple[int, ...] = options.begin_as or tuple(range(layers - options.layers, layers))
    check_layers("--begin-as", begin, 1, layers - 1)
    return begin


def make_dflash(
    options: argparse.Namespace,
    found: FoundPair,
    dtype: torch.dtype,
    device: torch.device,
    texts: Texts,
    taps: Sequence[int],
    begin: Sequence[int],
    common: dict[str, Any],
) -> tuple[Learner[Any], Plan]:
    vocabulary = None
    if options.draft_vocab:
        said, prompts = zip(*(split(one) for one in texts), strict=True)
        vocabulary = draft_vocabulary(said, prompts, options.draft_vocab, found.model.vocabulary)
    config = config_of(
        found.target.config,
        layout=options.layout,
        layers=options.layers,
        block=options.block,
        taps=taps,
        mask_id=options.mask_id,
        draft_ids=options.draft_vocab or None,
        markov_rank=options.markov_rank,
    )
    head_dtype = torch.float32 if options.full_precision else torch.bfloat16
    trainee = Trainee(config, found.model, vocabulary, device, head_dtype)
    trainee.start(dict(found.model.named_parameters()), begin, magnitudes(found, dtype, texts, taps, begin))
    own = {name: getattr(options, name) for name in ("anchors", "first_part", "first_anchors")}
    return trainee, DFlashPlan(**common, **own, warm_up=0.03)


def check_masked(options: argparse.Namespace, found: FoundPair) -> tuple[int, ...]:
    """The layers to begin as: the first ones and the last, unless they are named. Raises :class:`UsageError` for
    options and targets that do not fit."""
    model = found.model
    if type(model) is not Llama or any(name.endswith(".bias") for name, _ in model.named_parameters()):
        what = "is no Llama without biases, whose layers a masked drafter is made of"
        raise UsageError(what, where=str(found.target.folder), do="use --kind dflash")
    if options.layers > model.layer_count:
        what = f"must be at most {model.layer_count} for this target, not {options.layers}"
        raise UsageError(what, where="--layers")
    begin: tuple[int, ...] = options.begin_as or (*range(options.layers - 1), model.layer_count - 1)
    check_layers("--begin-as", begin, 0, model.layer_count - 1)
    return begin


def make_masked(
    options: argparse.Namespace,
    found: FoundPair,
    dtype: torch.dtype,
    device: torch.device,
    texts: Texts,
    taps: Sequence[int],
    begin: Sequence[int],
    common: dict[str, Any],
) -> tuple[Learner[Any], Plan]:
    config = masked_config(found.target.config, layers=options.layers, block=options.block, mask_id=options.mask_id)
    head_dtype = torch.float32 if options.full_precision else torch.bfloat16
    trainee = MaskedTrainee(config, cast(Llama, found.model), taps[-1], device, head_dtype)
    trainee.start(dict(found.model.named_parameters()), begin)
    return trainee, MaskedPlan(**common, labels=options.labels, warm_up=60, validation=32)


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


def fail(what: str, code: int) -> int:
    print(f"train_drafter: {' '.join(what.split())}", file=sys.stderr)
    return code


def main() -> int:
    try:
        options = parser(__doc__).parse_args()
        if options.command == "data":
            make_data(options)
        else:
            learn(fill(options))
    except FoldspecError as error:
        return fail(str(error), error.exit_code)
    except (OSError, SafetensorError) as error:  # a file that cannot be read or written, a disk that is full
        return fail(str(error), ResourceError.exit_code)
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        return fail("out of memory; lower --batch, --labels, --anchors or --block", ResourceError.exit_code)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
