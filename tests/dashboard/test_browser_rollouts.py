"""Rollouts of a run in a real browser: shown, coloured, searched, and always treated as text."""

import time
from pathlib import Path

import pytest

from legato.records.directory import RunDirectory
from tests.dashboard.browser import CHROMIUM, MISSING, Browser
from tests.dashboard.hostile import LONG, PIECES, hostile_rollouts
from tests.dashboard.pages import choose, curves, enter, open_rollouts, replace_answers, step_record

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


def test_text_of_a_model_is_never_read_as_html(page: Browser) -> None:
    open_rollouts(page)
    page.wait("document.querySelector('#tokens')")
    shown = page.run("document.getElementById('text').textContent")
    assert "<script>window.hacked = 1</script><img src=x" in shown
    assert "\\x1b[31mred\\x1b[0m \\u202egnp.exe\\u202c" in shown and "\u202e" not in shown and "\x1b" not in shown
    assert (
        page.run("document.querySelectorAll('#view img, #view script, #view svg, #view a, #runs img, #runs b').length") == 0
    )
    for key in ("2", "4", "1"):
        page.press(key)
        time.sleep(0.3)
    page.wait(f"{curves(page)}.length === 1")
    assert page.run("document.querySelectorAll('#view img, #view a[href^=javascript]').length") == 0


def test_tokens_are_coloured_by_each_quantity(page: Browser) -> None:
    open_rollouts(page)
    page.wait("document.querySelector('#tokens')")
    assert page.run("[...document.querySelectorAll('.token')].map(t => t.textContent)")[:4] == PIECES[:4]
    shades = "[...document.querySelectorAll('.token')].map(t => t.className.replace('token ', ''))"
    assert page.run(shades) == ["z", "p5 cut", "m5", "p1", "m1", "p3", "z"]
    expected = {
        "logprob": ["m1", "m3 cut", "m1", "m1", "m5", "m2", "m1"],
        "advantage": ["p5", "p5 cut", "p5", "p5", "p5", "p5", "p5"],
        "coefficient": ["p5", "z cut", "p5", "p5", "p5", "p5", "p5"],
    }
    for quantity, classes in expected.items():
        page.press("c")
        assert page.run("document.getElementById('colouring').value") == quantity
        assert page.run(shades) == classes
    page.press("c")
    page.run("document.querySelector('.token').focus()")
    page.press("ArrowRight")
    numbers = page.run("document.querySelector('.token-numbers').textContent")
    assert "ratio 1.492" in numbers and "log-prob -2" in numbers and "advantage 1.5" in numbers and "no gradient" in numbers
    paint = "getComputedStyle(document.querySelectorAll('.token')[1]).backgroundColor"
    assert page.run(paint) != page.run(paint.replace("[1]", "[2]")) != "rgba(0, 0, 0, 0)"


def test_ratios_that_differ_from_one_by_rounding_have_no_colour(page: Browser) -> None:
    """In the first update of a step every ratio is 1 but for the last digits."""
    open_rollouts(page)
    page.wait("document.querySelector('#tokens')")
    page.press("j")
    page.wait("document.getElementById('text').textContent === 'no'")
    assert page.run("[...document.querySelectorAll('.token')].map(t => t.className)") == ["token z", "token z"]
    assert page.run("document.querySelector('#detail .legend').textContent").startswith("0.9991.001")
    assert "Click a token" in page.run("document.querySelector('.token-numbers').textContent")


def test_a_group_is_shown_with_its_advantages(page: Browser) -> None:
    open_rollouts(page)
    page.wait("document.querySelectorAll('#group tbody tr').length === 2")
    assert page.run("[...document.querySelectorAll('#group tbody tr td:nth-child(4)')].map(c => c.textContent)") == [
        "1.5",
        "-0.5",
    ]
    page.run("document.querySelectorAll('#group tbody tr')[1].click()")
    page.wait("document.getElementById('text').textContent === 'no'")


def test_on_a_narrow_page_a_rollout_takes_the_place_of_the_list(page: Browser) -> None:
    visible = "['list', 'detail'].map(id => document.getElementById(id).offsetParent !== null)"
    page.ask("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    try:
        open_rollouts(page)
        page.wait("document.querySelectorAll('#list tr.row').length === 3")
        assert page.run(visible) == [True, False]
        page.run("document.querySelectorAll('#list tr.row')[1].click()")
        page.wait("document.getElementById('text')?.textContent === 'no'")
        assert page.run(visible) == [False, True]
        page.wait("document.getElementById('detail').getBoundingClientRect().top < 900")
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is beyond the edge"
        button = "[...document.querySelectorAll('.pages button')].find(b => b.textContent.includes('{}'))"
        page.run(button.format("Before") + ".click()")
        page.wait("document.getElementById('text').textContent !== 'no'")
        page.run(button.format("All") + ".click()")
        assert page.run(visible) == [True, False]
    finally:
        page.ask("Emulation.clearDeviceMetricsOverride")
    assert page.run(visible) == [True, True]


def test_rollouts_are_searched_and_filtered(page: Browser) -> None:
    open_rollouts(page)
    page.wait("document.getElementById('list').dataset.count === '3'")
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    for letter in "GNP.exe":
        page.press(letter)
    page.wait("document.getElementById('list').dataset.count === '2'")
    enter(page, "document.getElementById('search')", "", "input")
    for name, value, count in (("verdict", "wrong", 1), ("verdict", "", 3), ("stop", "length", 2), ("stop", "", 3)):
        enter(page, f"document.querySelector('[aria-label={name}]')", value)
        page.wait(f"document.getElementById('list').dataset.count === '{count}'")
    page.run("document.activeElement.blur()")
    page.wait("document.getElementById('text').textContent !== 'no'")  # which the list before this one had opened
    page.press("j")
    page.wait("document.getElementById('text').textContent === 'no'")
    page.press("ArrowRight")
    page.wait("document.activeElement.dataset.token === '0'")
    page.press("ArrowRight")
    assert page.run("document.activeElement.dataset.token") == "1"
    page.press("k")
    page.wait("document.getElementById('text').textContent !== 'no'")


def test_rollouts_deleted_while_the_page_is_open_are_reported(page: Browser, folder: Path, tmp_path: Path) -> None:
    """A recovery moves the rollouts of steps that it gives up."""
    open_rollouts(page)
    page.wait("document.querySelector('#tokens')")
    here = RunDirectory(folder / "<img src=x onerror='window.hacked=5'>").rollouts_path(8)
    here.rename(tmp_path / "kept")
    page.press("j")
    page.wait("document.querySelector('#detail .bad')?.textContent.includes('does not exist')")
    (tmp_path / "kept").rename(here)
    assert [each for each in page.complaints() if "status of 400" not in each] == []
    page.events.clear()


def test_a_megabyte_of_output_comes_in_portions(page: Browser) -> None:
    open_rollouts(page)
    page.run("document.querySelectorAll('#list tr.row')[2].click()")
    page.wait("document.getElementById('text').textContent.startsWith('a line of output')")
    assert page.run("document.getElementById('text').textContent.length") == 20_000
    page.run(
        "[...document.querySelectorAll('#detail button')].find(b => b.textContent.startsWith('Show the other')).click()"
    )
    page.wait(f"document.getElementById('text').textContent.length === {len(LONG)}")
    assert len(LONG) > 10**6


@pytest.mark.parametrize("path", ["steps", "measured"])
def test_rollouts_opened_while_the_run_goes_on_are_listed(path: str, page: Browser, folder: Path) -> None:
    """A step that ends while the first answer is on its way asks again; whichever comes last lists them."""
    live = RunDirectory.open(folder / "live")
    live.write_rollouts(8, hostile_rollouts())
    open_rollouts(page)  # of another run, so that the step of this one is not known
    page.press("n")
    page.press("1")
    choose(page, "live")
    page.wait(f"{curves(page)}.length === 1")
    page.run("void (window.held = [])")
    replace_answers(page, path, "new Promise(go => window.held.push(go)).then(real)")
    page.press("3")
    page.wait("window.held.length === 1")
    live.append_metrics(step_record(live.metrics()[-1]["step"] + 1))
    page.wait("window.held.length === 2")
    page.run("(window.fetch = asking, window.held.forEach(go => go()))")
    page.wait("document.querySelector('#list')?.dataset.count === '3'")
