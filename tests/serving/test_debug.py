"""`serve --debug-graphs --check-addresses`: the same answers, nothing replayed, and the cost is said."""

from __future__ import annotations

import re
from pathlib import Path

from tests.serving.live import MODEL, Live

QUESTION = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_debugging_changes_no_answer_and_says_what_it_costs(server: Live, plan_path: Path) -> None:
    with Live(plan_path, "--debug-graphs", "--check-addresses", "--check-kv") as debugged:
        ours, theirs = (
            live.post("/v1/completions", QUESTION).json()["choices"][0]["text"] for live in (debugged, server)
        )
        assert ours == theirs
        assert debugged.metric("gplan_steps_total", outcome="debug", phase="decode", bucket="1") == 7
        assert debugged.metric("gplan_steps_total", outcome="replayed") == 0
        info = debugged.get("/server_info").json()
    assert [info["debug"][name] for name in ("graphs", "addresses", "kv")] == [True] * 3
    graphs, addresses, kv = info["debug"]["costs"]
    assert re.search(r"decode takes 2\.?\d*(?: to 2\.?\d*)? times as long; .*prefill takes", graphs)
    assert re.search(r"--check-addresses: before every replay \d+ µs of the host, \d+\.\d% of a replay of", addresses)
    assert re.search(r"--check-kv: 1 page less, \d+ µs after every step", kv)
    assert graphs in debugged.output
    assert addresses in debugged.output


def test_without_the_switches_nothing_is_debugged(server: Live) -> None:
    assert server.get("/server_info").json()["debug"] == {"graphs": False, "addresses": False, "kv": False, "costs": []}
