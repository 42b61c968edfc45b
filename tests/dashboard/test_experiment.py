"""The report of an experiment: its verdicts and the files it writes."""

import csv
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from legato.pages import drawing
from legato.pages.drawing import draw_svg, rasterise
from legato.pages.experiment import Account, Check, Sheet, markdown, read, write
from legato.pages.traces import BLUE, Figure, band, figure, line

SVG = "{http://www.w3.org/2000/svg}"


def account(**changes: object) -> Account:
    fields: dict[str, object] = {
        "name": "trial",
        "title": "A <trial>",
        "about": "What was done.",
        "facts": {"model": "tiny"},
        "sentences": ["It <b>held</b>."],
        "checks": [Check(what="slope", expected=-1.0, measured=-0.98, tolerance=0.05)],
        "sheets": [Sheet(name="rows", title="Rows", note="", headings=("of", "share"), rows=(("a|b", 0.123456), ("c", None)),
                         shares=("share",))],
        "figures": [picture()],
    }  # fmt: skip
    return Account(**(fields | changes))  # type: ignore[arg-type]


def picture() -> Figure:
    result = figure("A figure", "To see.", [line([1.0, 10.0], [2.0, 3.0], "curve", BLUE)], {})
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("check", "difference", "verdict"),
    [
        (Check(what="", expected=1.0, measured=1.5, tolerance=0.6), 0.5, "as expected"),
        (Check(what="", expected=1.0, measured=1.5, tolerance=0.4), 0.5, "differs"),
        (Check(what="", expected=4.0, measured=5.0, tolerance=0.2, relative=True), 0.25, "differs"),
        (Check(what="", expected=4.0, measured=5.0), 1.0, "not judged"),
        (Check(what="", expected=4.0, measured=math.nan, tolerance=1.0), None, "not measured"),
        (Check(what="", expected="yes", measured="no"), None, "differs"),
        (Check(what="", expected=0, measured=0, tolerance=0), 0.0, "as expected"),
    ],
)
def test_a_check_is_judged_by_its_tolerance(check: Check, difference: float | None, verdict: str) -> None:
    assert check.difference == (None if difference is None else pytest.approx(difference))
    assert check.verdict == verdict


def test_an_experiment_is_written_in_every_format_and_escaped(tmp_path: Path) -> None:
    files = write(tmp_path, account(), png=False)
    assert [path.name for path in files] == ["trial.html", "trial.md", "trial.json", "rows.csv", "a-figure.svg"]
    page = files[0].read_text()
    assert "A &lt;trial&gt;" in page and "It &lt;b&gt;held&lt;/b&gt;." in page and "as expected" in page
    stored = json.loads(files[2].read_text())
    assert stored["checks"][0]["difference"] == pytest.approx(0.02)
    assert stored["tables"]["rows"]["rows"] == [["a|b", 0.123456], ["c", None]]
    assert markdown(read(stored), figures="") == markdown(account(), figures="")
    assert list(csv.reader(files[3].read_text().splitlines())) == [["of", "share"], ["a|b", "0.123456"], ["c", ""]]
    assert "| a\\|b | 12.3 % |" in files[1].read_text() and "figures/a-figure.svg" in files[1].read_text()


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out"):
        write(tmp_path / "file", account(), png=False)


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    files = write(tmp_path, account(data={"x": math.nan}), png=False)
    assert json.loads(files[2].read_text())["data"] == {"x": None}


def test_text_without_figures_can_stand_in_another_page() -> None:
    assert "![" not in markdown(account(), figures="")


def test_every_kind_of_trace_is_drawn_at_its_position() -> None:
    shape = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": 2, "y1": 2, "line": {"dash": "dash"}}
    points = {"type": "scatter", "mode": "markers", "name": "points", "x": [1, 100, math.nan], "y": [1, 4, 2],
              "marker": {"color": ["#111111", "#222222", "#333333"]}, "error_y": {"array": [0.5, 0.5, 0.5]}}  # fmt: skip
    chart = figure(
        "All",
        "",
        [
            points,
            *band([1.0, 10.0, 100.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "band", BLUE),
            line([1, 100], [0, 4], "l", BLUE),
        ],
        {"xaxis": {"title": {"text": "x"}, "type": "log"}, "shapes": [shape]},
    )
    assert chart is not None
    tree = ElementTree.fromstring(draw_svg(chart))
    circles = tree.findall(f"{SVG}circle")
    # The third has no x; the log axis puts 1 to the left of 100.
    assert [circle.get("fill") for circle in circles] == ["#111111", "#222222"]
    assert float(circles[0].get("cx")) < float(circles[1].get("cx"))
    assert float(circles[0].get("cy")) > float(circles[1].get("cy"))
    assert len(tree.findall(f"{SVG}polygon")) == 1 and len(tree.findall(f"{SVG}polyline")) == 1
    texts = [text.text for text in tree.findall(f"{SVG}text")]
    assert {"All", "points", "band", "l", "x", "10", "100"} <= set(texts)


def test_bars_stand_beside_each_other_over_names() -> None:
    bars = [
        {"type": "bar", "name": name, "x": ["a", "b"], "y": [0.2, 0.4], "marker": {"color": BLUE}} for name in ("one", "two")
    ]
    chart = figure("Bars", "", bars, {"yaxis": {"tickformat": ".0%"}, "xaxis": {"type": "category"}})
    assert chart is not None
    boxes = ElementTree.fromstring(draw_svg(chart)).findall(f"{SVG}rect")[3:]  # ground and two marks of the legend
    lefts, heights = [float(box.get("x")) for box in boxes], [float(box.get("height")) for box in boxes]
    assert lefts[0] < lefts[2] < lefts[1] < lefts[3]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)


def test_without_a_tool_there_is_no_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing.shutil, "which", lambda name: None)
    svg = tmp_path / "a.svg"
    svg.write_text(draw_svg(picture()))
    assert rasterise(svg) is None


def test_a_tool_that_fails_gives_no_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing.shutil, "which", lambda name: "/bin/false")
    svg = tmp_path / "a.svg"
    svg.write_text(draw_svg(picture()))
    assert rasterise(svg) is None
