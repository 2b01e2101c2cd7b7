"""Where output goes: pipes, files, closed streams, a disk that is full, and a terminal with its bars and live line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from cli.command import Result, command, copied, generate, pair_words, refused, result, start, with_text
from cli.screen import WIDTH, Terminal, shown

PROMPT = ["--prompt-ids", ",".join(str(5 + i) for i in range(80)), "--window", "24", "--ignore-eos"]
SHORT = [*PROMPT, "--max-tokens", "40"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_text(copied(tmp_path_factory.mktemp("words")))


@pytest.fixture(scope="module")
def text(words: Path) -> str:
    """What SHORT writes to stdout."""
    done = generate(*SHORT, pair=words)
    assert done.code == 0 and done.out.count("\n") > 2
    return done.out


def shell(home: Path, script: str, words: list[str], **env: str) -> subprocess.Popen[str]:
    """The command through a shell, which knows redirections that Python's subprocess does not."""
    return start(home, ["sh", "-c", f'exec "$@" {script}', "sh", *words], env)


def test_text_streams_while_it_is_generated(words: Path, tmp_path: Path) -> None:
    process = start(tmp_path, command("generate", *pair_words(words), *PROMPT, "--max-tokens", 1500), text=False)
    assert process.stdout is not None
    pieces = [os.read(process.stdout.fileno(), 65536)]
    while len(pieces) < 4:
        assert process.poll() is None and pieces[-1]  # the rest is not there yet
        pieces.append(os.read(process.stdout.fileno(), 65536))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err.startswith(b"1500 tokens, ")
    whole = generate(*PROMPT, "--max-tokens", 1500, "--json", pair=words).json["text"] + "\n"
    assert (b"".join(pieces) + out).decode() == whole and len(pieces[0]) < 20 < len(whole) / 100


def test_a_reader_that_goes_away_ends_the_command(words: Path, tmp_path: Path) -> None:
    """``| head -c 1``, and ``| true`` for output that is written at the very end."""
    heads = {
        "text": command("generate", *pair_words(words), *PROMPT, "--max-tokens", 1900),
        "json": command("generate", *pair_words(words), *SHORT, "--json"),
        "models": command("models"),
        "help": command("generate", "--help"),
    }
    started = {name: start(tmp_path, line, text=False) for name, line in heads.items()}
    for name, process in started.items():
        assert process.stdout is not None and process.stderr is not None
        if name == "text":
            assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
    for name, process in started.items():
        assert process.stderr is not None
        err = process.stderr.read().decode()
        process.stderr.close()
        assert process.wait(timeout=120) == 0, (name, err)
        assert "Traceback" not in err and "Exception" not in err and err.count("\n") <= 1, (name, err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_to_a_full_disk_is_an_error(words: Path, tmp_path: Path) -> None:
    lines = [
        command("generate", *pair_words(words), *SHORT, "--quiet"),
        command("generate", *pair_words(words), *SHORT, "--quiet", "--json"),
        command("models"),
    ]
    for process in [shell(tmp_path, ">/dev/full", line) for line in lines]:
        refused(result(process), 4, "No space left on device")


def test_closed_streams(words: Path, tmp_path: Path, text: str) -> None:
    line = command("generate", *pair_words(words), *SHORT)
    no_out, no_err, no_in = (shell(tmp_path, f"{n}>&-", line) for n in (1, 2, 0))
    done = result(no_out)
    assert done.code == 0 and done.out == "" and done.err.count("\n") == 1
    assert result(no_err) == Result(0, text, "")
    assert result(no_in)[:2] == (0, text)
    both = [command("generate", *pair_words(words), "--prompt-file", "-"), command("generate", "nothing", "-p", "x")]
    no_in, wrong = shell(tmp_path, "<&-", both[0]), shell(tmp_path, ">&- 2>&-", both[1])
    refused(result(no_in), 2)  # an empty prompt
    assert result(wrong) == Result(2, "", "")


def test_no_drawing_without_a_terminal(words: Path, tmp_path: Path, text: str) -> None:
    """Also where the environment asks for colours, as robots do."""
    line = command("generate", *pair_words(words), *SHORT)
    done = result(start(tmp_path, line, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}))
    assert done.code == 0 and done.out == text
    assert done.err.startswith("40 tokens, ") and done.err.count("\n") == 1 and "\x1b" not in done.err


def on_terminal(tmp_path: Path, words: list[str], *, both: bool, term: str = "xterm") -> tuple[Result, str]:
    """Run with stderr, and perhaps stdout, on a terminal; the result and all that the terminal saw."""
    terminal = Terminal()
    how = {"stdout": terminal.slave} if both else {}
    process = start(tmp_path, words, {"TERM": term}, stderr=terminal.slave, **how)
    terminal.close_slave()
    seen = terminal.rest()
    return result(process), seen


def test_bars_and_a_live_line_on_a_terminal_leave_redirected_text_alone(words: Path, tmp_path: Path, text: str) -> None:
    done, seen = on_terminal(tmp_path, command("generate", *pair_words(words), *SHORT), both=False)
    assert done.code == 0 and done.out == text
    assert "load" in seen and "prefill" in seen and "80/80" in seen and "tokens/s" in seen
    assert "w78" not in seen
    (last,) = [line for line in shown(seen) if line.strip()]  # bars and live line are gone again
    assert last.startswith("40 tokens, tau ") and last.endswith(", length")


def test_text_and_live_line_share_one_terminal(words: Path, tmp_path: Path, text: str) -> None:
    done, seen = on_terminal(tmp_path, command("generate", *pair_words(words), *SHORT), both=True)
    assert done.code == 0 and "tokens/s" in seen
    lines = [line for line in shown(seen) if line.strip()]
    wanted = [line[i : i + WIDTH] for line in text.splitlines() for i in range(0, len(line), WIDTH)]
    assert [line.rstrip() for line in lines[:-1]] == [line.rstrip() for line in wanted]
    assert lines[-1].startswith("40 tokens, tau ")
    report, seen = on_terminal(tmp_path, command("generate", *pair_words(words), *SHORT, "--json"), both=True)
    lines = "".join(line.ljust(WIDTH) if i else line for i, line in enumerate(shown(seen))).split("{", 1)
    assert report.code == 0 and lines[0].rstrip().endswith(", length")
    assert json.loads("{" + lines[1])["finish_reason"] == "length"


def test_a_terminal_that_cannot_draw_and_one_that_must_not(words: Path, tmp_path: Path, text: str) -> None:
    line = command("generate", *pair_words(words), *SHORT)
    done, seen = on_terminal(tmp_path, line, both=False, term="dumb")
    assert done.out == text and "\x1b" not in seen and seen.count("\n") == 1
    done, seen = on_terminal(tmp_path, [*line, "--quiet"], both=False)
    assert done == Result(0, text, "") and seen == ""
