"""Chat templates. They come with checkpoints, from anyone: rendered in a sandbox, every failure one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foldspec.errors import CheckpointError, UsageError
from foldspec.text.tokenizer import one_line, read_json, token_text

__all__ = ["ChatTemplate", "need_template"]

TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, where it stands, and the special tokens that it may name.

    Compiled at the first :meth:`render`: a broken template must not stop a request that uses none.
    """

    source: str
    where: str = "chat template"
    tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path | str) -> ChatTemplate | None:
        """chat_template.jinja, else ``chat_template`` of tokenizer_config.json (text, or the one named "default" of a
        list), else of chat_template.json, as processors of images have it; None without any. CheckpointError if a file
        is malformed."""
        path = Path(folder) / "tokenizer_config.json"
        config = read_json(path)
        named = {name: token_text(config, name, str(path)) for name in TOKENS}
        tokens = {name: text for name, text in named.items() if text is not None}
        file = path.with_name("chat_template.jinja")
        try:
            return cls(file.read_text(encoding="utf-8"), str(file), tokens)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot be read: {one_line(error)}", where=str(file)) from None
        source = config.get("chat_template")
        if isinstance(source, list):
            try:
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            except (KeyError, TypeError):
                raise CheckpointError("chat_template: an entry lacks its name or template", where=str(path)) from None
        if source is None:
            path = path.with_name("chat_template.json")
            source = read_json(path).get("chat_template")
        if source is not None and not isinstance(source, str):
            raise CheckpointError("chat_template must be text or a list of named texts", where=str(path))
        return None if source is None else cls(source, str(path), tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **switches: Any
    ) -> str:
        """The prompt's text, to be encoded without special tokens. ``switches`` are the template's own variables
        (``enable_thinking``). UsageError if the messages are malformed or refused, CheckpointError if the template
        fails."""
        values = {"tools": None, "documents": None, **self.tokens, **switches}
        plain = _plain(messages)
        try:
            return self._compiled.render(values, messages=plain, add_generation_prompt=add_generation_prompt)
        except _Refused as error:
            raise UsageError(
                f"the chat template refuses these messages: {one_line(error)}",
                where=self.where,
                do="change them, or use --no-chat",
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # a template can raise anything: undefined names, the sandbox's no, bad arithmetic
            raise self._failure(error) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> CheckpointError:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        what = f"the chat template fails{line}: {one_line(error) or type(error).__name__}"
        return CheckpointError(what, where=self.where, do="mend it, or use --no-chat")


def need_template(template: ChatTemplate | None, where: str) -> ChatTemplate:
    """The template itself; UsageError where the checkpoint ``where`` has none."""
    if template is None:
        raise UsageError(
            "the checkpoint has no chat template", where=where, do="use --no-chat, or add a chat_template.jinja to it"
        )
    return template


class _Refused(Exception):
    """Raised by a template's own ``raise_exception(message)``."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}..{% endgeneration %}`` marks what a model wrote, for training: here its body and no more."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's, without names like ``__html__`` that Python itself would call behind the sandbox's back."""

    def __init__(self, *args: Any, **names: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **names).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template, so that the templates of checkpoints render alike."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, namespace=_Namespace)
    return environment


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _refuse(message: object) -> None:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter writes < > & ' as escapes for HTML, which a model has never seen
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain JSON data, so that a template is handed nothing it could call. None values count as absent."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError("must be a list of one message or more", where="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"must be a dict with role and content, not {message!r:.80}", where=f"messages[{i}]")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UsageError(f"{key} must be a string, not {message.get(key)!r:.80}", where=f"messages[{i}]")
    try:
        return [json.loads(json.dumps({k: v for k, v in m.items() if v is not None})) for m in messages]
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"must be plain JSON data: {one_line(error)}", where="messages") from None
