"""The bench's tasks with SmolLM2's own tokenizer and chat template: enough items at every length of the bench."""

from __future__ import annotations

import pytest

from foldspec.tasks import MADE, make_task
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def encode(embedded):
    tokenizer, template = Tokenizer.load(embedded), ChatTemplate.load(embedded)

    def run(prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(tokenizer.encode_prompt(prompt))
        return tuple(tokenizer.encode(template.render(prompt), special=False))

    return run


@pytest.mark.parametrize("name", MADE)
def test_24_items_at_every_length(name, encode):
    found = {length: make_task(name).items(encode, length, 24, 0) for length in (512, 2048, 8064)}
    for length, items in found.items():
        assert len({item.prompt for item in items}) == 24
        assert [item.id for item in items] == [item.id for item in found[512]]
        lengths = {len(item.prompt) for item in items}
        assert lengths == {length} if name != "kv" else max(lengths) <= length and min(lengths) > length - 90
    for short, long in zip(found[512], found[8064], strict=True):
        if name == "code":
            assert short.prompt == long.prompt[-512:]
        if name == "docs":  # the question, and a good piece of what goes before it
            assert short.prompt[-200:] == long.prompt[-200:]
