"""Chat templates: rendered as transformers renders them, refused in one line, unable to leave the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models

from foldspec.errors import CheckpointError, FoldspecError, UsageError
from foldspec.text.chat import ChatTemplate, need_template

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{#- The system message, if there is one #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" + tools | tojson(indent=4) }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("Unknown role:\\n" + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + "<|end_header_id|>\\n\\n" }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LOOPS = """\
{%- macro show(m) %}[{{ m.role }}: {{ m.content | tojson }}]{% endmacro %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% generation %}
    {% set inner = show(message) %}
{{ loop.index }} {{ inner }}
    {% endgeneration %}
    {% if 'stop' in message.content %}{% break %}{% endif %}
{% endfor %}
{% generation %}{% set outer = 1 %}{% endgeneration %}
{{ inner is defined }} {{ outer is defined }}
{{ documents is none }} {{ eos_token }} {{ pad_token }} {{ dict(a=1)['a'] }}
{% if add_generation_prompt %}>{% endif %}

"""

QWEN3_5 = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA4 = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' }}
    {%- if not enable_thinking | default(false) %}
        {{- '<|channel>thought\\n<channel|>' }}
    {%- endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "qwen3.5": QWEN3_5, "gemma4": GEMMA4, "loops": LOOPS}
USER = [{"role": "user", "content": '  What\'s <b> & "that" in 日本語 👩‍👧?\n'}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": USER,
    "system": [{"role": "system", "content": " Be brief. "}, *USER],
    "turns": [
        *USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is.", "name": None},
        {"role": "user", "content": "stop"},
        {"role": "assistant", "content": "Done", "reasoning_content": "because"},
    ],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    "switches", [{}, {"enable_thinking": False, "date_string": "1 Jan"}, {"enable_thinking": True}]
)
def test_as_transformers(name: str, chat: str, opened: bool, switches: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    core = Core(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **TOKENS)
    expected = oracle.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=opened, **switches
    )
    template = ChatTemplate(TEMPLATES[name], tokens=TOKENS)
    assert template.render(CHATS[chat], add_generation_prompt=opened, **switches) == expected


ASKED = [{"role": "user", "content": "hi"}]
CHATML_ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
GEMMA_ASKED = "<s><|turn>user\nhi<turn|>\n<|turn>model\n"
THINKING = {  # what prompts end in, with thinking on and off
    "qwen3": (CHATML_ASKED, CHATML_ASKED + "<think>\n\n</think>\n\n"),
    "qwen3.5": (CHATML_ASKED + "<think>\n", CHATML_ASKED + "<think>\n\n</think>\n\n"),
    "gemma4": (GEMMA_ASKED, GEMMA_ASKED + "<|channel>thought\n<channel|>"),
}


@pytest.mark.parametrize("name", THINKING)
def test_the_thinking_switch_as_models_have_it(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], tokens=TOKENS)
    assert tuple(template.render(ASKED, enable_thinking=on) for on in (True, False)) == THINKING[name]


def write(path: Path, **config: Any) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_where_a_template_is_found(tmp_path: Path) -> None:
    named_otherwise = [{"name": "tool_use", "template": "x"}]
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path)) is None
    assert ChatTemplate.load(write(tmp_path, chat_template=named_otherwise)) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ bos_token }}of a processor"}')
    for config in ({}, {"chat_template": named_otherwise}):
        template = ChatTemplate.load(write(tmp_path, bos_token="<s>", **config))
        assert template is not None and template.render(USER) == "<s>of a processor"
    token = {"content": "<s>", "lstrip": False}
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ bos_token }}listed"}]
    for value, text in (("{{ bos_token }}plain", "<s>plain"), (named, "<s>listed")):
        template = ChatTemplate.load(write(tmp_path, chat_template=value, bos_token=token, eos_token=None))
        assert template is not None and template.render(USER) == text
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}é of its own file\n", encoding="utf-8")
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render(USER) == "<s>é of its own file"


def test_a_processors_file_that_is_malformed(tmp_path: Path) -> None:
    for text in ("{", '{"chat_template": 5}', "[]"):
        (tmp_path / "chat_template.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"chat_template\.json"):
            ChatTemplate.load(tmp_path)


def test_no_template_names_the_way_out() -> None:
    with pytest.raises(UsageError, match="no chat template; use --no-chat"):
        need_template(None, "some/model")
    template = ChatTemplate("x")
    assert need_template(template, "some/model") is template


@pytest.mark.parametrize("value", [5, {"default": "x"}, [{"name": "default"}], ["x"]])
def test_malformed_entry(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.load(write(tmp_path, chat_template=value))


def test_malformed_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ unclosed",
        "{% unknown_tag %}",
        "{{ 'a' | no_such_filter }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content.no_such_method() }}",
        "{{ nothing() }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ [].__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__'] | list }}{{ ''.__class__.mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}{{ strftime_now.__globals__.json.x }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_failing_template_is_one_line(source: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template fails") as caught:
        ChatTemplate(source, "folder/chat_template.jinja").render(USER)
    assert "\n" not in str(caught.value) and "--no-chat" in str(caught.value)


def test_what_a_template_refuses_is_the_users_to_mend() -> None:
    with pytest.raises(UsageError, match="refuses these messages: Unknown role: robot") as caught:
        ChatTemplate(LLAMA3, tokens=TOKENS).render([*USER, {"role": "robot", "content": "x"}])
    assert "\n" not in str(caught.value)


class Rich:
    """An object with a method that a template must never reach."""

    def harm(self) -> None:
        raise AssertionError("called")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        USER[0],
        None,
        ["text"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "x", "rich": Rich()}],
    ],
)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(UsageError, match="messages") as caught:
        ChatTemplate(CHATML).render(messages)
    assert isinstance(caught.value, FoldspecError) and "\n" not in str(caught.value)
