from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.live import Live, make_served


@pytest.fixture(scope="package")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="package")
def server(plan_path: Path) -> Iterator[Live]:
    with Live(plan_path) as live:
        yield live
        assert live.process.poll() is None, live.output
        assert live.metric("gplan_kv_pages_used") == 0, "pages leaked"
    assert live.process.returncode == 0, live.output
