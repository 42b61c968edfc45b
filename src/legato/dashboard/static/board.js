// The page: the chosen runs, the open view, and polling while runs go on.
// Text that came from a run is only ever put into the page as textContent.
import { showCurves, redraw } from "/charts.js";
import { showRollouts, rolloutKey } from "/rollouts.js";

export const state = { runs: [], chosen: [], tab: "curves" };
const colours = ["#2f7fe8", "#d97706", "#0e9f7e", "#7c3aed", "#db2777", "#0891b2", "#dc2626", "#65a30d", "#64748b", "#f97316"];
const runColours = new Map(), rows = new Map();
const at = id => document.getElementById(id);

export function make(tag, properties = {}, ...inside) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside);
  return element;
}

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== "" && each !== null && each !== undefined) query.append(name, each);
  const answer = await fetch("/api/" + path + "?" + query, { headers: { accept: "application/json" } });
  const fallback = answer.status === 403 ? "not allowed: use the address that was printed last" : "no answer, status " + answer.status;
  const body = await answer.json().catch(() => ({ error: fallback }));
  if (!answer.ok) throw new Error(body.error || answer.statusText);
  return body;
}

export const short = value => value === null || value === undefined ? "" : String(Number(Number(value).toPrecision(4)));

export function colourOf(run) {
  if (!runColours.has(run)) runColours.set(run, colours[runColours.size % colours.length]);
  return runColours.get(run);
}

export function tell(text, lost = false) {
  at("status").textContent = text;
  at("status").classList.toggle("lost", lost);
}

// The list of runs

function row(run) {
  const box = make("input", { type: "checkbox", checked: state.chosen.includes(run.id) });
  const parts = { box, swatch: make("span", { className: "swatch" }), name: make("span", { className: "name" }),
    badge: make("span", { className: "badge" }), facts: make("span", { className: "facts" }) };
  box.addEventListener("change", () => choose(
    box.checked ? [...state.chosen, run.id] : state.chosen.filter(each => each !== run.id)));
  const item = make("li", {}, make("label", {}, box, parts.swatch, parts.name, parts.badge, parts.facts));
  return { item, parts, shown: "" };
}

function list() {
  const wanted = at("filter").value.toLowerCase();
  const place = at("runs"), there = new Set();
  let before = null;
  for (const run of state.runs) {
    const words = [run.name, run.algorithm, run.model, run.state, run.health || ""].join(" ").toLowerCase();
    if (!wanted.split(/\s+/).every(word => words.includes(word))) continue;
    there.add(run.id);
    if (!rows.has(run.id)) rows.set(run.id, row(run));
    const { item, parts } = rows.get(run.id), chosen = state.chosen.includes(run.id);
    const next = before ? before.nextSibling : place.firstChild;
    if (next !== item) place.insertBefore(item, next);
    before = item;
    const shown = JSON.stringify([run, chosen]);
    if (rows.get(run.id).shown === shown) continue;
    rows.get(run.id).shown = shown;
    parts.box.checked = chosen;
    parts.swatch.style.background = chosen ? colourOf(run.id) : "none";
    parts.name.textContent = parts.name.title = run.name;
    parts.badge.textContent = run.health ? run.health + " " + run.findings : run.running ? "running" : "";
    parts.badge.className = "badge " + (run.health || (run.running ? "running" : ""));
    parts.badge.title = run.found;
    parts.badge.hidden = !parts.badge.textContent;
    const facts = [run.algorithm, "step " + run.step + (run.steps ? "/" + run.steps : ""),
      run.reward === null ? "" : "reward " + short(run.reward), run.running ? "" : run.state];
    parts.facts.replaceChildren(...facts.filter(Boolean).map(text => make("span", { textContent: text })));
  }
  for (const [id, { item }] of rows) if (!there.has(id) && item.isConnected) item.remove();
}

function choose(chosen) {
  state.chosen = chosen.filter(id => state.runs.some(run => run.id === id));
  remember();
  list();
  show();
}

const listed = () => state.runs.filter(run => rows.has(run.id) && rows.get(run.id).item.isConnected).map(run => run.id);

// Views

const stepWords = steps => {
  const first = steps[0], last = steps.at(-1), span = first === last ? "step " + first : "steps " + first + " to " + last;
  return steps.length > 1 ? steps.length + " times, " + span : span;
};

const views = {
  curves: showCurves,
  rollouts: showRollouts,
  async health() {
    const findings = await ask("health", { run: state.chosen });
    const advice = (title, lines) => lines.length ? [make("div", { className: "advice" }, make("span", { className: "dim", textContent: title }),
      make("ul", {}, ...lines.map(textContent => make("li", { textContent }))))] : [];
    const items = findings.map(each => make("div", { className: "finding" },
      make("span", {}, make("span", { className: "badge " + each.level, textContent: each.what })),
      make("span", { className: "dim", textContent: stepWords(each.steps) }),
      make("div", {}, make("b", { textContent: each.words }),
        make("div", { className: "dim", textContent: each.run + (each.rule ? ", rule " + each.rule : "") }),
        ...advice("likely", each.causes), ...advice("try", each.tries)),
      ...(each.evidence ? [make("div", { className: "dim where", textContent: "evidence in " + each.evidence })] : [])));
    const none = make("p", { className: "dim", textContent: "Nothing was found in the runs that are chosen." });
    const more = [...new Set(findings.map(each => each.doctor))].map(textContent => make("div", {}, make("code", { textContent })));
    if (more.length) more.unshift(make("p", { className: "dim", textContent: "A run in more words, with the course of what was found:" }));
    return [make("h2", { textContent: "Findings" }), ...more, ...(items.length ? items : [none])];
  },
  async configs() {
    const comparison = await ask("configs", { run: state.chosen });
    const cell = value => make("td", { className: value?.length > 48 ? "value long" : "value", textContent: value === null ? "-" : value });
    const table = rows => make("div", { className: "rows card" }, make("table", { className: "options" },
      make("thead", {}, make("tr", {}, make("th", { textContent: "option" }),
        ...comparison.runs.map(run => make("th", { className: "text", textContent: run })))),
      make("tbody", {}, ...rows.map(row => make("tr", {}, make("td", { textContent: row.path }),
        ...row.values.map(cell))))));
    const all = make("details", {}, make("summary", { textContent: "The same in all: " + comparison.same.length }), table(comparison.same));
    const head = comparison.differ.length ? table(comparison.differ)
      : make("p", { className: "dim", textContent: "The runs that are chosen do not differ." });
    return [make("h2", { textContent: "Where the configs differ" }), head, make("p"), all];
  },
};

// A view returns its elements, which replace the page's unless another view was opened meanwhile. A view that changes the
// page itself calls `late` after every wait and stops if it is true.
let turn = 0, failed = false;
async function show(again = false) {
  const mine = ++turn, place = at("view");
  failed = false;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const here = tab.dataset.tab === state.tab;
    tab.setAttribute("aria-selected", here);
    tab.tabIndex = here ? 0 : -1;
    if (here) place.setAttribute("aria-labelledby", tab.id);
  }
  if (!state.chosen.length) {
    place.replaceChildren(make("p", { className: "dim",
      textContent: state.runs.length ? "Choose runs on the left." : "There are no runs in this folder yet." }));
    return;
  }
  try {
    const elements = await views[state.tab](place, { again, late: () => mine !== turn });
    if (elements && mine === turn) place.replaceChildren(...elements);
  } catch (error) {
    if (mine !== turn) return;
    failed = true; // and is tried again with the next look at the runs
    place.replaceChildren(make("p", { className: "bad", textContent: String(error.message || error) }));
  }
}

function open(tab) {
  state.tab = tab;
  at("view").replaceChildren();
  remember();
  show();
}

function remember() {
  const words = new URLSearchParams([["tab", state.tab], ...state.chosen.map(run => ["run", run])]);
  history.replaceState(null, "", "#" + words);
}

// Polling

let versions = new Map();
async function poll() {
  try {
    const runs = await ask("runs"), first = !state.runs.length;
    runs.sort((one, other) => other.changed - one.changed);
    if (first || runs.length !== state.runs.length) state.runs = runs;
    else { // while people look at it, the list keeps its order
      const now = new Map(runs.map(run => [run.id, run]));
      state.runs = state.runs.every(run => now.has(run.id)) ? state.runs.map(run => now.get(run.id)) : runs;
    }
    if (first && runs.length) start();
    const changed = state.chosen.some(id => versions.get(id) !== runs.find(run => run.id === id)?.version);
    versions = new Map(runs.map(run => [run.id, run.version]));
    state.chosen = state.chosen.filter(id => versions.has(id));
    list();
    if (first) performance.mark("list");
    const running = runs.filter(run => run.running).length;
    tell(runs.length + (runs.length === 1 ? " run, " : " runs, ") + running + " running");
    if (first || changed || failed) await show(!first);
  } catch (error) {
    tell("No answer from legato dashboard: " + error.message, true);
  }
  setTimeout(poll, document.hidden ? 5000 : 1000);
}

function start() {
  const words = new URLSearchParams(location.hash.slice(1));
  const requested = words.getAll("run").filter(id => state.runs.some(run => run.id === id));
  state.chosen = requested.length ? requested : state.runs.slice(0, 4).map(run => run.id);
  state.tab = words.get("tab") in views ? words.get("tab") : "curves";
}

// Someone pastes the address of another view, or follows a link to it.
addEventListener("hashchange", () => { start(); list(); at("view").replaceChildren(); show(); });

// Keys and buttons

function theme(value) {
  const dark = value ? value === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (value) document.documentElement.dataset.theme = value;
  at("theme").textContent = dark ? "Light" : "Dark";
  redraw();
}
const toggleTheme = () => {
  const value = at("theme").textContent.toLowerCase();
  localStorage.setItem("theme", value);
  theme(value);
};

at("theme").addEventListener("click", toggleTheme);
at("help").addEventListener("click", () => at("keys").showModal());
at("filter").addEventListener("input", list);
at("choose-all").addEventListener("click", () => choose(listed()));
at("choose-none").addEventListener("click", () => choose([]));
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => open(tab.dataset.tab));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const next = tabs[(tabs.indexOf(document.activeElement) + move + tabs.length) % tabs.length];
  next.focus();
  next.click();
});
at("runs").addEventListener("keydown", event => {
  const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!move) return;
  const boxes = [...at("runs").querySelectorAll("input")];
  boxes[boxes.indexOf(document.activeElement) + move]?.focus();
  event.preventDefault();
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea, dialog")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const tabs = { 1: "curves", 2: "health", 3: "rollouts", 4: "configs" };
  const keys = { "/": () => (at("search") || at("filter")).focus(), "?": () => at("keys").showModal(), t: toggleTheme,
    a: () => choose(listed()), n: () => choose([]) };
  if (event.key in tabs) open(tabs[event.key]);
  else if (event.key in keys) { keys[event.key](); event.preventDefault(); }
  else if (state.tab === "rollouts") rolloutKey(event);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme));
theme(localStorage.getItem("theme"));
poll();
