"""Tasks with a byte for a token and with a BPE made here; the rules of LCA and Retr.KV against recorded numbers."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import tokenizers

from foldspec.errors import UsageError
from foldspec.tasks import MADE, make_task
from foldspec.tasks.base import ending
from foldspec.tasks.code import Source, cut, nearest, pieces, read_sources
from foldspec.tasks.held_out import held_out
from foldspec.tasks.kv import asked, pairs

GOLDEN = Path(__file__).parents[1] / "golden" / "tasks"


def as_text(prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"<{m['role']}>{m['content']}</>" for m in prompt) + "<assistant>"


def encode_bytes(prompt) -> tuple[int, ...]:
    return tuple(as_text(prompt).encode())


def decode(ids) -> str:
    return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def encode_bpe():
    """Byte-level BPE of 700 entries, with a BOS."""
    core = tokenizers.ByteLevelBPETokenizer()
    core.train_from_iterator([topics["with"], topics["import"]], vocab_size=700, show_progress=False)
    return lambda prompt: (9_999, *core.encode(as_text(prompt)).ids)


def test_an_unknown_task():
    with pytest.raises(UsageError, match=r"unknown task 'poems'; known: docs, code, kv"):
        make_task("poems")


def test_the_generator_of_retr_kv():
    for vector in json.loads((GOLDEN / "retr_kv_vectors.json").read_text()):
        drawn = pairs(vector["seed"], vector["n_pairs"])
        shown = json.dumps(dict(drawn))
        assert hashlib.sha256(shown.encode()).hexdigest() == vector["json_sha256"]
        assert len(shown) == vector["json_chars"]
        for target in vector["targets"]:
            index = asked(target["sample"], vector["n_pairs"], target["of"])
            assert (index, *drawn[index]) == (target["index"], target["key"], target["value"])


def test_the_cut_line_and_the_text_of_lca():
    tiny = json.loads((GOLDEN / "lca_tiny.json").read_text())
    target, line = tiny["target"], tiny["cut_line_0based"]
    sources = {name: Source.parse(text) for name, text in tiny["files"].items() if name.endswith(".py")}
    assert cut(target, sources) == line
    assert sources[target].text.split("\n")[line] == tiny["cut_line_text"]
    others = [name for name, _ in tiny["nearest_first"]]
    for case in tiny["cases"]:
        make = partial(ending, encode_bytes, case["limit"], pieces(target, line, others, sources), str, "lca")
        if case["eligible"]:
            assert hashlib.sha256(bytes(make())).hexdigest() == case["sha256"]
        else:
            with pytest.raises(UsageError, match="too many"):
                make()


def test_the_cut_line_and_the_history_by_hand():
    head = '"""Text."""\n' + "x = 1\n" * 49
    lines = ["# far()", "from far import far", "x.join(own())", "'far()'", "def own(): return near.y", "", "y = far(x)"]
    sources = {
        "a.py": Source.parse("def own(): pass\nclass join: pass\nclass K:\n    def x(self): pass\n"),
        "far.py": Source.parse("def far(): pass\n"),
        "near.py": Source.parse("def other(): pass\n\x0c\ndef near(): pass\n"),
        "target.py": Source.parse(head + "\n".join(lines)),
    }
    assert cut("target.py", sources) == 54  # near; not own, join (every str's), x (a method), the comment, the import
    assert nearest("target.py", 54, sources) == ["near.py", "far.py", "a.py"]
    assert nearest("target.py", 56, sources) == ["far.py", "near.py", "a.py"]
    assert cut("a.py", sources) is None  # too short
    text = "".join(reversed([*pieces("target.py", 56, ["near.py"], sources)]))
    assert text == f"# near.py\n{sources['near.py'].text.rstrip()}\n\n# target.py\n{head}" + "\n".join(lines[:6]) + "\n"


def test_code_reads_held_out_files_alone():
    assert all(held_out(f"stdlib/{path}") for path in read_sources())
    shown = decode(make_task("code").items(encode_bytes, 200_000, 1, 3)[0].prompt)
    files = [line[2:] for line in shown.split("\n") if line.startswith("# ") and line.endswith(".py")]
    assert len(files) > 3 and set(files) <= read_sources().keys()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_longer_code_prompt_only_begins_earlier(kind, encode_bpe):
    encode, head = (encode_bytes, 0) if kind == "bytes" else (encode_bpe, 1)
    short, middle, long = (make_task("code").items(encode, length, 6, 1) for length in (1000, 1777, 5000))
    assert len({item.prompt for item in short}) == len({item.id for item in short}) == 6
    for a, b, c in zip(short, middle, long, strict=True):
        assert a.id == b.id == c.id and [len(i.prompt) for i in (a, b, c)] == [1000, 1777, 5000]
        assert a.prompt[:head] == b.prompt[:head] == c.prompt[:head]
        assert b.prompt[-1000 + head :] == a.prompt[head:] and c.prompt[-1777 + head :] == b.prompt[head:]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_longer_docs_prompt_only_has_more_between_the_section_and_the_question(kind, encode_bpe):
    encode = encode_bytes if kind == "bytes" else encode_bpe
    short, long = (make_task("docs").items(encode, length, 6, 1) for length in (1000, 5000))
    assert len({item.prompt for item in short}) == len({item.id for item in short}) == 6
    for a, b in zip(short, long, strict=True):
        assert a.id == b.id and (len(a.prompt), len(b.prompt)) == (1000, 5000)
        same = next(i for i, (x, y) in enumerate(zip(a.prompt, b.prompt, strict=False)) if x != y)
        opening = len(encode("<user>")) + 20
        assert same > opening and b.prompt[-(1000 - same) :] == a.prompt[same:]


def test_docs_asks_for_the_section_that_stands_first():
    openings = {text.strip("\n").split("\n\n")[0] for text in topics.values()}
    items = make_task("docs").items(encode_bytes, 700, 100, 0)
    assert len(items) >= 6  # with bytes for tokens few sections begin so briefly
    for item in items:
        text, _, question = decode(item.prompt).removeprefix("<user>").rpartition("\n\n")
        heading = text.split("\n\n")[0]
        assert heading in openings
        title = heading.split("\n")[0].replace('"', "")
        asked = question.removeprefix("Summarise the section on ").partition(" of the text above")[0]
        assert asked == (f"the {title.removeprefix('The ')}" if title.startswith("The ") else title)
        assert heading not in text[len(heading) :]


def test_kv_holds_as_many_pairs_as_fit(encode_bpe):
    words = (
        "Here is a JSON object. It gives a value for each key.\n\n{}\n\n"
        'Which value does it give for the key "{}"? Answer with the value alone.'
    )
    for item in make_task("kv").items(encode_bpe, 2000, 3, 2):
        sample = int(item.id.removeprefix("kv/"))
        drawn = pairs(2 * 500 + sample, 1000)

        def turn(count, drawn=drawn, sample=sample):
            key = drawn[asked(sample, count)][0]
            return encode_bpe([{"role": "user", "content": words.format(json.dumps(dict(drawn[:count])), key)}])

        count = max(count for count in range(1, 60) if len(turn(count)) <= 2000)
        assert turn(count) == item.prompt
        assert drawn[asked(sample, count)][1] == item.answer


@pytest.mark.parametrize("name", MADE)
def test_a_seed_fixes_the_order_and_a_limit_cuts_it(name):
    task = make_task(name)
    four = task.items(encode_bytes, 1200, 4, 7)
    assert task.items(encode_bytes, 1200, 2, 7) == four[:2]
    assert [item.id for item in task.items(encode_bytes, 1200, 4, 8)] != [item.id for item in four]
    assert all(item.id.startswith(f"{name}/") for item in four) and task.dataset and task.max_new > 0


@pytest.mark.parametrize(("name", "length"), [("docs", 511), ("docs", 10**6), ("code", 10**7), ("code", 0), ("kv", 99)])
def test_lengths_that_cannot_be_had(name, length):
    with pytest.raises(UsageError, match=f"^{name}: {length} tokens are too (few|many): "):
        make_task(name).items(encode_bytes, length, 1, 0)


def test_a_variable_of_its_own_needs_no_other_file():
    filler = "\n".join(f"x{i} = {i}" for i in range(60))
    texts = {
        "a.py": "def mode(): pass\ndef start(): pass\ndef needed(): pass\n",
        "b.py": f"{filler}\nmode = 3\ndef f(start):\n    return start, mode\nf(needed)\n",
        "c.py": f"{filler}\nmode = 3\ndef f(start):\n    return start, mode\n",
    }
    sources = {name: Source.parse(text) for name, text in texts.items()}
    assert cut("b.py", sources) == 63 and cut("c.py", sources) is None
