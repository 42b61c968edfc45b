// The rollouts of a run: searched and filtered, each with its group, and its tokens coloured by what was measured there.
import { ask, make, short, state } from "/board.js";

// `least`: where the scale of colours ends at the latest, so that rounding is not painted.
const quantities = {
  ratio: { title: "ratio", least: 1e-3, of: (d, t) => d.log_ratios[t], describe: value => "ratio " + ratio(value) + " (log " + short(value) + ")" },
  logprob: { title: "log-prob", least: 1e-3, of: (d, t) => d.logprobs[t], describe: value => "log-prob " + short(value) },
  advantage: { title: "advantage", of: (d, t) => d.advantages[t], describe: value => "advantage " + short(value) },
  coefficient: { title: "coefficient", of: (d, t) => d.coefficients[t], describe: value => "coefficient " + short(value) },
};
const query = { run: "", step: "", text: "", verdict: "", stop: "", shortest: "", longest: "", order: "stored" };
let colouring = "ratio", opened = null, rows = [];
// An answer that comes after a later question is dropped.
let listing = 0, opening = 0;
const narrow = matchMedia("(max-width: 900px)");

// With digits enough to tell it from 1.
const ratio = log => String(Number(Math.exp(log).toPrecision(Math.min(8, Math.max(4, 3 - Math.floor(Math.log10(Math.abs(log) || 1)))))));
const option = (value, textContent) => make("option", { value, textContent });

function field(name, choices) {
  const select = make("select", {}, ...choices.map(([value, text]) => option(value, text)));
  select.value = query[name];
  select.setAttribute("aria-label", name);
  select.addEventListener("change", () => { query[name] = select.value; list(); });
  return select;
}

function limit(name, placeholder) {
  const input = make("input", { type: "number", min: 0, placeholder, size: 6, value: query[name] });
  input.setAttribute("aria-label", placeholder);
  input.addEventListener("change", () => { query[name] = input.value; list(); });
  return input;
}

function controls(place) {
  const run = make("select", { id: "rollout-run" }, ...state.chosen.map(id => option(id, id)));
  run.value = query.run;
  run.addEventListener("change", () => { query.run = run.value; query.step = ""; place.replaceChildren(); showRollouts(place, {}); });
  run.setAttribute("aria-label", "Run");
  const search = make("input", { type: "search", id: "search", placeholder: "Search ( / )", value: query.text });
  search.setAttribute("aria-label", "Search prompts, responses and answers");
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { query.text = search.value; list(); }, 200);
  });
  return make("div", { className: "bar" }, run, make("select", { id: "step" }), search,
    field("verdict", [["", "right or wrong"], ["right", "right"], ["wrong", "wrong"], ["trained", "trained on"], ["held-out", "held out"]]),
    field("stop", [["", "any end"], ["end_token", "end token"], ["length", "cut at the limit"], ["stop_string", "stop string"],
      ["environment", "ended by the environment"], ["aborted", "given up by the engine"]]),
    limit("shortest", "tokens from"), limit("longest", "tokens to"),
    field("order", [["stored", "as stored"], ["reward", "by reward"], ["length", "by length"], ["advantage", "by advantage"]]));
}

// Fill the list of steps; true if the steps have changed. A recovery also removes steps.
async function loadSteps() {
  const run = query.run, stored = await ask("steps", { run }), select = document.getElementById("step");
  if (!select || run !== query.run) return false;
  const there = [...select.options].map(each => each.value).join();
  const now = [["all", "all steps"], ...stored.slice().reverse().map(step => [String(step), "step " + step])];
  const changed = there !== now.map(([value]) => value).join();
  if (changed) select.replaceChildren(...now.map(([value, text]) => option(value, text)));
  if (!query.step || !now.some(([value]) => value === query.step)) {
    const measured = await ask("measured", { run });
    if (run !== query.run) return false;
    query.step = measured !== null ? String(measured) : now.length > 1 ? now[1][0] : "all";
  }
  select.value = query.step;
  select.setAttribute("aria-label", "Step");
  select.onchange = () => { query.step = select.value; list(); };
  return changed;
}

export async function showRollouts(place, { again = false, late = () => false }) {
  if (!state.chosen.includes(query.run)) { query.run = state.chosen[0]; query.step = ""; place.replaceChildren(); }
  const there = place.querySelector("#rollout-run");
  if (!there || [...there.options].map(each => each.value).join("\n") !== state.chosen.join("\n")) {
    opened = null;
    place.replaceChildren(controls(place), make("div", { className: "split" },
      make("div", { className: "card list rows", id: "list" }), make("div", { className: "card detail", id: "detail" })));
    again = false;
  }
  const changed = await loadSteps();
  if (late()) return;
  // While a run goes on, what is being read stays as it is until a step is added. The call before this one may have been
  // late and have listed nothing.
  if (!again || changed || !document.getElementById("list")?.dataset.count) await list(again);
}

// What was asked for can be gone: a run deleted, a step given up by a recovery.
const errorLine = error => make("p", { className: "bad", textContent: String(error.message || error) });

async function list(keep = false) {
  const place = document.getElementById("list");
  const mine = ++listing, answer = await ask("rollouts", query).catch(error => ({ error }));
  if (!place?.isConnected || mine !== listing) return;
  if (answer.error) { place.replaceChildren(errorLine(answer.error)); return; }
  rows = answer.rows;
  const head = ["step", "prompt", "response", "reward", "A", "tokens"];
  const body = rows.map((row, number) => {
    const cells = [row.step, null, null, short(row.reward), short(row.advantage), short(row.tokens)].map(text => make("td", { textContent: text }));
    for (const [index, text] of [[1, row.prompt], [2, row.text]]) {
      cells[index].className = "text";
      cells[index].replaceChildren(make("span", { textContent: text, dir: "auto" }));
    }
    judge(cells[3], row.accuracy);
    const line = make("tr", { className: "row", tabIndex: 0 }, ...cells);
    line.dataset.number = number;
    line.addEventListener("click", () => read(row));
    line.addEventListener("keydown", event => { if (event.key === "Enter") read(row); });
    return line;
  });
  const more = answer.unsearched ? answer.more + " more are not listed, and " + answer.unsearched + " older steps were not searched"
    : answer.more ? answer.more + " more are not listed" : "";
  const notes = [...answer.damaged, ...(more ? [more] : []), ...(rows.length ? [] : ["Nothing matches."])];
  place.replaceChildren(...notes.map(text => make("p", { className: "dim", textContent: text })),
    make("table", {}, make("thead", {}, make("tr", {}, ...head.map(text => make("th", { textContent: text })))), make("tbody", {}, ...body)));
  place.dataset.count = rows.length;
  if (keep && opened) mark();
  else if (rows.length) await open(rows.find(row => row.measured && row.advantage) || rows.find(row => row.measured) || rows[0]);
  else document.getElementById("detail").replaceChildren();
}

// Right and wrong have a sign as well as a colour.
function judge(cell, accuracy) {
  if (accuracy === null) return;
  cell.className = accuracy >= 1 ? "right" : "wrong";
  cell.prepend(accuracy >= 1 ? "\u2713 " : "\u2717 ");
  cell.title = cell.className;
}

// On a narrow page the rollout takes the place of the list, which would be screens above it.
function read(row) {
  document.querySelector(".split").classList.add("reading");
  open(row);
  if (narrow.matches) document.querySelector(".split").scrollIntoView();
}

function backToList() {
  document.querySelector(".split").classList.remove("reading");
  document.querySelector("#list tr[aria-selected=true]")?.scrollIntoView({ block: "center" });
}

function turnPages() {
  const button = (textContent, action) => {
    const each = make("button", { type: "button", textContent });
    each.addEventListener("click", action);
    return each;
  };
  return make("div", { className: "bar pages" }, button("\u2190 All rollouts", backToList),
    button("Before", () => move(-1)), button("Next", () => move(1)));
}

function mark() {
  for (const line of document.querySelectorAll("#list tr.row")) {
    const row = rows[line.dataset.number];
    line.setAttribute("aria-selected", opened !== null && row.step === opened.step && row.index === opened.index);
  }
  // On a narrow page the list is as long as the page, which stays where it is.
  if (!narrow.matches) document.querySelector("#list tr[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
}

async function open(row, whole = false) {
  const parameters = { run: query.run, step: row.step, index: row.index };
  if (whole) parameters.whole = 1;
  const mine = ++opening;
  opened = row;
  mark();
  const rollout = await ask("rollout", parameters).catch(error => ({ error })), detail = document.getElementById("detail");
  if (mine !== opening || !detail) return;
  if (rollout.error) { detail.replaceChildren(errorLine(rollout.error)); return; }
  const right = rollout.accuracy === null ? "" : rollout.accuracy >= 1 ? "right" : "wrong";
  const facts = ["step " + rollout.step, right, "reward " + short(rollout.reward), rollout.advantage === null ? "" : "advantage " + short(rollout.advantage),
    rollout.tokens + " tokens", rollout.stop, rollout.answer === null ? "" : "right answer: " + rollout.answer,
    ...Object.entries(rollout.components).map(([name, value]) => name + " " + short(value)), rollout.unscorable && "not scored: " + rollout.unscorable];
  const text = make("pre", { textContent: rollout.text, dir: "auto", id: "text" });
  const rest = make("button", { type: "button", textContent: "Show the other " + rollout.left.toLocaleString("en") + " characters" });
  rest.addEventListener("click", () => open(row, true));
  detail.replaceChildren(turnPages(),
    make("div", { className: "tag", textContent: facts.filter(Boolean).join(" \u00b7 ") }),
    make("h3", { textContent: "Prompt" }), make("pre", { textContent: rollout.prompt, dir: "auto" }),
    ...(rollout.details ? [strip(rollout)] : [make("p", { className: "dim", textContent: "No tokens of this response were measured." })]),
    ...turns(rollout),
    make("h3", { textContent: "Response as text" }), text, ...(rollout.left ? [rest] : []), ...group(rollout));
}

// Turns of an episode: what each side said, and the credit of each turn.

function turns(rollout) {
  if (!rollout.turns.length) return [];
  const known = value => value === null ? "" : short(value);
  const rows = rollout.turns.flatMap((turn, number) => [
    make("tr", {}, make("td", { textContent: number + 1 }), make("td", { textContent: turn.text, dir: "auto" }),
      make("td", { textContent: known(turn.reward) }), make("td", { textContent: known(turn.advantage) })),
    ...(turn.reply ? [make("tr", { className: "dim" }, make("td"), make("td", { textContent: turn.reply, dir: "auto" }), make("td"), make("td"))] : [])]);
  const head = make("tr", {}, ...["turn", "policy, then environment", "reward", "advantage"].map(name => make("th", { textContent: name })));
  return [make("h3", { textContent: "Turn by turn" }), make("table", { id: "turns" }, make("thead", {}, head), make("tbody", {}, ...rows))];
}

// Tokens

function strip(rollout) {
  const details = rollout.details, box = make("div", { className: "tokens", id: "tokens", dir: "auto" });
  const numbers = make("div", { className: "token-numbers", role: "status", textContent: "Click a token, or press \u2190 \u2192, for its numbers." }), legend = make("div", { className: "legend" });
  const by = make("select", { id: "colouring" }, ...Object.entries(quantities).map(([name, each]) => option(name, each.title)));
  by.value = colouring;
  by.setAttribute("aria-label", "Colour tokens by");
  const say = t => numbers.textContent = details.pieces[t].replace(/\n/g, "\\n") + "  token " + (t + 1) + ": " +
    Object.values(quantities).map(each => each.of(details, t) === null ? each.title + " not measured" : each.describe(each.of(details, t))).join(", ") +
    (cut(details, t) ? "; no gradient" : "");
  details.pieces.forEach((piece, t) => {
    const span = make("span", { textContent: piece, tabIndex: t ? -1 : 0 });
    span.dataset.token = t;
    box.append(span);
  });
  box.addEventListener("mouseover", event => { if (event.target.dataset.token) say(Number(event.target.dataset.token)); });
  box.addEventListener("focusin", event => { if (event.target.dataset.token) say(Number(event.target.dataset.token)); });
  box.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], next = move && box.children[Number(event.target.dataset.token) + move];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    event.preventDefault();
  });
  const paint = () => colour(box, details, legend);
  by.addEventListener("change", () => { colouring = by.value; paint(); });
  paint();
  const few = details.pieces.length < rollout.tokens ? " (the first " + details.pieces.length + " of " + rollout.tokens + " were measured)" : "";
  const update = details.update === null ? "no update had this response" : "as update " + (details.update + 1) + " of the step saw it";
  return make("div", {}, make("h3", { textContent: "Tokens" + few }),
    make("div", { className: "bar" }, make("label", {}, "Colour by ", by), make("span", { className: "dim", textContent: update })), legend, box, numbers);
}

const cut = (details, t) => details.coefficients[t] === 0 && details.advantages[t] !== null && details.advantages[t] !== 0;

function colour(box, details, legend) {
  const quantity = quantities[colouring], values = details.pieces.map((_, t) => quantity.of(details, t));
  const known = values.filter(value => value !== null), largest = Math.max(...known.map(Math.abs), quantity.least || 0);
  values.forEach((value, t) => {
    const size = value === null || Math.abs(value) <= largest / 100 ? 0 : Math.ceil(5 * Math.abs(value) / largest - 1e-9);
    const shade = value === null ? "none" : size === 0 ? "z" : (value < 0 ? "m" : "p") + size;
    box.children[t].className = "token " + shade + (cut(details, t) ? " cut" : "");
  });
  const shades = ["m5", "m3", "m1", "z", "p1", "p3", "p5"].map(name => make("i", { className: name }));
  const ends = colouring === "ratio" ? [ratio(-largest), ratio(largest)] : [short(-largest), short(largest)];
  legend.replaceChildren(...(known.length ? [ends[0], ...shades, ends[1], make("span", { textContent: "  underlined: no gradient" })]
    : [quantity.title + " was not measured: no update had this response"]));
}

// The group

function group(rollout) {
  if (rollout.siblings.length < 2) return [];
  const largest = Math.max(...rollout.siblings.map(each => Math.abs(each.advantage || 0)), 0);
  const body = rollout.siblings.map(each => {
    const size = largest ? Math.ceil(5 * Math.abs(each.advantage || 0) / largest - 1e-9) : 0;
    const reward = make("td", { textContent: short(each.reward) });
    judge(reward, each.accuracy);
    const line = make("tr", { className: "row", tabIndex: 0 }, make("td", { textContent: each.index === rollout.index ? "this" : "" }),
      make("td", { className: "text" }, make("span", { textContent: each.text, dir: "auto" })),
      reward,
      make("td", { textContent: short(each.advantage), className: size ? (each.advantage < 0 ? "m" : "p") + size : "" }),
      make("td", { textContent: short(each.tokens) }));
    line.addEventListener("click", () => open(each));
    line.addEventListener("keydown", event => { if (event.key === "Enter") open(each); });
    return line;
  });
  const rewards = rollout.siblings.map(each => each.reward).filter(value => value !== null);
  const mean = rewards.reduce((sum, value) => sum + value, 0) / Math.max(1, rewards.length);
  return [make("h3", { textContent: "Group of " + rollout.siblings.length + ", mean reward " + short(mean) }),
    make("table", { id: "group" }, make("thead", {}, make("tr", {}, ...["", "response", "reward", "A", "tokens"].map(text => make("th", { textContent: text })))),
      make("tbody", {}, ...body))];
}

function move(by) {
  const next = rows[rows.findIndex(row => row.step === opened.step && row.index === opened.index) + by];
  if (next) open(next);
  return Boolean(next);
}

export function rolloutKey(event) {
  const by = { j: 1, k: -1 }[event.key];
  if (by && opened) {
    if (!move(by)) return;
    // Else a tab that was clicked would keep the arrows, which are for tokens now.
    document.querySelector("#list tr[aria-selected=true]")?.focus({ preventScroll: true });
  } else if (["ArrowLeft", "ArrowRight"].includes(event.key) && !event.target.closest("#tokens, [role=tablist]")) {
    const token = document.querySelector("#tokens [tabindex='0']");
    token?.focus();
    if (token) event.preventDefault();
  } else if (event.key === "c" && document.getElementById("colouring")) {
    const names = Object.keys(quantities), select = document.getElementById("colouring");
    select.value = names[(names.indexOf(colouring) + 1) % names.length];
    select.dispatchEvent(new Event("change"));
  }
}
