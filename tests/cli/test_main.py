"""Exit codes, which stream says what, and that every error says what to do next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli import main
from cli.main import cli, run
from formats.container import write_plan
from formats.errors import FormatError
from gplan.errors import DriftError, FitError, GplanError, VerificationError
from tests.cli.command import ROOT, check_words, commands_in, gplan
from tests.formats.plans import make_plan


@pytest.fixture
def raising() -> Iterator[list[BaseException]]:
    """A command `fail` that raises what the test puts into the list."""
    errors: list[BaseException] = []

    @click.command()
    def fail() -> None:
        """Fails."""
        raise errors[0]

    cli.add_command(fail)
    yield errors
    del cli.commands["fail"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GplanError("it broke", "mend it"), 1),
        (FormatError("it broke", "mend it"), 1),
        (DriftError("it broke", "mend it"), 3),
        (FitError("it broke", "mend it"), 4),
        (VerificationError("it broke", "mend it"), 5),
    ],
)
def test_an_expected_error_is_told_with_its_remedy_and_code(
    error: Exception, code: int, raising: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    raising.append(error)
    assert run(["fail"]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: it broke\nhint: mend it\n"


def test_an_unexpected_error_is_one_line_and_how_to_see_more(
    raising: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising.append(ZeroDivisionError("division\nby zero"))
    assert run(["fail"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "error: unexpected ZeroDivisionError: division by zero"
    assert "GPLAN_DEBUG=1" in told[1]
    assert len(told) == 2
    monkeypatch.setenv("GPLAN_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(["fail"])


def test_an_interrupt_is_130(raising: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    raising.append(KeyboardInterrupt())
    assert run(["fail"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_broken_pipe_of_our_own_is_not_mistaken_for_a_closed_stdout(
    raising: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    raising.append(BrokenPipeError(32, "Broken pipe"))
    assert run(["fail"]) == 1
    assert "Broken pipe" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_not_an_error(tmp_path: Path) -> None:
    write_plan(make_plan(), tmp_path / "p.gplan")
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "show", tmp_path / "p.gplan"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == main.BROKEN_PIPE


@pytest.mark.parametrize("arguments", [["show"], ["show", "--nope", "x"], ["nonsense"], []])
def test_wrong_usage_is_2_and_shows_the_usage(arguments: list[str]) -> None:
    done = gplan(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage: gplan" in done.stderr


@pytest.mark.parametrize("content", [b"", b"not a plan at all", None])
@pytest.mark.parametrize("command", [["show"], ["check"], ["diff", __file__]])
def test_a_file_that_is_no_plan_is_refused(command: list[str], content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "bad.gplan"
    if content is not None:
        path.write_bytes(content)
    done = gplan(*command, path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr


def test_every_command_shows_examples_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text('checkpoint = "./model"\noutput = "model.gplan"\n')
    for name, command in cli.commands.items():
        assert command.help is not None
        examples = commands_in(command.help)
        assert any(words[0] == name for words in examples), name
        for words in examples:
            check_words(words)


def test_the_list_of_commands_is_not_cut_off() -> None:
    listed = gplan("--help").stdout.partition("Commands:")[2].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(cli.commands)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


def test_the_installed_command_is_this_one() -> None:
    done = gplan("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("gplan ")


def test_sigint_reaches_a_command(tmp_path: Path) -> None:
    """A real signal, while the command waits for a pipe to be opened at the other end."""
    script = (
        # A shell starts what runs in its background with SIGINT ignored, and that is inherited.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import click, time\nfrom cli.main import cli, main\n"
        "@cli.command()\ndef wait():\n    click.echo('ready')\n    time.sleep(60)\n"
        "import sys\nsys.argv = ['gplan', 'wait']\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in talk


INTERRUPT_ON_IMPORT = """
import os, signal, sys, threading, time
import click
from cli.entry import main
from cli.main import cli

signal.signal(signal.SIGINT, signal.{disposition})

def interrupt():
    while "torch._C" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

@cli.command()
def load():
    threading.Thread(target=interrupt).start()
    import torch
    click.echo("loaded")

sys.argv = ["gplan", "load"]
main()
"""


def test_sigint_while_torch_is_loaded_ends_it_as_elsewhere() -> None:
    """An exception that the interrupt raised there would meet C++, which aborts."""
    script = INTERRUPT_ON_IMPORT.format(disposition="default_int_handler")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_sigint_that_is_ignored_stays_ignored() -> None:
    script = INTERRUPT_ON_IMPORT.format(disposition="SIG_IGN")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
