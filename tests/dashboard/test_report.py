"""The report of a run: one file that fetches nothing and runs nothing from a model's text."""

import base64
import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects
from plotly.offline import get_plotlyjs

from legato.pages.comparison_figures import swept_axis
from legato.pages.figures import figures
from legato.pages.legible import legible, shorten
from legato.pages.page import cell
from legato.pages.page import page as make_page
from legato.pages.report import duration, probe_words, write_report
from legato.pages.traces import Figure
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError
from tests.dashboard.synthetic import synthetic_run
from tests.proof.pages import assert_page, numbers

SVG_TRACES = {"scatter", "bar"}


class Reader(HTMLParser):
    """Tags with their attributes, the text outside scripts and styles, and the scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces, self.scripts = list[str](), list[str]()
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def read_page(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return synthetic_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(run: RunDirectory) -> Reader:
    assert write_report(run) == run.path / "report.html"
    return read_page(run.report_path)


def small_run(parent: Path, *records: dict[str, Any], name: str = "small") -> RunDirectory:
    directory = RunDirectory.create(parent, name)
    directory.write_config("")
    for record in records:
        directory.append_metrics(record)
    return directory


def test_the_text_of_the_report_is_its_snapshot(report: Reader) -> None:
    """Accuracies, deviations, noise floor and samples in words; tests/proof/pages.py says how to renew the snapshot."""
    lines = [piece.strip() for piece in report.pieces if piece.strip()]
    # Versions and hardware of this machine come last.
    assert_page("report", "\n".join(lines[: lines.index("Environment")]))


def test_the_report_has_every_figure_and_plotly_accepts_each(run: RunDirectory, report: Reader) -> None:
    drawn = figures(run.metrics())
    titles = {figure.title for figure in drawn}
    assert titles >= {
        "Accuracy",
        "Reward",
        "Length of responses",
        "Entropy",
        "Clipped responses",
        "Ratios of responses",
        "Gradient norm",
        "Time of a step",
    }
    for figure in drawn:
        graph_objects.Figure(data=figure.data, layout=figure.layout)
        assert {trace["type"] for trace in figure.data} <= SVG_TRACES
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in figure.data)
    places = [attributes["id"] for tag, attributes in report.tags if attributes.get("class") == "plot"]
    assert places == [f"figure-{index}" for index in range(len(drawn))]


def test_clip_fractions_stand_by_update_and_ratios_first_and_last(run: RunDirectory) -> None:
    drawn = {figure.title: figure for figure in figures(run.metrics())}
    assert [trace["name"] for trace in drawn["Clipped responses"].data] == ["update 1", "update 2", "update 3", "update 4"]
    assert [trace["name"] for trace in drawn["Ratios of responses"].data] == ["step 1", "step 191"]
    assert all(abs(sum(trace["y"]) - 1) < 0.02 for trace in drawn["Ratios of responses"].data)
    edges = [shape["x0"] for shape in drawn["Ratios of responses"].layout["shapes"]]
    assert edges == pytest.approx([math.log1p(-3e-4), math.log1p(4e-4)])


def test_experts_that_changed_stand_by_update_where_there_are_experts(run: RunDirectory) -> None:
    assert "Experts that changed" not in {figure.title for figure in figures(run.metrics())}
    flips = {
        "router/flip_mean": 0.01,
        "router/flip_mean@0": 0.0,
        "router/flip_mean@1": 0.02,
        "router/mismatch_flip_mean": 0.0,
    }
    routed = [{**record, **flips} if record["kind"] == "step" else record for record in run.metrics()]
    drawn = {figure.title: figure for figure in figures(routed)}["Experts that changed"]
    assert [trace["name"] for trace in drawn.data] == ["update 1", "update 2", "engine and trainer"]
    graph_objects.Figure(data=drawn.data, layout=drawn.layout)


def test_the_report_loads_nothing_from_a_server(report: Reader) -> None:
    assert not [tag for tag, attributes in report.tags if {"src", "href", "srcset", "action", "data"} & set(attributes)]
    assert not {tag for tag, _ in report.tags} & {"link", "img", "iframe", "object", "base", "form"}


def test_the_report_is_small(run: RunDirectory, report: Reader) -> None:
    assert run.report_path.stat().st_size < 2.5e6 < len(get_plotlyjs())


def test_only_its_own_scripts_may_run(report: Reader) -> None:
    policy = next(attributes["content"] for tag, attributes in report.tags if "http-equiv" in attributes)
    assert policy is not None
    assert "default-src 'none'" in policy
    allowed = re.search(r"script-src ([^;]*);", policy)
    assert allowed is not None
    data, packed, drawing, unpacking = report.scripts
    assert json.loads(data)
    plotly = gzip.decompress(base64.b64decode(packed)).decode()
    assert plotly == get_plotlyjs()
    scripts = (plotly, drawing, unpacking)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert allowed.group(1) == " ".join(f"'sha256-{digest}'" for digest in digests)


def test_hostile_text_is_shown_and_not_executed(tmp_path: Path) -> None:
    evil = '</pre></script><script>alert(1)</script><img src=x onerror="alert(1)">\u202egnp.exe\x1b[2J\x00\ud800\u2028'
    directory = synthetic_run(tmp_path, steps=2)
    clean = read_page(write_report(directory))
    record = {"prompt": evil, "text": evil, "answer": evil, "reward": 1.0, "accuracy": 1.0, "stop": evil, "tokens": 3}
    directory.write_rollouts(1, [record])
    directory.write_rollouts(2, [record])
    directory.append_metrics({"kind": "end", "reason": evil})
    directory.append_metrics({"kind": "probe", "step": 2, "words": evil})
    directory.append_metrics({"kind": "step", "step": 3, f"reward/{evil}": 1.0, "reward/other": 0.5, evil: 1.0})
    directory.append_metrics({"kind": "start", "name": evil})
    lines = directory.metrics_path.read_text().splitlines()
    start = {"kind": "start", "name": evil, "model": evil, "algorithm": evil, "deviations": [evil], "notes": [evil]}
    directory.metrics_path.write_text("\n".join([json.dumps(start), *lines[1:]]) + "\n")
    directory.write_config(f"# {evil[:-3]}")
    page = read_page(write_report(directory))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in clean.tags}
    assert len(page.scripts) == 4
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]
    assert r"</pre></script><script>alert(1)</script>" in page.text
    assert r"\u202egnp.exe\x1b[2J\x00\ud800\u2028" in page.text
    assert not set("\u202e\x1b\x00\u2028") & set(page.text)
    assert "<" not in page.scripts[0]
    names = [trace["name"] for figure in json.loads(page.scripts[0]) for trace in figure["data"] if "name" in trace]
    assert any("&lt;script&gt;" in name for name in names)
    assert not [name for name in names if "<" in name or "\u202e" in name]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"kind": "start"}],
        [{"kind": "evaluation", "step": 0, "eval/accuracy_sampled": 0.5, "eval/problems": 10}],
        [{"kind": "evaluation", "step": 0, "eval/accuracy_sampled": math.nan}],
        [{"kind": "step", "step": 1, "reward/mean": 0.5}],
        [{"kind": "step", "step": 1, "reward/mean": math.nan, "entropy/mean": math.inf, "histograms": None}],
        [{"kind": "step", "step": 1, "histograms": {"ratio/sequence_log": {"edges": [0, 1], "counts": []}}}],
        [{"kind": "step", "step": 1, "histograms": {"ratio/sequence_log": {"edges": [0, 0], "counts": [3]}}}],
        [{"kind": "step", "step": 1, "histograms": {"ratio/sequence_log": {"edges": [0.0, 1e-9], "counts": [3]}}}],
        [{"kind": "step", "time/step_seconds": 1.0}, {"kind": "step", "step": "x", "time/step_seconds": 1.0}],
        [{"kind": "step", "step": 1, "gradient/norm": 0.0}, {"kind": "step", "step": 2, "gradient/norm": 1e9}],
        [{"kind": "start", "deviations": [], "notes": None}, {"kind": "probe"}, {"kind": "end"}, {"no": "kind"}],
        [{"kind": "start", "deviations": [{"path": "a", "value": 1}], "model": None}],
    ],
)
def test_missing_and_odd_records_do_not_break_the_report(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    directory = small_run(tmp_path, *records)
    page = read_page(write_report(directory))
    for figure in json.loads(page.scripts[0]):
        graph_objects.Figure(figure)
    assert "nan" not in page.text.lower()


def test_damaged_rollouts_are_named_in_the_report(tmp_path: Path) -> None:
    directory = small_run(tmp_path, {"kind": "start"})
    directory.write_rollouts(1, [{"text": "a"}]).write_bytes(b"nothing")
    assert "step-000001.jsonl.gz" in read_page(write_report(directory)).text


def test_a_run_without_deviations_has_the_values_of_the_paper(tmp_path: Path) -> None:
    assert "the paper's" in read_page(write_report(small_run(tmp_path, {"kind": "start", "deviations": []}))).text
    changed = small_run(tmp_path, {"kind": "start", "deviations": ["training.lr: 1e-06 -> 0.001"]}, name="changed")
    assert "the paper's" not in read_page(write_report(changed)).text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    steps = [
        {"kind": "step", "step": step, "reward/mean": math.sin(step), "time/step_seconds": 1.0} for step in range(30_000)
    ]
    for figure in figures(steps):
        assert max(len(trace["x"]) for trace in figure.data) <= 1200
        assert figure.data[0]["x"][0] == 0


def test_a_report_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    directory = small_run(tmp_path, {"kind": "start"})
    directory.report_path.mkdir()
    with pytest.raises(RunDirectoryError, match=r"cannot write .*report\.html"):
        write_report(directory)


def test_the_noise_floor_names_its_step_count_and_gap() -> None:
    band = {"clip/band_low": 3e-4, "clip/band_high": 4e-4}
    probe = {"step": 40, "responses": 64, "probe/engine_median": 5e-4}
    inside = "inside the noise"
    assert inside in probe_words(probe, band)
    assert inside not in probe_words(probe | {"probe/engine_median": 5e-8}, band)
    assert numbers(probe_words(probe, {})) == [40, 64, 5e-4] and inside not in probe_words(probe, {})
    assert "probe/odd 2" in probe_words({"step": 0, "probe/odd": 2.0}, band)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (90_000, "1 d 1 h")],
)
def test_durations_read_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_unseen_characters_are_escapes_and_others_stay() -> None:
    assert legible("a\tb\nc") == "a\tb\nc"
    assert legible("a\tb\nc", one_line=True) == r"a\tb\nc"
    assert legible("\u2066\u200b\U000e0041\x9b\x7f\r") == r"\u2066\u200b\U000e0041\x9b\x7f\r"
    assert legible("déjà 数学 ∑ 🙂") == "déjà 数学 ∑ 🙂"
    assert shorten("0123456789", 9) == "012...789"
    assert shorten("0123456789", 10) == "0123456789"


def test_the_room_loads_neither_torch_nor_anything_a_run_names(run: RunDirectory) -> None:
    code = (
        "import sys; from pathlib import Path; from legato.records.directory import RunDirectory;"
        "from legato.pages.report import write_report;"
        f"write_report(RunDirectory.open(Path({str(run.path)!r})));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_findings_and_recoveries_are_counted_and_shown_as_escaped_text(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    directory.write_config("")
    directory.append_metrics({"kind": "step", "step": 1, "reward/mean": 0.5})
    finding = {"step": 1, "rule": "drift", "evidence": "evidence/step-000001", "words": "it <b>moves</b>"}
    directory.health.append({"kind": "finding", "level": "alarm", **finding})
    directory.health.append({"kind": "recovery", "from": 1, "step": 0, "words": "back to step 0"})
    text = write_report(directory).read_text()
    assert "1 alarm, 1 recovery" in text
    assert "it &lt;b&gt;moves&lt;/b&gt;" in text and "evidence/step-000001" in text and "back to step 0" in text


def test_the_head_counts_the_notes_below_it_and_equal_ones_are_one_line(tmp_path: Path) -> None:
    directory = small_run(tmp_path, {"kind": "step", "step": 1, "reward/mean": 0.5})
    for step in (298, 364, 442):
        directory.health.append({"kind": "finding", "level": "note", "step": step, "rule": "drift", "words": "it moves"})
    text = read_page(write_report(directory)).text
    assert "health 3 notes" in text and "nothing found" not in text
    assert "note 3 times, steps 298 to 442: it moves" in text and text.count("it moves") == 1


def test_no_figure_is_alone_in_half_a_row() -> None:
    def place(*wide: bool) -> list[bool]:
        drawn = [Figure(title=str(n), caption="", data=[], layout={}, wide=each) for n, each in enumerate(wide)]
        text = make_page(title="", head="", body="", drawn=drawn, plotly="")
        return [name == "card wide" for name in re.findall('figure class="([^"]*)"', text)]

    assert place(True, False, False, False, True, False) == [True, False, False, True, True, True]


def test_a_page_without_figures_says_why_or_has_no_such_section() -> None:
    def text(**words: str) -> str:
        return make_page(title="", head="", body="", drawn=[], plotly="", **words)

    assert "No step has been recorded yet." in text()
    assert "<h2>Curves</h2>" not in text(no_figures="") and "when it has ended" in text(no_figures="when it has ended")


def test_the_axis_of_a_sweep_has_labels_at_its_values_and_is_logarithmic_only_above_zero() -> None:
    axis = swept_axis("training.lr", [4e-3, 1e-3, 1e-3])
    assert (axis["type"], axis["tickvals"], axis["ticktext"]) == ("log", [1e-3, 4e-3], ["0.001", "0.004"])
    assert swept_axis("noise", [0.0, 0.1, 0.5])["type"] == "linear"


def test_sentences_in_tables_are_wrapped_and_numbers_are_not() -> None:
    assert cell("12.5 %") == "<td>12.5 %</td>" and cell("differs", "bad") == '<td class="bad">differs</td>'
    assert cell("a sentence that is far too long for a line of a table").startswith('<td class="prose">')


def test_titles_of_figures_are_words_with_their_metrics_beside(report: Reader) -> None:
    assert "Clipped responses clip/sequences" in report.text
    assert "Accuracy eval/accuracy_sampled, eval/accuracy_greedy, accuracy/mean" in report.text


def test_a_run_without_findings_shows_none(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    directory.write_config("")
    directory.append_metrics({"kind": "step", "step": 1, "reward/mean": 0.5})
    text = write_report(directory).read_text()
    assert "No rule" in text and "1 alarm" not in text
