"""A browser and a dashboard over runs of every kind, for the tests of a file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.browser import Browser, browser, dashboard
from tests.dashboard.hostile import hostile_rollouts
from tests.dashboard.pages import enter, make_run, step_record
from tests.dashboard.synthetic import synthetic_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: healthy, hostile, torn, half written, and one that is being written."""
    place = tmp_path_factory.mktemp("runs")
    synthetic_run(place, steps=60, name="whole")
    hostile = make_run(place, "<img src=x onerror='window.hacked=5'>", 8, algorithm="<b>grpo</b>")
    hostile.write_rollouts(8, hostile_rollouts())
    finding = {"kind": "finding", "step": 5, "level": "alarm", "rule": "reward-fall", "evidence": "evidence/step-000005"}
    hostile.health.append(finding | {"words": "<img src=x onerror='window.hacked=6'> fell"})
    with hostile.health.path.open("ab") as file:
        file.write(b'{"kind":"finding","step":6,"lev')
    torn = make_run(place, "torn", 6)
    with torn.metrics_path.open("ab") as file:
        file.write(b'{"kind":"step","step":7,"rewar')
    (torn.path / "rollouts").mkdir()
    (torn.path / "rollouts" / "step-000006.jsonl.gz").write_bytes(b"\x1f\x8b\x08torn")
    (place / "begun").mkdir()
    (place / "begun" / "config.toml").write_text("[training")
    (place / "begun" / "environment.json").write_text("")
    make_run(place, "live", 10)
    silent = make_run(place, "silent", 0)
    for step in range(1, 4):
        silent.append_metrics(step_record(step, **{"reward/mean": 0.0}))
    # Listed last: the newest four are drawn first.
    os.utime(silent.metrics_path, (1, 1))
    return place


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("home")) as opened:
        yield opened


@pytest.fixture(scope="module")
def dashboard_page(folder: Path, chromium: Browser) -> Iterator[Browser]:
    with dashboard(folder) as (_, address):
        chromium.open(address)
        chromium.wait("document.querySelectorAll('#runs li').length === 6")
        chromium.wait("document.querySelector('.figures')?.dataset.ready")
        assert "key=" not in chromium.run("location.href")
        yield chromium


@pytest.fixture
def page(dashboard_page: Browser) -> Iterator[Browser]:
    """The dashboard on its curves with no run chosen. At the end the page must have logged no error."""
    dashboard_page.events.clear()
    dashboard_page.run("document.activeElement.blur()")
    dashboard_page.press("1")
    enter(dashboard_page, "document.getElementById('filter')", "", "input")
    dashboard_page.press("n")
    dashboard_page.wait("!document.querySelector('#runs input:checked')")
    yield dashboard_page
    assert dashboard_page.complaints() == []
    assert dashboard_page.run("window.hacked") is None
