"""`--config`: the file's keys are the flags, flags go before it, and nothing in it is passed over."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cli.config import config_option
from cli.main import cli, run
from formats.container import read_plan, write_plan
from gplan.planning.options import parse_buckets
from tests.formats.plans import make_plan


@click.command()
@click.argument("checkpoint", required=False)
@click.option("-b", "--max-batch", type=click.IntRange(min=1), default=7)
@click.option("--share", "part", type=float)
@click.option("--buckets", callback=lambda context, parameter, value: value and parse_buckets(value))
@click.option("--hash", is_flag=True)
@click.option("--name")
@config_option
def echo(**values: object) -> None:
    """Prints what it was given."""
    click.echo(repr(dict(sorted(values.items()))))


def told(folder: Path, text: str, *flags: str) -> dict[str, object]:
    path = folder / "options.toml"
    path.write_text(text)
    done = CliRunner().invoke(echo, ["--config", str(path), *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    values: dict[str, object] = eval(done.output)
    return values


DEFAULTS = {"checkpoint": None, "max_batch": 7, "part": None, "buckets": None, "hash": False, "name": None}


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    assert told(tmp_path, "") == DEFAULTS
    assert told(tmp_path, "max-batch = 9") == {**DEFAULTS, "max_batch": 9}
    assert told(tmp_path, "max-batch = 9", "--max-batch", "3") == {**DEFAULTS, "max_batch": 3}
    assert told(tmp_path, "max-batch = 9", "-b", "7")["max_batch"] == 7


def test_every_kind_of_value(tmp_path: Path) -> None:
    text = 'checkpoint = "./100% model"\nshare = 0.5\nbuckets = [4, 1]\nhash = true\nname = "a=b"'
    expected = {**DEFAULTS, "checkpoint": "./100% model", "part": 0.5, "buckets": (1, 4), "hash": True, "name": "a=b"}
    assert told(tmp_path, text) == expected
    assert told(tmp_path, 'buckets = "1-3"\nhash = false') == {**DEFAULTS, "buckets": (1, 2, 3)}


@given(value=st.integers(-5, 10**6) | st.floats(allow_nan=False) | st.booleans() | st.text(max_size=5))
def test_a_value_is_read_as_the_flag_reads_it(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("config") / "options.toml"
    text = str(value).lower() if isinstance(value, bool | float) else repr(value)
    if isinstance(value, str):
        text = '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'
    path.write_text(f"max-batch = {text}")
    by_file = CliRunner().invoke(echo, ["--config", str(path)])
    by_flag = CliRunner().invoke(echo, [f"--max-batch={value}"])
    assert by_file.exit_code == (2 if isinstance(value, bool) else by_flag.exit_code)
    if by_file.exit_code == 0:
        assert by_file.output == by_flag.output


def refused(folder: Path, text: str) -> Result:
    path = folder / "plan.toml"
    path.write_text(text)
    done = CliRunner().invoke(cli, ["plan", "nowhere", "-o", str(folder / "x.gplan"), "--config", str(path)])
    assert done.exit_code != 0
    assert "plan.toml: " in done.stderr
    return done


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch = 3", "unknown key 'max_batch'. Did you mean max-batch?"),
        ("decode-bucket = [1]", "Did you mean decode-buckets?"),
        ("zzz = 1", "unknown key 'zzz'. There are checkpoint, output, workload,"),
        ('config = "other.toml"', "unknown key 'config'"),
        ("[plan]\nmax-batch = 3", "unknown key 'plan'"),
        ("[max-batch]\nsize = 3", "max-batch: dict is no value"),
        ("max-batch = 3.5", "max-batch: '3.5' is not a valid integer"),
        ("max-batch = 0", "max-batch: 0 is not in the range"),
        ("max-batch = true", "max-batch: True is not a value for it"),
        ("hash-contents = 1", "hash-contents: is true or false"),
        ('decode-backend = "fast"', "decode-backend: 'fast' is not one of"),
        ('memory = "24 gigs"', "memory: "),
        ("decode-buckets = [1, 0]", "decode-buckets: "),
        ("max-batch = 1979-05-27", "max-batch: date is no value"),
    ],
)
def test_what_is_no_option_is_refused_by_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    done = refused(tmp_path, text)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize("text", ["max-batch", "a = 1\na = 2", "x = " + "[" * 50_000, "\x00"])
def test_what_is_no_toml_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert run(["plan", "nowhere", "-o", str(tmp_path / "x.gplan"), "--config", str(path)]) == 1
    assert "plan.toml: not TOML" in capsys.readouterr().err


def test_a_whole_command_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plan(make_plan(), "old.gplan")
    Path("plan.toml").write_text(
        'from = "old.gplan"\noutput = "new.gplan"\nworkload = "closed:4"\nmax-batch = 8\nmemory = "1GiB"\n'
    )
    assert run(["plan", "--config", "plan.toml"]) == 0
    assert read_plan("new.gplan").workload.spec == "closed:4"
    assert run(["plan", "--config", "plan.toml", "--workload", "uniform:16-64"]) == 0
    assert read_plan("new.gplan").workload.spec == "uniform:16-64"
    assert run(["plan", "--config", "plan.toml", "--max-batch", "4"]) == 1
