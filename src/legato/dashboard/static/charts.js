// Curves of the chosen runs, one figure a quantity. Plotly is fetched after the page is there.
import { ask, colourOf, make, short, state, tell } from "/board.js";

const first = ["eval/accuracy_sampled", "reward/mean", "accuracy/mean", "length/mean", "entropy/mean", "clip/sequences",
  "ratio/sequence_std", "gradient/norm"];
const chosen = { keys: [...first], logarithmic: new Set(), smooth: 1, join: false, relative: false };
let titles = {};
const drawn = new Map();
// Marks of more runs than this could not be told apart, nor could the names of more curves.
const mostMarked = 4, mostNamed = 12;
let plotlyLoading = null;

function loadPlotly() {
  plotlyLoading ||= new Promise((resolve, reject) => {
    const script = make("script", { src: document.querySelector("meta[name=plotly]").content });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("plotly could not be loaded"));
    document.head.append(script);
  });
  return plotlyLoading;
}

// Plotly reads tags in names.
const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function movingAverage(values, window) {
  if (window <= 1) return values;
  const reach = Math.floor(window / 2);
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - reach), index + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

// The pieces of a curve: where steps have no value a line ends and another begins.
function splitAtBreaks({ breaks, ...columns }) {
  const ends = [0, ...breaks, columns.x.length];
  return ends.slice(1).map((end, index) => Object.fromEntries(["x", "mean", "low", "high"].map(
    name => [name, columns[name].slice(ends[index], end)])));
}

const joinWithGaps = parts => parts.flatMap((part, index) => index ? [null, ...part] : part);

// Without a `last` the run has made no step yet.
const place = (step, last) => chosen.relative ? step / (last || 1) : step;

// A logarithmic axis has no place for 0: the edges of a band lie at `least` there, and a line has a gap.
function traces(curves, least) {
  const data = [], few = curves.length <= 4, edge = value => least === null ? value : Math.max(value, least);
  for (const curve of curves) {
    const colour = colourOf(curve.run), name = plain(curve.name);
    const whole = splitAtBreaks({ ...curve, x: curve.x.map(step => place(step, curve.last)) }), evaluated = curve.key.startsWith("eval/");
    if (few) for (const part of whole) if (part.low.some((value, index) => value !== part.high[index])) {
      const side = { type: "scatter", mode: "lines", x: part.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false,
        legendgroup: name, name: name + ", least to largest" };
      data.push({ ...side, y: part.low.map(edge) }, { ...side, y: part.high.map(edge), fill: "tonexty", fillcolor: colour + "26" });
    }
    // A mean over evaluations, which are few, would show another accuracy than was measured.
    const y = joinWithGaps(whole.map(part => movingAverage(part.mean, evaluated ? 1 : chosen.smooth)))
      .map(value => value === null || least === null || value > 0 ? value : null);
    // A point between two gaps has no line that would show it.
    const isAlone = index => y[index] !== null && (y[index - 1] ?? null) === null && (y[index + 1] ?? null) === null;
    const sizes = y.map((_, index) => evaluated || isAlone(index) ? 5 : 0);
    data.push({ type: "scatter", mode: sizes.some(size => size) ? "lines+markers" : "lines", x: joinWithGaps(whole.map(part => part.x)),
      y, name, legendgroup: name,
      line: { color: colour, width: few ? 2 : 1.2 }, marker: { size: sizes.map(size => size || 0), color: colour, line: { width: 0 } } });
  }
  return data;
}

// Findings as a marker at the upper edge and a vertical line, in the colour of their run.
function markTraces(marks) {
  const places = new Map(), lasts = new Map(state.runs.map(run => [run.id, run.step]));
  for (const mark of marks.flatMap(mark => mark.steps.map(step => ({ ...mark, step: place(step, lasts.get(mark.run)) })))) {
    const here = JSON.stringify([mark.run, mark.step]), there = places.get(here) || { ...mark, labels: [] };
    there.labels.push(plain(mark.what + ", " + (mark.rule || mark.words)));
    if (mark.level === "alarm") there.level = "alarm";
    places.set(here, there);
  }
  const each = [...places.values()];
  const shapes = each.map(mark => ({ type: "line", x0: mark.step, x1: mark.step, y0: 0, y1: 1, yref: "paper",
    line: { color: colourOf(mark.run), width: 1, dash: mark.level === "alarm" ? "dash" : "dot" } }));
  const trace = run => {
    const own = each.filter(mark => mark.run === run);
    return { type: "scatter", mode: "markers", x: own.map(mark => mark.step), y: own.map(() => 1), yaxis: "y2", name: plain(run),
      text: own.map(mark => mark.labels.join("<br>")), hovertemplate: plain(run) + ": %{text}<extra></extra>", showlegend: false,
      cliponaxis: false, marker: { color: colourOf(run), size: 8, symbol: own.map(mark => mark.level === "alarm" ? "triangle-down" : "triangle-down-open") } };
  };
  return { shapes, data: [...new Set(each.map(mark => mark.run))].map(trace) };
}

function card(key) {
  const plot = make("div", { className: "plot" });
  const log = make("button", { type: "button", textContent: "log", title: "Logarithmic axis" });
  const removeButton = make("button", { type: "button", textContent: "\u00d7", title: "Take this figure away" });
  const title = titles[key] || key, note = make("figcaption");
  removeButton.setAttribute("aria-label", "Take " + title + " away");
  const buttons = saveButtons(plot, title);
  buttons.append(log, removeButton);
  const figure = make("figure", { className: "card" }, make("h3", { textContent: title }), buttons,
    make("code", { className: "keys", textContent: key }), note, plot);
  figure.dataset.key = key;
  log.addEventListener("click", () => {
    if (!chosen.logarithmic.delete(key)) chosen.logarithmic.add(key);
    log.setAttribute("aria-pressed", chosen.logarithmic.has(key));
    draw(key);
  });
  removeButton.addEventListener("click", () => {
    chosen.keys = chosen.keys.filter(each => each !== key);
    drawn.delete(key);
    figure.remove();
  });
  return { figure, plot, note, curves: [], marks: [] };
}

function draw(key) {
  const { plot, note, curves, marks } = drawn.get(key), asked = chosen.logarithmic.has(key);
  const least = asked ? Math.min(...curves.flatMap(curve => curve.mean.filter(value => value > 0))) : null;
  const logarithmic = asked && least < Infinity;
  note.textContent = asked && !logarithmic ? "No value is above 0, so the axis is linear." : "";
  // Plotly writes powers with a style attribute, which the content security policy of this page forbids.
  const axis = { exponentformat: "e", ...(logarithmic ? { type: "log" } : {}) };
  const { shapes, data } = markTraces(marks);
  // The names of the curves stand once above all figures; a figure that is saved has them with it.
  const xaxis = chosen.relative ? { title: { text: "share of the run" }, tickformat: ".0%" } : { title: { text: "step" } };
  const layout = { xaxis, yaxis: axis, shapes, uirevision: key + chosen.relative, hovermode: "x unified",
    showlegend: false, meta: { named: curves.length > 1 && curves.length <= mostNamed } };
  if (data.length) layout.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
  if (curves.length > mostNamed) layout.hovermode = "closest";
  window.Plotly.react(plot, [...traces(curves, logarithmic ? least : null), ...data], { ...themed(layout), margin: { l: 56, r: 14, t: 14, b: 40 } }, plotting);
}

function legend(curves) {
  const names = new Map(curves.map(curve => [curve.name, colourOf(curve.run)]));
  if (names.size < 2 || names.size > mostNamed) return [];
  return [...names].map(([name, colour]) => {
    const line = make("i", { className: "line" });
    line.style.background = colour;
    return make("span", { className: "named" }, line, make("span", { textContent: name }));
  });
}

// Plotly takes a second to load; until it is there the curves are plain lines, so that nobody waits for a first look.
function sketch({ plot, curves }) {
  const make = (tag, values) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    return element;
  };
  const ends = of => curves.reduce(([low, high], curve) => of(curve).reduce(
    ([least, most], value) => [Math.min(least, value), Math.max(most, value)], [low, high]), [Infinity, -Infinity]);
  const across = curve => curve.x.map(step => place(step, curve.last));
  const [left, right] = ends(across), [low, high] = ends(curve => curve.mean);
  const svg = make("svg", { viewBox: "0 0 1000 500", preserveAspectRatio: "none", width: "100%", height: "100%" });
  for (const curve of curves) for (const part of splitAtBreaks({ ...curve, x: across(curve) })) {
    const points = part.x.map((x, index) => (1000 * (x - left) / (right - left || 1)).toFixed(1) + "," +
      (480 - 460 * (part.mean[index] - low) / (high - low || 1)).toFixed(1)).join(" ");
    svg.append(make("polyline", { points, fill: "none", stroke: colourOf(curve.run), "stroke-width": 2,
      "vector-effect": "non-scaling-stroke" }));
  }
  plot.replaceChildren(svg);
}

export function redraw() {
  if (window.Plotly) for (const [key, { figure }] of drawn) if (figure.isConnected) draw(key);
}

function controls(place) {
  const add = make("input", { type: "search", placeholder: "Add a quantity", id: "add" });
  add.setAttribute("list", "quantities");
  add.setAttribute("aria-label", "Add a quantity");
  add.addEventListener("change", () => {
    if (add.value && !chosen.keys.includes(add.value)) chosen.keys.unshift(add.value);
    add.value = "";
    showCurves(place, {});
  });
  const smooth = make("select", { id: "smooth" }, ...[[1, "as it is"], [5, "5 points"], [15, "15 points"], [41, "41 points"]]
    .map(([value, text]) => make("option", { value, textContent: text })));
  smooth.addEventListener("change", () => { chosen.smooth = Number(smooth.value); redraw(); });
  const across = make("select", { id: "axis" }, ...[["steps", "steps"], ["share", "share of each run"]]
    .map(([value, text]) => make("option", { value, textContent: text })));
  across.value = chosen.relative ? "share" : "steps";
  across.title = "Over the share of each run a short run is as wide as a long one";
  across.addEventListener("change", () => { chosen.relative = across.value === "share"; redraw(); });
  const join = make("input", { type: "checkbox", checked: chosen.join });
  join.addEventListener("change", () => { chosen.join = join.checked; showCurves(place, {}); });
  const note = make("span", { className: "dim", id: "note" });
  return make("div", { className: "bar" }, add, make("datalist", { id: "quantities" }), make("label", {}, "Smooth ", smooth), make("label", {}, "Over ", across),
    make("label", {}, join, " Join seeds"), note);
}

export async function showCurves(place, { late = () => false }) {
  if (!place.querySelector(".figures"))
    place.replaceChildren(controls(place), make("div", { className: "legend names" }), make("div", { className: "grid figures" }));
  const query = { run: state.chosen, key: chosen.keys, points: 300 };
  if (chosen.join) query.join = 1;
  const [answer, findings] = await Promise.all([ask("curves", query),
    state.chosen.length <= mostMarked ? ask("health", { run: state.chosen }) : []]);
  if (late()) return;
  const grid = place.querySelector(".figures"), list = document.getElementById("quantities");
  if (!grid) return;
  if (list.childElementCount !== answer.keys.length)
    list.replaceChildren(...answer.keys.map(key => make("option", { value: key, label: answer.titles[key] })));
  titles = answer.titles;
  for (const key of chosen.keys) {
    const curves = answer.curves.filter(curve => curve.key === key);
    if (!curves.length) { drawn.get(key)?.figure.remove(); continue; }
    if (!drawn.has(key)) drawn.set(key, card(key));
    const entry = drawn.get(key);
    entry.curves = curves;
    entry.marks = findings.filter(each => each.level !== "note");
    if (!entry.figure.isConnected) grid.append(entry.figure);
    if (!window.Plotly) sketch(entry);
  }
  performance.mark("sketches");
  const damaged = Object.entries(answer.damaged).map(([run, lines]) => run + ": " + lines + " lines cannot be read");
  const reading = answer.reading.length ? ["first look, reading on: " + answer.reading.length + " runs"] : [];
  const sick = state.chosen.length > mostMarked && state.runs.some(run => state.chosen.includes(run.id) && ["alarm", "warning"].includes(run.health));
  const unmarked = sick ? ["warnings and alarms are drawn for at most " + mostMarked + " runs; all are under Health"] : [];
  document.getElementById("note").textContent = [...reading, ...unmarked, ...damaged].join("; ");
  place.querySelector(".names").replaceChildren(...legend(answer.curves));
  if (!window.Plotly) await new Promise(resolve => setTimeout(resolve, 20)); // the sketches are painted first
  await loadPlotly();
  for (const key of chosen.keys) {
    if (late() || !grid.isConnected) return;
    const entry = drawn.get(key);
    if (!entry?.figure.isConnected) continue;
    if (!entry.plot.data) {
      entry.plot.replaceChildren();
      await new Promise(resolve => setTimeout(resolve)); // each is painted when it is there, and keys are heard between
    }
    draw(key);
  }
  grid.dataset.ready = "yes";
  performance.mark("figures");
  if (answer.reading.length) setTimeout(() => { if (!late() && state.tab === "curves") showCurves(place, { late }); }, 1500);
}
