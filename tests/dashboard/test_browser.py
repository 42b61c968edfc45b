"""The dashboard and the report in a real browser: headless Chromium, as people would use it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard.browser import CHROMIUM, MISSING, Browser, browser, dashboard
from dashboard.hostile import LONG, PIECES, rollouts
from dashboard.synthetic import synthetic_run
from legato.dashboard.report import write_report
from legato.diagnostics.format import RunDirectory
from legato.diagnostics.health.rules import RULES

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "reward/mean": step / 10, "length/mean": 5.0, **more}


def run_of(parent: Path, name: str, steps: int, config: str = "", algorithm: str = "gspo") -> RunDirectory:
    directory = RunDirectory.create(parent, name)
    directory.write_config(config or f'[algorithm]\nname = "{algorithm}"\n\n[training]\nseed = 0\nsteps = 100\n')
    directory.append_metrics({"kind": "start", "name": name, "model": "tiny", "algorithm": algorithm})
    for step in range(1, steps + 1):
        directory.append_metrics(line(step))
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: healthy, hostile, torn, half written, and one that is being written."""
    place = tmp_path_factory.mktemp("runs")
    synthetic_run(place, steps=60, name="whole")
    hostile = run_of(place, "<img src=x onerror='window.hacked=5'>", 8, algorithm="<b>grpo</b>")
    hostile.write_rollouts(8, rollouts())
    finding = {"kind": "finding", "step": 5, "level": "alarm", "rule": "reward-fall", "evidence": "evidence/step-000005"}
    hostile.health.append(finding | {"words": "<img src=x onerror='window.hacked=6'> fell"})
    with hostile.health.path.open("ab") as file:
        file.write(b'{"kind":"finding","step":6,"lev')
    torn = run_of(place, "torn", 6)
    with torn.metrics_path.open("ab") as file:
        file.write(b'{"kind":"step","step":7,"rewar')
    (torn.path / "rollouts").mkdir()
    (torn.path / "rollouts" / "step-000006.jsonl.gz").write_bytes(b"\x1f\x8b\x08torn")
    (place / "begun").mkdir()
    (place / "begun" / "config.toml").write_text("[training")
    (place / "begun" / "environment.json").write_text("")
    run_of(place, "live", 10)
    return place


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="module")
def entered(folder: Path, chromium: Browser) -> Iterator[Browser]:
    with dashboard(folder) as (_, address):
        chromium.open(address)
        chromium.wait("document.querySelectorAll('#runs li').length === 5")
        chromium.wait("document.querySelector('.figures')?.dataset.ready")
        assert "key=" not in chromium.run("location.href")
        yield chromium


@pytest.fixture
def page(entered: Browser) -> Iterator[Browser]:
    """On the curves, with nothing chosen; nothing may have been complained about in the end."""
    entered.events.clear()
    entered.run("document.activeElement.blur()")
    entered.press("1")
    enter(entered, "document.getElementById('filter')", "", "input")
    entered.press("n")
    entered.wait("!document.querySelector('#runs input:checked')")
    yield entered
    assert entered.complaints() == []
    assert entered.run("window.hacked") is None


def item(name: str) -> str:
    """A run in the list, as an expression."""
    return f"[...document.querySelectorAll('#runs li')].find(e => e.textContent.startsWith({name!r}))"


def choose(page: Browser, *names: str) -> None:
    for name in names:
        page.run(f"{item(name)}.querySelector('input').click()")


def enter(page: Browser, element: str, value: str, event: str = "change") -> None:
    """Put a value into a control, as typing or choosing would."""
    page.run(f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{event}')) }})({element})")


def curves(page: Browser, key: str = "reward/mean") -> str:
    """The traces of a figure that are curves, as an expression."""
    return f"""(document.querySelector('figure[data-key="{key}"] .plot')?.data || []).filter(t => t.showlegend !== false)"""


def test_it_opens_with_the_newest_runs_drawn(entered: Browser) -> None:
    assert entered.run("document.querySelectorAll('#runs input:checked').length") == 4
    assert entered.run("document.querySelectorAll('.figures .plot svg .scatterlayer path.js-line').length") >= 4
    assert entered.complaints() == [], "neither errors nor violations of the content security policy"


def test_no_other_address_is_asked(entered: Browser) -> None:
    origin = entered.run("location.origin")
    asked = [
        each["params"]["request"]["url"] for each in entered.events if each.get("method") == "Network.requestWillBeSent"
    ]
    assert [address for address in asked if not address.startswith((origin, "data:", "blob:", "about:"))] == []


def test_curves_grow_while_the_trainer_writes(page: Browser, folder: Path) -> None:
    choose(page, "live")
    page.wait(f"{curves(page)}[0]?.x.at(-1) === 10")
    directory = RunDirectory(folder / "live")
    for step in range(11, 14):
        directory.append_metrics(line(step))
    page.wait(f"{curves(page)}[0].x.at(-1) === 13")
    page.wait(f"{item('live')}.textContent.includes('step 13')")


def test_runs_are_laid_over_each_other(page: Browser) -> None:
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


def open_rollouts(page: Browser, name: str = "<img") -> None:
    choose(page, name)
    page.press("3")
    page.wait("document.querySelector('#list')?.dataset.count")


def test_text_of_a_model_is_only_ever_text(page: Browser) -> None:
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
    told = page.run("document.querySelector('.told').textContent")
    assert "ratio 1.492" in told and "log-prob -2" in told and "advantage 1.5" in told and "no gradient" in told
    paint = "getComputedStyle(document.querySelectorAll('.token')[1]).backgroundColor"
    assert page.run(paint) != page.run(paint.replace("[1]", "[2]")) != "rgba(0, 0, 0, 0)"


def test_rounding_is_not_painted(page: Browser) -> None:
    """In the first update of a step every ratio is 1 but for the last digits."""
    open_rollouts(page)
    page.wait("document.querySelector('#tokens')")
    page.press("j")
    page.wait("document.getElementById('text').textContent === 'no'")
    assert page.run("[...document.querySelectorAll('.token')].map(t => t.className)") == ["token z", "token z"]
    assert page.run("document.querySelector('#detail .legend').textContent").startswith("0.9991.001")
    assert "Click a token" in page.run("document.querySelector('.told').textContent")


def test_a_group_is_shown_with_its_advantages(page: Browser) -> None:
    open_rollouts(page)
    page.wait("document.querySelectorAll('#group tbody tr').length === 2")
    assert page.run("[...document.querySelectorAll('#group tbody tr td:nth-child(4)')].map(c => c.textContent)") == [
        "1.5",
        "-0.5",
    ]
    page.run("document.querySelectorAll('#group tbody tr')[1].click()")
    page.wait("document.getElementById('text').textContent === 'no'")


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


def test_what_is_gone_meanwhile_is_said(page: Browser, folder: Path, tmp_path: Path) -> None:
    """A recovery moves the rollouts of steps that it gives up."""
    open_rollouts(page)
    page.wait("document.querySelector('#tokens')")
    here = RunDirectory(folder / "<img src=x onerror='window.hacked=5'>").rollouts_path(8)
    here.rename(tmp_path / "kept")
    page.press("j")
    page.wait("document.querySelector('#detail .bad')?.textContent.includes('is not there')")
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


def test_findings_are_listed_and_marked(page: Browser) -> None:
    choose(page, "<img")
    plot = "document.querySelector('figure[data-key=\"reward/mean\"] .plot')"
    page.wait(f"{plot}?.layout?.shapes?.[0]?.x0 === 5")
    line, curve = page.run(f"[{plot}.layout.shapes[0].line.color, {curves(page)}[0].line.color]")
    assert line == curve, "in the colour of its run"
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


def test_what_is_torn_or_half_written_is_shown_as_far_as_it_goes(page: Browser, folder: Path) -> None:
    choose(page, "torn", "begun", "whole")
    page.wait(f"{curves(page)}.length === 2")
    assert 6 in page.run(f"{curves(page)}.map(t => t.x.at(-1))")
    page.press("n")
    open_rollouts(page, "torn")
    assert "is damaged" in page.run("document.getElementById('list').textContent")
    page.press("1")
    RunDirectory(folder / "torn").append_metrics(line(7))
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


def answers_of(page: Browser, path: str, change: str) -> None:
    """Answers of one address from here on: `change` is an expression with `real`, which asks in truth."""
    page.run("window.asking ||= window.fetch")
    script = f"(where, more) => (real => where.startsWith('/api/{path}') ? {change} : real())(() => asking(where, more))"
    page.run(f"void (window.fetch = {script})")


@pytest.mark.parametrize(("key", "path"), [("2", "health"), ("4", "configs"), ("3", "steps")])
def test_an_answer_that_comes_late_does_not_take_the_place_of_another_view(page: Browser, key: str, path: str) -> None:
    choose(page, "whole")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    answers_of(page, path, "new Promise(go => window.release = go).then(real)")
    page.press(key)
    page.wait("window.release")
    page.run("window.fetch = asking")
    page.press("1")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    page.run("(window.release(), window.release = null, new Promise(go => setTimeout(go, 500)))")
    assert page.run("document.querySelector('.figures')?.dataset.ready") == "yes"


@pytest.mark.parametrize("broken", ["Promise.reject(new Error('gone'))", "Promise.resolve(new Response('', {status: 500}))"])
def test_a_view_that_failed_is_asked_for_again(page: Browser, broken: str) -> None:
    answers_of(page, "curves", broken)
    choose(page, "whole")
    page.wait("document.querySelector('#view .bad')")
    page.run("window.fetch = asking")
    page.wait("document.querySelector('.figures')?.dataset.ready")
    assert not page.run("document.querySelector('#view .bad')")


def test_light_and_dark(page: Browser) -> None:
    choose(page, "whole")
    page.wait("document.querySelector('.figures')?.dataset.ready")  # a figure may still hold what was drawn before
    paint = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    before = page.run(paint)
    page.press("t")
    after = page.run(paint)
    assert before[0] != after[0] and before[1] != after[1]
    page.press("t")
    assert page.run(paint) == before


def saved(page: Browser, place: Path, button: str, ending: str) -> bytes:
    page.run(f"document.querySelectorAll('.save')[0].querySelectorAll('button')[{button}].click()")
    end = time.monotonic() + 20
    while not (found := [each for each in place.iterdir() if each.name.endswith(ending)]):
        assert time.monotonic() < end, f"no {ending} was saved"
        time.sleep(0.05)
    return found[0].read_bytes()


def test_a_figure_is_saved_as_picture_and_as_data(page: Browser, tmp_path: Path) -> None:
    page.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    choose(page, "whole")
    page.wait(f"{curves(page)}.length === 1")
    assert saved(page, tmp_path, "0", ".svg").startswith(b"<svg")
    assert saved(page, tmp_path, "1", ".png").startswith(b"\x89PNG")
    assert json.loads(saved(page, tmp_path, "2", ".json"))["data"][-1]["y"]


def test_two_hundred_runs_are_listed_and_laid_over_each_other(chromium: Browser, tmp_path: Path) -> None:
    place = tmp_path / "many"
    place.mkdir()
    for number in range(200):
        run_of(place, f"run-{number:03d}", 12)
    chromium.events.clear()
    with dashboard(place) as (_, address):
        chromium.open(address)
        chromium.wait("document.querySelectorAll('#runs li').length === 200")
        chromium.wait("document.querySelector('.figures')?.dataset.ready")
        chromium.press("a")
        chromium.wait(f"{curves(chromium)}.length === 200", 30)
        assert chromium.complaints() == []


def test_the_report_draws_and_saves_offline(chromium: Browser, tmp_path: Path) -> None:
    report = write_report(synthetic_run(tmp_path, steps=40, name="<img src=x onerror=hacked>"))
    chromium.open("about:blank")  # the page before asks a dashboard that has ended
    chromium.wait("location.href === 'about:blank'")
    chromium.events.clear()
    chromium.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    chromium.open(report.as_uri())
    chromium.wait("document.querySelectorAll('.plot svg').length > 5")
    assert saved(chromium, tmp_path, "0", ".svg").startswith(b"<svg")
    assert saved(chromium, tmp_path, "1", ".png").startswith(b"\x89PNG")
    assert json.loads(saved(chromium, tmp_path, "2", ".json"))["data"]
    assert chromium.complaints() == []
