"""The HTML frame of our pages: styles, the script that draws figures, and the content security policy."""

import ast
import base64
import functools
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import import_module

from legato.errors import InputError
from legato.pages.traces import Figure

_LIGHT = """--page: #f6f7f9; --card: #ffffff; --text: #16202e; --dim: #5d6b7e; --line: #e3e7ee;
  --grid: #e9edf3; --well: #f3f5f8; --good: #0b8457; --bad: #c02b2b; --accent: #2563eb;
  --plus: #1d5fc4; --minus: #b45309; --plus-shade: #3b82f6; --minus-shade: #f5871f;"""
_DARK = """--page: #0d1219; --card: #151c26; --text: #e4eaf2; --dim: #94a2b5; --line: #263140;
  --grid: #232d3b; --well: #0f151d; --good: #34d399; --bad: #f87171; --accent: #60a5fa;
  --plus: #6ba6ff; --minus: #f59e4b; --plus-shade: #2f6fe0; --minus-shade: #b95f08;"""
# Plus and minus, right and wrong are blue and orange, which colour-blind readers tell apart. A shade lies behind text.

# The reader's system decides between light and dark, unless data-theme is set.
STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    f":root[data-theme=light] {{ color-scheme: light; {_LIGHT} }}\n"
    f":root[data-theme=dark] {{ color-scheme: dark; {_DARK} }}\n"
    """* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 44px 0 14px; letter-spacing: -0.01em; }
h3 { font-size: 15px; margin: 0; }
h3 .keys { font-size: 12px; font-weight: 400; color: var(--dim); overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.dim, figcaption { color: var(--dim); }
.facts { display: flex; flex-wrap: wrap; gap: 4px 22px; color: var(--dim); margin-bottom: 18px; overflow-wrap: anywhere; }
.facts b { color: var(--text); font-weight: 600; }
.verdict { font-size: 17px; margin: 0 0 18px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.wide { grid-column: 1 / -1; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px; margin: 0;
  min-width: 0; }
.tile .label { color: var(--dim); font-size: 13px; }
.tile .big { font-size: 32px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile .big .dim { font-weight: 500; }
.tile .change { font-size: 15px; font-weight: 600; margin-left: 10px; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.right, .rose { color: var(--plus); } .wrong, .fell { color: var(--minus); }
figcaption { font-size: 13px; margin-top: 2px; }
.plot { height: 300px; } .wide .plot { height: 350px; }
pre { background: var(--well); border-radius: 8px; padding: 10px 12px; margin: 6px 0 0; overflow: auto; max-height: 320px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  unicode-bidi: isolate; }
pre.config { max-height: none; white-space: pre; overflow-wrap: normal; }
.sample { margin-bottom: 16px; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; margin-top: 12px; }
.tag { font-size: 12px; color: var(--dim); font-variant-numeric: tabular-nums; }
.tag b { font-weight: 600; }
ul { margin: 0; padding-left: 20px; } li { margin: 3px 0; overflow-wrap: anywhere; }
.rows { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 500; font-size: 13px; }
th, td { text-align: right; padding: 6px 10px; white-space: nowrap; }
tr + tr td { border-top: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { font-weight: 600; }
section .rows td:first-child, section .rows th:first-child { position: sticky; left: 0; background: var(--card); }
td.prose { text-align: left; white-space: normal; min-width: 260px; }
.axis { display: flex; align-items: center; gap: 8px; margin: 0 0 12px; color: var(--dim); font-size: 13px; }
.axis select { font: inherit; color: var(--text); background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 6px; }
details summary { cursor: pointer; font-weight: 600; }
@media (max-width: 760px) { .grid, .pair { grid-template-columns: minmax(0, 1fr); } main { padding: 22px 14px 40px; }
  .tile .big { font-size: 26px; } }
.save { float: right; display: flex; gap: 4px; }
.save button { font: inherit; font-size: 12px; color: var(--dim); background: none; border: 1px solid var(--line);
  border-radius: 6px; padding: 1px 7px; cursor: pointer; }
.save button:hover, .save button:focus-visible { color: var(--text); border-color: var(--accent); }
@media print { body { background: #fff; } .card { break-inside: avoid; } pre { max-height: none; } .save { display: none; } }
"""
)

THEMED = """
"use strict";
function themed(layout) {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const line = colour("--line"), grid = colour("--grid");
  const axis = { gridcolor: grid, linecolor: line, zerolinecolor: line, automargin: true };
  const box = { bgcolor: colour("--card"), bordercolor: line, font: { color: colour("--text"), size: 12 } };
  return { ...layout,
    xaxis: { ...axis, showgrid: false, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    font: { family: "system-ui, -apple-system, Segoe UI, sans-serif", size: 12, color: colour("--dim") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hoverlabel: box,
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 } },
    margin: { l: 56, r: 14, t: 48, b: 44 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--dim"), activecolor: colour("--accent") } };
}
// Where nothing hovers the buttons would always lie over the legend; there a double tap resets the axes.
const plotting = { displaylogo: false, responsive: true,
  displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] };
function download(address, name) {
  const link = document.createElement("a");
  link.href = address; link.download = name;
  link.click();
}
// A figure as it stands: a picture for a paper, or its numbers.
async function save(plot, kind, name) {
  const file = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "figure";
  if (kind === "data") {
    const data = plot.data.map(({ type, name, x, y, text, error_y }) => ({ type, name, x, y, text, error_y }));
    const words = new Blob([JSON.stringify({ title: name, data }, null, 1)], { type: "application/json" });
    const address = URL.createObjectURL(words);
    download(address, file + ".json");
    setTimeout(() => URL.revokeObjectURL(address), 1000);
    return;
  }
  // Paper is white: a picture is drawn in dark ink whatever the screen has.
  const ink = "#16202e", rules = { gridcolor: "#e3e7ee", linecolor: "#94a3b8", zerolinecolor: "#94a3b8" };
  const showlegend = plot.layout.meta?.named ?? plot.layout.showlegend;
  const layout = { ...plot.layout, showlegend, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff",
    font: { ...plot.layout.font, color: ink },
    xaxis: { ...plot.layout.xaxis, ...rules }, yaxis: { ...plot.layout.yaxis, ...rules } };
  const size = { format: kind, width: 900, height: 520, scale: kind === "png" ? 2 : 1 };
  download(await Plotly.toImage({ data: plot.data, layout }, size), file + "." + kind);
}
function saveButtons(plot, name) {
  const row = document.createElement("div");
  row.className = "save";
  for (const kind of ["svg", "png", "data"]) {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = kind === "data" ? kind : kind.toUpperCase();
    button.title = kind === "data" ? "Save the numbers as JSON" : "Save the picture as " + kind.toUpperCase();
    button.addEventListener("click", () => save(plot, kind, name));
    row.append(button);
  }
  return row;
}
"""
"""JavaScript that report and dashboard share: plotly in the page's colours, and saving a figure."""

SCRIPT = (
    THEMED
    + """
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
// Curves of runs that differ in length can be drawn over the share of each run. `meta.last` is the last step of a run.
const lengths = new Set(figures.flatMap(figure => figure.data.map(trace => trace.meta?.last).filter(Boolean)));
let relative = false;
function drawn(figure) {
  if (!relative || !figure.data.some(trace => trace.meta?.last)) return figure;
  const data = figure.data.map(trace => ({ ...trace, x: trace.x.map(step => step / (trace.meta?.last || 1)) }));
  const xaxis = { ...figure.layout.xaxis, title: { text: "share of the run" }, tickformat: ".0%" };
  return { data, layout: { ...figure.layout, xaxis } };
}
function draw() {
  figures.forEach((figure, index) => {
    const { data, layout } = drawn(figure);
    Plotly.react("figure-" + index, data, themed(layout), plotting);
  });
}
draw();
if (lengths.size > 1) {
  const axis = document.createElement("select"), label = document.createElement("label");
  axis.id = "axis";
  axis.append(new Option("steps", "steps"), new Option("share of each run", "share"));
  axis.addEventListener("change", () => { relative = axis.value === "share"; draw(); });
  label.className = "axis";
  label.append("Runs differ in length. Horizontal axis: ", axis);
  document.getElementById("figure-0").closest(".grid").before(label);
}
figures.forEach((figure, index) => {
  const plot = document.getElementById("figure-" + index);
  plot.parentElement.prepend(saveButtons(plot, figure.title));
});
dark.addEventListener("change", draw);
"""
)


UNPACK = """
"use strict";
// Plotly is compressed, which makes a page of two megabytes out of one of five. A script of the page may add the two
// scripts whose digests the content security policy names, and no other.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), sign => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
function run(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.body.append(script);
}
(async () => {
  if (!window.DecompressionStream) {
    const note = document.createElement("p");
    note.className = "bad";
    note.textContent = "The curves need a browser of 2023 or later.";
    document.querySelector("main").prepend(note);
    return;
  }
  run(await unpack("plotly"));
  run(document.getElementById("drawing").textContent);
})();
"""
"""JavaScript that unpacks plotly and then draws."""


@functools.cache
def _compress(plotly: str) -> str:
    """A script compressed, as text that can stand in a page."""
    return base64.b64encode(gzip.compress(plotly.encode(), 6, mtime=0)).decode()


def plotly_library() -> str:
    """Return the source of plotly, to be put into the page."""
    try:
        return str(import_module("plotly.offline").get_plotlyjs())
    except ImportError as error:
        raise InputError("the report needs plotly: pip install plotly") from error


def page(
    *,
    title: str,
    head: str,
    body: str,
    drawn: Sequence[Figure],
    plotly: str,
    no_figures: str = "No step has been recorded yet.",
) -> str:
    """Return the HTML file. `head` and `body` are HTML in which everything that came from a run is escaped already.

    `no_figures` stands in the place of figures if there are none; where it is empty the section is left out.
    """
    data = json.dumps([{"title": f.title, "data": f.data, "layout": f.layout} for f in drawn], allow_nan=False)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # Only these three scripts may run and nothing may be fetched, whatever a model's text contains.
    policy = (
        f"default-src 'none'; script-src {digest(plotly)} {digest(SCRIPT)} {digest(UNPACK)}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{head}
{_figure_cards(drawn, no_figures)}
{body}
</main>
<script type="application/json" id="figures">{data}</script>
<script type="text/plain" id="plotly">{_compress(plotly)}</script>
<script type="text/plain" id="drawing">{SCRIPT}</script>
<script>{UNPACK}</script>
</body>
</html>
"""


def _figure_cards(drawn: Sequence[Figure], no_figures: str) -> str:
    if not drawn:
        words = html.escape(no_figures)
        return f'<section><h2>Curves</h2><p class="dim">{words}</p></section>' if words else ""
    cards, left = [], True
    for index, figure in enumerate(drawn):
        # A figure that would be alone in its row takes the row.
        wide = figure.wide or (left and (index + 1 == len(drawn) or drawn[index + 1].wide))
        left = wide or not left
        cards.append(
            f'<figure class="card{" wide" if wide else ""}"><h3>{html.escape(figure.title)}{_keys(figure)}</h3>'
            f"<figcaption>{html.escape(figure.caption)}</figcaption>"
            f'<div class="plot" id="figure-{index}" role="img" aria-label="{html.escape(figure.title)}"></div></figure>'
        )
    hint = '<noscript><p class="bad">The curves are drawn by a script in this file; scripts are switched off.</p></noscript>'
    return f'<section><h2>Curves</h2>{hint}<div class="grid">{"".join(cards)}</div></section>'


def _keys(figure: Figure) -> str:
    """The metrics that a figure shows, beside its title."""
    return f' <code class="keys">{html.escape(", ".join(figure.keys))}</code>' if figure.keys else ""


def cell(text: str, kind: str = "") -> str:
    """Return a cell of a table; a sentence is wrapped, a number or a word is not. `text` is escaped already."""
    classes = " ".join(filter(None, [kind, "prose" if len(text) > 44 else ""]))
    return f'<td class="{classes}">{text}</td>' if classes else f"<td>{text}</td>"


def plotly_styles(plotly: str) -> list[str]:
    """Return digests of the style sheets that plotly adds to a page: an empty one that it fills by rules, and fixed ones."""
    fixed = re.findall(r"""createElement\("style"\).{0,200}?\.textContent='((?:[^'\\]|\\.)*)'""", plotly)
    return [digest(""), *(digest(ast.literal_eval(f"'{text}'")) for text in fixed)]


def digest(script: str) -> str:
    """Return the SHA-256 of a script or style sheet in the form of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
