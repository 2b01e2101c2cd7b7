"""The engine as a model of EleutherAI's lm-eval: any of its tasks scores foldspec, with speculation on.

    results = lm_eval.simple_evaluate(model=FoldspecLM(Engine.load("smollm2-135m")), tasks=["gsm8k"])

``foldspec lm-eval`` (``cli_lm_eval.py``) is the same through lm-eval's own command line, and alone imports this file,
which needs ``pip install 'foldspec[eval]'``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from foldspec import __version__
from foldspec.bench.metrics import tau_pooled
from foldspec.engine import Engine
from foldspec.errors import UsageError
from foldspec.options import CONTEXT_FIELDS, RULE_FIELDS, SamplingParams
from foldspec.records import Completion
from foldspec.text.chat import need_template
from foldspec.text.tokenizer import Tokenizer
from foldspec.values import token_count

__all__ = ["FoldspecLM"]

SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OWN = ("until", "max_gen_toks", "do_sample", "temperature")  # of a task's generation_kwargs, beside those
COUNTS = {"max_context": token_count, "cache_tokens": token_count}
PARSERS: dict[str, Callable[[str], Any]] = {**CONTEXT_FIELDS, **RULE_FIELDS, **COUNTS}

log = logging.getLogger("lm_eval.foldspec")  # below lm-eval's own, which has a handler


@register_model("foldspec")
class FoldspecLM(TemplateLM):
    """An engine that answers lm-eval's three kinds of request.

    ``generate_until`` runs through the engine's rounds, ``max_batch`` requests at a time; at temperature 0 a lossless
    engine's texts are those of plain decoding. The two kinds of log-likelihood are the target's own, whatever drafts;
    requests with one context share its prefill. Ids are made as lm-eval's own models make them: context and
    continuation are encoded as one text, which begins with BOS once where the tokenizer adds it.

    ``truncate``: what is longer than the context is cut from the left, as lm-eval's models do, counted and said. Else
    it is refused: a text that was cut is no longer the task's. ``seed``: sampled requests draw by ``seed`` plus their
    place in the task.

    Raises :class:`UsageError` for an engine without a tokenizer, or whose outputs mean nothing (``made_up``).
    """

    def __init__(self, engine: Engine, *, truncate: bool = False, seed: int = 0) -> None:
        super().__init__()
        if engine.made_up:
            raise UsageError(f"there is nothing to score: {engine.made_up}", where="lm-eval")
        if engine.tokenizer is None:
            raise UsageError("the target has no tokenizer.json, and tasks are text", where="lm-eval")
        if not isinstance(truncate, bool):
            raise UsageError(f"must be true or false, not {truncate!r}", where="truncate")
        SamplingParams(seed=seed)  # checks it
        self._engine, self._truncate, self._seed = engine, truncate, seed
        self._tokenizer: Tokenizer = engine.tokenizer
        self._commits: list[list[int]] = []  # of each generated text, of each round
        self._scored = self._cut = 0
        for line in engine.notices:
            log.warning(line)
        if not engine.lossless:
            log.warning("output follows another law than the target's: %s", engine.law)

    # made by lm-eval's command line

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> FoldspecLM:
        """``--model_args`` are those of :meth:`Engine.load`, ``truncate`` and ``seed``; ``--batch_size`` is
        ``max_batch`` (``auto``: the engine's own, or ``--max_batch_size``), unless ``--model_args`` has that.
        lm-eval's default device is ``cuda:0`` and means a GPU if there is one, which is ``auto`` here."""
        given = {k: v for k, v in {**(additional_config or {})}.items() if v is not None}
        options = {k: _read(k, v) for k, v in arg_dict.items()}
        own = {name: options.pop(name) for name in ("truncate", "seed") if name in options}
        batch, most = str(given.get("batch_size", "auto")), given.get("max_batch_size")
        if not batch.startswith("auto"):
            most = batch
        if most is not None and "max_batch" not in options:
            options["max_batch"] = _whole(most, "--batch_size")
        if "device" in given:
            options.setdefault("device", "auto" if given["device"] == "cuda:0" else given["device"])
        return cls(Engine.load(**options), **own)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> FoldspecLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # what it is

    def get_model_info(self) -> dict[str, Any]:
        """For ``config`` of lm-eval's results: how they were made. ``tau`` is of all generated texts together; None
        where none took a round."""
        return {
            "foldspec": {
                "version": __version__,
                "settings": self._engine.settings(),
                "tau": tau_pooled(self._commits),
                "rounds": sum(map(len, self._commits)),
                "texts_generated": len(self._commits),
                "texts_scored": self._scored,
                "cut_to_fit": self._cut,
                "seed": self._seed,
            }
        }

    @property
    def max_length(self) -> int:
        """Tokens that the target may read before the one that it is asked about."""
        return self._engine.max_context - 1

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say it: lm-eval's own number."""
        return 256

    @property
    def eot_token_id(self) -> int:
        """EOS; where the tokenizer names none, the lowest id that ends a text."""
        ends = [self._tokenizer.eos_id] if self._tokenizer.eos_id is not None else sorted(self._engine.stop_ids)
        if not ends or ends[0] is None:
            raise UsageError("names neither BOS nor EOS to stand before an empty context", where="the tokenizer")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, or EOS where there is none."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's cache of requests."""
        source = self._engine.settings()["target"]
        return "__".join(str(part) for part in source.values() if part).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, BOS once in front where the tokenizer adds it; False: nothing is added."""
        return self._tokenizer.encode(string, special=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the target's template; None where none is asked for."""
        if chat_template is False or chat_template is None:
            return None
        if chat_template not in (True, "default"):
            raise UsageError("only the template named default is read", where=f"--apply_chat_template {chat_template}")
        return need_template(self._engine.template, self.tokenizer_name).source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat; without generation prompt, it ends with the last message, which the model goes on
        with."""
        template = need_template(self._engine.template, self.tokenizer_name)
        text = template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        for ending in (last, last.strip()):
            before, found, _ = text.rpartition(ending)
            if found:
                return before + ending
        raise UsageError("does not keep the last message as it stands, so none can go on with it", where=template.where)

    # requests

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that predict each token once."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for i, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(i, *pair) for pair in map(make_disjoint_window, rolling)]
        scores = self._score([(context, text) for _, context, text in windows], disable_tqdm)
        sums = [0.0] * len(requests)
        for j, (logprob, _) in sorted(scores):
            sums[windows[j][0]] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(*request) for request in requests]
        found: dict[int, tuple[float, bool]] = {}
        for i, score in self._score(pairs, disable_tqdm):
            found[i] = score
            self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
        return [found[i] for i in range(len(requests))]

    def _fitting(
        self, texts: tuple[str, str], context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """The ids of a request, which are read but for the last."""
        if not continuation:
            raise UsageError(f"{texts[1]!r} adds no token to its context", where="a continuation")
        context = context or [self.prefix_token_id]  # it was spaces alone, which moved over
        return self._cut_to(context, self.max_length + 1 - len(continuation)), continuation

    def _cut_to(self, context: list[int], most: int) -> list[int]:
        """The last ``most`` ids of a context."""
        if len(context) <= most:
            return context
        if not self._truncate or most < 1:
            what = f"has {len(context)} tokens, of which {max(most, 0)} fit beside what follows it"
            do = "raise max_context" if most < 1 else "raise max_context, or cut it with --model_args truncate=True"
            raise UsageError(what, where="a task's context", do=do)
        self._cut += 1
        return context[-most:]

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], quiet: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """(index, (log-likelihood, whether greedy decoding says it)) of each (context, continuation), longest context
        first; requests with one context share its prefill."""
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i][0]))
        bar = tqdm(total=len(pairs), disable=quiet, desc="foldspec: log-likelihoods")
        with bar:
            for context, same in groupby(order, key=lambda i: pairs[i][0]):
                with self._engine.prefill(context) as prefix:
                    for i in same:
                        scored = prefix.score(pairs[i][1])
                        self._scored += 1
                        bar.update()
                        yield i, (sum(scored.logprobs), all(scored.greedy))
        self._say_cut()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text of each request, which ends before the first of its ``until`` or the target's own end."""
        prompts, params = [], []
        for i, request in enumerate(requests):
            own = self._params(request.args[1], i)
            ids = self.tok_encode(request.args[0])
            prompts.append(self._cut_to(ids, self._engine.max_context - own.max_tokens) or [self.prefix_token_id])
            params.append(own)
        order = sorted(range(len(requests)), key=lambda i: -len(prompts[i]))
        texts: dict[int, str] = {}
        running = self._engine.completions([prompts[i] for i in order], [params[i] for i in order])
        for at, done in tqdm(running, total=len(requests), disable=disable_tqdm, desc="foldspec: texts"):
            if done.error is not None:
                raise done.error
            i = order[at]
            texts[i] = done.text
            self._count(done)
            self.cache_hook.add_partial("generate_until", requests[i].args, done.text)
        self._say_cut()
        return [texts[i] for i in range(len(requests))]

    def _params(self, given: Mapping[str, Any], place: int) -> SamplingParams:
        """A task's ``generation_kwargs`` as foldspec's. Raises :class:`UsageError` for one that it does not know."""
        known = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        for name, value in known.items():
            if name not in OWN and name not in SAMPLING and (name, value) != ("num_beams", 1):
                raise UsageError(f"unknown generation_kwargs {name}={value!r}", where="a task", do="leave it out")
        temperature = float(known.get("temperature") or 0.0)
        stop = [string for string in dict.fromkeys(known["until"]) if string]
        ids = [self._tokenizer.encode(string, special=False) for string in stop]
        return SamplingParams(
            max_tokens=known["max_gen_toks"],
            stop=tuple(stop),
            # the text of a special token is in no text, so that its id must end it
            stop_ids=tuple(found[0] for found in ids if len(found) == 1 and not self._tokenizer.visible(found)),
            temperature=temperature,
            seed=(self._seed + place) % (1 << 64) if temperature > 0 else None,
            **{name: known[name] for name in SAMPLING if name in known},
        )

    def _count(self, done: Completion) -> None:
        self._commits.append([len(each.committed) for each in done.rounds])

    def _say_cut(self) -> None:
        if self._cut:
            log.warning(
                "%d contexts so far were cut from the left to fit %d tokens", self._cut, self._engine.max_context
            )


def _read(name: str, value: Any) -> Any:
    """A value of ``--model_args``, of which lm-eval has made what it looks like."""
    if name == "drafter" and value is None:  # lm-eval's reading of drafter=none
        return "none"
    if not isinstance(value, str) or name not in PARSERS:
        return value
    try:
        return PARSERS[name](value)
    except ValueError:
        raise UsageError(f"{value!r} is not a number", where=f"--model_args {name}") from None


def _whole(value: Any, where: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"must be auto or a whole number, not {value!r}", where=where) from None
