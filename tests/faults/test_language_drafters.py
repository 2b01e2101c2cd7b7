"""A language model as drafter that does not go with its target, or is asked for what it cannot do: one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import vocabularies
from cli.command import main, refused
from tokenizers import Tokenizer as Core

from foldspec.text.tokenizer import Tokenizer

WIDE = {**tiny.TARGET, "vocab_size": 400}


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two random models whose ids are those of one tokenizer."""
    for side, seed in (("target", 0), ("drafter", 1)):
        tiny.write_target(tmp_path / side, WIDE, seed)
        vocabularies.byte_level().save(str(tmp_path / side / "tokenizer.json"))
    return tmp_path


def words(pair: Path) -> list[object]:
    return ["--target", pair / "target", "--drafter", pair / "drafter", "--threads", 1]


def generate(pair: Path, *more: object) -> object:
    return main("generate", *words(pair), "-p", "hello world", "--max-tokens", 6, "--max-context", 64, *more)


def refuse(pair: Path, *says: str) -> None:
    """``generate`` and ``check`` say the same."""
    line = refused(generate(pair), 3, "is not a drafter for", *says)
    assert refused(main("check", *words(pair)), 3) == line


def changed(folder: Path, old: str, new: str) -> None:
    path = folder / "tokenizer.json"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_pair_that_fits_is_silent(pair: Path) -> None:
    done = generate(pair, "--json")
    assert done.code == 0 and done.json["lossless"] and done.json["settings"]["context"] == "full", done
    assert "tokenizer" not in done.err
    checked = main("check", *words(pair), "--json").json
    assert checked["pair"]["verdict"] == "the drafter's vocabulary is the target's"
    assert checked["memory"]["draft cache"] != "0 MB"


def test_without_tokenizers_it_is_said(pair: Path) -> None:
    (pair / "drafter" / "tokenizer.json").unlink()
    done = generate(pair)
    assert done.code == 0 and "no two tokenizers to compare" in done.err


def test_another_vocabulary(pair: Path) -> None:
    tiny.write_target(pair / "drafter", {**WIDE, "vocab_size": 400 + 1025})
    refuse(pair, "it was made for 1425 ids, the target has 400")


def test_an_id_that_means_another_token(pair: Path) -> None:
    changed(pair / "drafter", '"content": "</s>"', '"content": "</S>"')
    refuse(pair, "'</S>' of the other", "use one with the target's tokenizer")


def test_a_text_that_is_cut_otherwise(pair: Path) -> None:
    """The same tokens, put together in another order."""
    core = Core.from_file(str(pair / "drafter" / "tokenizer.json"))
    core.pre_tokenizer.add_prefix_space = True
    core.save(str(pair / "drafter" / "tokenizer.json"))
    refuse(pair, "their tokenizers cut a text in different ways")


def test_tokens_that_one_has_besides(pair: Path) -> None:
    """A mask of the drafter's own, say: no difference, in either direction."""
    core = vocabularies.byte_level()
    core.add_special_tokens(["<mask>"])
    own, other = (Tokenizer(each) for each in (vocabularies.byte_level(), core))
    assert own.difference(other) is None and other.difference(own) is None
    core.save(str(pair / "drafter" / "tokenizer.json"))
    assert generate(pair).code == 0


NOT_FOR_IT: dict[str, tuple[str, ...]] = {
    "--context window": ("context", "reads its whole context", "no use for the method 'window'"),
    "--context fold": ("context", "reads its whole context"),
    "--confidence-stop 0.5": ("confidence_stop", "no confidence head"),
    "--steps 2": ("steps", "its effort is draft_tokens"),
    "--order entropy": ("order", "its effort is draft_tokens"),
    "--confidence 0.5": ("confidence", "its effort is draft_tokens"),
    "--draft-tokens -1": ("draft_tokens", "at least 0"),
    "--block-length 4": ("block_length", "has no use for it"),
}


@pytest.mark.parametrize("option", NOT_FOR_IT)
def test_what_it_has_no_use_for(pair: Path, option: str) -> None:
    refused(generate(pair, *option.split()), 2, *NOT_FOR_IT[option])


def test_longer_drafts_than_there_are_tokens_are_cut(pair: Path) -> None:
    done = generate(pair, "--draft-tokens", 40, "--json", "--trace")
    assert done.code == 0 and max(len(round_["drafted"]) for round_ in done.json["rounds"]) == 4


def test_drafts_too_long_for_states(tmp_path: Path) -> None:
    """A target with recurrent states takes back so many rows, and no more."""
    tiny.write_target(tmp_path / "target", tiny.QWEN3_5)
    tiny.write_target(tmp_path / "drafter", tiny.TARGET)
    given = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--prompt-ids", "1,2"]
    refused(main("generate", *given, "--draft-tokens", 64), 3, "blocks of 65 rows", "63 at most")
