"""The dashboard and the report in a real browser: headless Chromium, as people would use it."""

import json
import time
from pathlib import Path

import pytest

from legato.health.rules import RULES
from legato.pages.report import write_report
from legato.records.directory import RunDirectory
from tests.dashboard.browser import CHROMIUM, MISSING, Browser, dashboard
from tests.dashboard.pages import choose, curves, enter, make_run, open_rollouts, replace_answers, run_item, step_record
from tests.dashboard.synthetic import synthetic_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


def test_the_dashboard_opens_with_the_newest_runs_drawn(dashboard_page: Browser) -> None:
    assert dashboard_page.run("document.querySelectorAll('#runs input:checked').length") == 4
    assert dashboard_page.run("document.querySelectorAll('.figures .plot svg .scatterlayer path.js-line').length") >= 4
    assert dashboard_page.complaints() == [], "neither errors nor violations of the content security policy"


def test_the_page_requests_no_other_address(dashboard_page: Browser) -> None:
    origin = dashboard_page.run("location.origin")
    addresses = [
        each["params"]["request"]["url"]
        for each in dashboard_page.events
        if each.get("method") == "Network.requestWillBeSent"
    ]
    assert [address for address in addresses if not address.startswith((origin, "data:", "blob:", "about:"))] == []


def test_curves_grow_while_the_trainer_writes(page: Browser, folder: Path) -> None:
    choose(page, "live")
    page.wait(f"{curves(page)}[0]?.x.at(-1) === 10")
    directory = RunDirectory(folder / "live")
    for step in range(11, 14):
        directory.append_metrics(step_record(step))
    page.wait(f"{curves(page)}[0].x.at(-1) === 13")
    page.wait(f"{run_item('live')}.textContent.includes('step 13')")


def test_chosen_runs_are_drawn_in_one_figure(page: Browser) -> None:
    choose(page, "live", "whole")
    page.wait(f"{curves(page)}.length === 2")
    names, colours = page.run(f"[{curves(page)}.map(t => t.name), {curves(page)}.map(t => t.line.color)]")
    assert sorted(names) == ["live", "whole"] and len(set(colours)) == 2
    assert page.run("[...document.querySelectorAll('.names .named')].map(e => e.textContent)") == names, "once for all"
    assert page.run("document.querySelectorAll('figure .legend .traces').length") == 0
    choose(page, "live")
    page.wait(f"{curves(page)}.length === 1")


def test_the_list_of_runs_is_filtered(page: Browser) -> None:
    page.press("/")
    for letter in "torn":
        page.press(letter)
    page.wait("document.querySelectorAll('#runs li').length === 1")
    assert "torn" in page.run("document.querySelector('#runs').textContent")


def test_a_quantity_is_added_and_drawn_on_a_logarithmic_axis(page: Browser) -> None:
    choose(page, "whole")
    page.wait("document.getElementById('quantities')?.childElementCount > 10")
    enter(page, "document.getElementById('add')", "clip/band_low")
    page.wait(f"{curves(page, 'clip/band_low')}.length === 1")
    page.run("document.querySelector('figure[data-key=\"clip/band_low\"] button[title^=Logarithmic]').click()")
    page.wait("document.querySelector('figure[data-key=\"clip/band_low\"] .plot').layout.yaxis.type === 'log'")


def test_a_logarithmic_axis_without_a_value_above_zero_is_linear_and_says_so(page: Browser) -> None:
    choose(page, "silent")
    page.wait(f"{curves(page, 'reward/mean')}.length === 1")
    figure = "document.querySelector('figure[data-key=\"reward/mean\"]')"
    page.run(f"{figure}.querySelector('button[title^=Logarithmic]').click()")
    page.wait(f"{figure}.querySelector('figcaption').textContent.includes('the axis is linear')")
    assert page.run(f"{figure}.querySelector('.plot').layout.yaxis.type") == "linear"
    page.run(f"{figure}.querySelector('button[title^=Logarithmic]').click()")
    assert page.run(f"{figure}.querySelector('figcaption').textContent") == ""


def test_a_short_run_is_as_wide_as_a_long_one_over_shares_of_the_run(page: Browser) -> None:
    choose(page, "live", "whole")
    page.wait(f"{curves(page)}.length === 2")
    enter(page, "document.getElementById('axis')", "share")
    assert page.run(f"{curves(page)}.map(t => t.x.at(-1))") == [1, 1]
    enter(page, "document.getElementById('axis')", "steps")
    assert 60 in page.run(f"{curves(page)}.map(t => t.x.at(-1))")


def test_curves_are_smoothed_and_evaluations_are_not(page: Browser) -> None:
    choose(page, "whole")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    ends = f"[{curves(page)}, {curves(page, 'eval/accuracy_sampled')}].map(t => [t[0].y[0], t[0].y.at(-1)])"
    before = page.run(ends)
    enter(page, "document.getElementById('smooth')", "15")
    after = page.run(ends)
    assert after[0] != before[0] and after[1] == before[1]
    enter(page, "document.getElementById('smooth')", "1")


def test_titles_are_words_with_the_key_beside(page: Browser) -> None:
    choose(page, "whole")
    page.wait(f"{curves(page)}.length === 1")
    texts = page.run(
        "(f => [f.querySelector('h3').textContent, f.querySelector('.keys').textContent])"
        "(document.querySelector('figure[data-key=\"clip/sequences\"]'))"
    )
    assert texts == ["Clipped responses", "clip/sequences"]


def test_findings_are_listed_and_marked(page: Browser) -> None:
    choose(page, "<img")
    plot = "document.querySelector('figure[data-key=\"reward/mean\"] .plot')"
    page.wait(f"{plot}?.layout?.shapes?.[0]?.x0 === 5")
    mark_colour, curve_colour = page.run(f"[{plot}.layout.shapes[0].line.color, {curves(page)}[0].line.color]")
    assert mark_colour == curve_colour, "in the colour of its run"
    assert "onerror" in page.run(f"{plot}.data.at(-1).hovertemplate") and page.run(f"{plot}.data.at(-1).text[0]") == (
        "alarm, reward-fall"
    )
    page.press("2")
    page.wait("document.querySelectorAll('.finding').length === 1")
    text = page.run("document.querySelector('.finding').textContent")
    assert "alarm" in text and "step 5" in text and "onerror" in text and "evidence in evidence/step-000005" in text
    rule = next(rule for rule in RULES if rule.name == "reward-fall")
    assert all(words in text for words in (*rule.causes, *rule.tries))
    assert page.run("document.querySelector('#runs .badge.alarm').textContent") == "alarm 1"


def test_configs_are_compared(page: Browser) -> None:
    choose(page, "whole", "live")
    page.press("4")
    page.wait("document.querySelector('#view table tbody tr')")
    text = page.run("document.querySelector('#view table').textContent")
    assert "training.steps" in text and "200" in text and "100" in text
    assert "training.seed" not in text


def test_half_written_runs_are_shown_as_far_as_they_go(page: Browser, folder: Path) -> None:
    choose(page, "torn", "begun", "whole")
    page.wait(f"{curves(page)}.length === 2")
    assert 6 in page.run(f"{curves(page)}.map(t => t.x.at(-1))")
    page.press("n")
    open_rollouts(page, "torn")
    assert "is damaged" in page.run("document.getElementById('list').textContent")
    page.press("1")
    RunDirectory(folder / "torn").append_metrics(step_record(7))
    page.wait(f"{curves(page)}[0]?.x.at(-1) === 7")


def test_everything_is_reached_with_the_keyboard(page: Browser) -> None:
    page.run("document.querySelector('#runs input').focus()")
    page.press("ArrowDown")
    page.press(" ")
    page.wait("document.querySelectorAll('#runs li')[1].querySelector('input').checked")
    page.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    page.press("ArrowRight")
    page.wait("document.querySelector('#tab-health').getAttribute('aria-selected') === 'true'")
    page.press("?")
    page.wait("document.getElementById('keys').open")
    page.press("Enter")
    page.wait("!document.getElementById('keys').open")
    controls = "[...document.querySelectorAll('button:not([role=tab]), input, select')]"
    assert page.run(f"{controls}.filter(e => e.tabIndex < 0).length") == 0


@pytest.mark.parametrize(("key", "path"), [("2", "health"), ("4", "configs"), ("3", "steps")])
def test_an_answer_that_comes_late_does_not_take_the_place_of_another_view(page: Browser, key: str, path: str) -> None:
    choose(page, "whole")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    replace_answers(page, path, "new Promise(go => window.release = go).then(real)")
    page.press(key)
    page.wait("window.release")
    page.run("window.fetch = asking")
    page.press("1")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    page.run("(window.release(), window.release = null, new Promise(go => setTimeout(go, 500)))")
    assert page.run("document.querySelector('.figures')?.dataset.ready") == "yes"


@pytest.mark.parametrize("broken", ["Promise.reject(new Error('gone'))", "Promise.resolve(new Response('', {status: 500}))"])
def test_a_view_that_failed_is_requested_again(page: Browser, broken: str) -> None:
    replace_answers(page, "curves", broken)
    choose(page, "whole")
    page.wait("document.querySelector('#view .bad')")
    page.run("window.fetch = asking")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    assert not page.run("document.querySelector('#view .bad')")


def test_the_theme_switches_between_light_and_dark(page: Browser) -> None:
    choose(page, "whole")
    page.wait("document.querySelector('.figures')?.dataset.ready")  # a figure may still hold what was drawn before
    paint = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    before = page.run(paint)
    page.press("t")
    after = page.run(paint)
    assert before[0] != after[0] and before[1] != after[1]
    page.press("t")
    assert page.run(paint) == before


def save_figure(page: Browser, place: Path, button: str, ending: str) -> bytes:
    page.run(f"document.querySelectorAll('.save')[0].querySelectorAll('button')[{button}].click()")
    end = time.monotonic() + 20
    while not (files := [each for each in place.iterdir() if each.name.endswith(ending)]):
        assert time.monotonic() < end, f"no {ending} was saved"
        time.sleep(0.05)
    return files[0].read_bytes()


def test_a_figure_is_saved_as_picture_and_as_data(page: Browser, tmp_path: Path) -> None:
    page.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    choose(page, "whole")
    page.wait(f"{curves(page)}.length === 1")
    assert save_figure(page, tmp_path, "0", ".svg").startswith(b"<svg")
    assert save_figure(page, tmp_path, "1", ".png").startswith(b"\x89PNG")
    assert json.loads(save_figure(page, tmp_path, "2", ".json"))["data"][-1]["y"]


def test_two_hundred_runs_are_listed_and_drawn_in_one_figure(chromium: Browser, tmp_path: Path) -> None:
    place = tmp_path / "many"
    place.mkdir()
    for number in range(200):
        make_run(place, f"run-{number:03d}", 12)
    chromium.events.clear()
    with dashboard(place) as (_, address):
        chromium.open(address)
        chromium.wait("document.querySelectorAll('#runs li').length === 200")
        chromium.wait("document.querySelector('.figures')?.dataset.ready")
        chromium.press("a")
        chromium.wait(f"{curves(chromium)}.length === 200")
        assert chromium.complaints() == []


def test_an_address_with_a_view_opens_that_view_through_either_page_of_the_key(chromium: Browser, tmp_path: Path) -> None:
    """The printed address carries the view behind it; a bookmarked view asks for the key and goes on to that view."""
    for name in ("one", "two", "three"):
        make_run(tmp_path, name, 3)
    chosen = "[...document.querySelectorAll('#runs li')].filter(e => e.querySelector('input').checked).map(e => e.innerText)"
    with dashboard(tmp_path) as (process, address):
        chromium.open(address + "#tab=configs&run=two")
        chromium.wait("document.querySelector('#tab-configs')?.getAttribute('aria-selected') === 'true'")
        assert [each.startswith("two") for each in chromium.run(chosen)] == [True]
        chromium.run("void (location.hash = 'tab=health&run=three')")
        chromium.wait("document.querySelector('#tab-health').getAttribute('aria-selected') === 'true'")
        assert [each.startswith("three") for each in chromium.run(chosen)] == [True]
        assert process.stdout is not None
        key_again = process.stdout.readline().split()[-1]
        chromium.ask("Network.clearBrowserCookies")
        chromium.open("about:blank")
        chromium.wait("location.href === 'about:blank'")
        chromium.open(address.partition("?")[0] + "#tab=configs&run=one")
        chromium.wait("document.querySelector('form input')")
        chromium.run(f"(document.querySelector('input').value = '{key_again}', document.querySelector('button').click())")
        chromium.wait("document.querySelector('#tab-configs')?.getAttribute('aria-selected') === 'true'")
        assert [each.startswith("one") for each in chromium.run(chosen)] == [True]
        assert "key=" not in chromium.run("location.href")


def test_the_report_draws_and_saves_offline(chromium: Browser, tmp_path: Path) -> None:
    report = write_report(synthetic_run(tmp_path, steps=40, name="<img src=x onerror=hacked>"))
    chromium.open("about:blank")  # the page before asks a dashboard that has ended
    chromium.wait("location.href === 'about:blank'")
    chromium.events.clear()
    chromium.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    chromium.open(report.as_uri())
    chromium.wait("document.querySelectorAll('.plot svg').length > 5")
    assert save_figure(chromium, tmp_path, "0", ".svg").startswith(b"<svg")
    assert save_figure(chromium, tmp_path, "1", ".png").startswith(b"\x89PNG")
    assert json.loads(save_figure(chromium, tmp_path, "2", ".json"))["data"]
    assert chromium.complaints() == []
