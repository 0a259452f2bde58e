"""`gplan quickstart --random`, whole: the commands it runs, what it prints where, and that nothing is left running."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.local_server import local_server
from cli.quickstart import STREAMED, TOGETHER
from cli.replays import Outcome, read_replays, replays_table
from formats.container import read_plan
from gplan.errors import GplanError
from tests.cli.command import gplan


def test_quickstart_plans_serves_asks_and_stops(tmp_path: Path) -> None:
    done = gplan("quickstart", "--random", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    plan = tmp_path / "gplan" / "random-llama.gplan"
    for question in (STREAMED, *TOGETHER):
        assert f"\n> {question} " in done.stdout
    replayed, total = map(int, re.findall(r"(\d+) of (\d+) steps replayed", done.stdout)[0])
    assert 0 < replayed <= total
    if read_plan(plan).decode.backend != "eager":
        assert re.search(r"decode +replayed, bucket 1[ ,]", done.stdout)
    for line in (f"$ gplan plan {plan.with_suffix('')}", f"$ gplan serve {plan}", f"next: gplan show {plan}"):
        assert line in done.stderr
    url = re.findall(r"ready at (http://\S+);", done.stderr)[0]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(GplanError, match=r"nowhere\.gplan: does not exist"),
        local_server([str(tmp_path / "nowhere.gplan")], tmp_path / "log"),
    ):
        pass


METRICS = """\
# TYPE gplan_steps counter
gplan_steps_total{bucket="2",outcome="replayed",phase="decode",reason="",variant=""} 40.0
gplan_steps_total{bucket="",outcome="eager",phase="prefill",reason="too_large",variant=""} 2.0
# TYPE gplan_padding_rows counter
gplan_padding_rows_total{phase="decode"} 7.0
"""


def test_replays_are_read_off_metrics() -> None:
    replays = read_replays(text_string_to_metric_families(METRICS))
    assert replays.outcomes == (Outcome("decode", 2, "", "", 40), Outcome("prefill", 0, "", "too_large", 2))
    assert (replays.replayed, replays.total) == (40, 42)
    assert replays_table(replays)[-1] == "40 of 42 steps replayed; padding rows: 7 in decode"
