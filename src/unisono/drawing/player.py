"""The page that plays a schedule: its elements, how they look, and its script.

The script draws what the page's data says and works out nothing itself.
"""

__all__ = ["BODY", "SCRIPT", "STYLE"]

BODY = """\
<div class="controls" role="group" aria-label="Playback">
  <button id="first" title="Before the first step (Home)" aria-label="To the start">|◀</button>
  <button id="back" title="One step back (←)" aria-label="One step back">◀</button>
  <button id="play" title="Play or pause (Space)" class="wide">Play</button>
  <button id="forward" title="One step forward (→)" aria-label="One step forward">▶</button>
  <button id="last" title="After the last step (End)" aria-label="To the end">▶|</button>
  <input id="slider" type="range" min="0" value="0" aria-label="Steps done">
  <label>speed <select id="speed"><option value="0.5">½×</option><option value="1" selected>1×</option>
    <option value="2">2×</option><option value="4">4×</option></select></label>
  <strong id="where" aria-live="polite"></strong>
</div>
<main>
  <section>
    <h2>Messages</h2>
    <svg id="circle" role="img" aria-label="Ranks on a circle and the messages of this step"></svg>
    <p id="transfers"></p>
  </section>
  <section>
    <h2>What every rank holds</h2>
    <div class="scroll">
      <div id="cells" role="img" aria-label="Chunks of every rank; the text below tells about the chosen one"></div>
    </div>
    <p id="info" aria-live="polite"></p>
  </section>
</main>
<p class="soft">Solid: reduced into what is there. Dashed: copied over it. A chunk fills up with the ranks whose
contributions it holds; ✓ marks what the collective asks for.
Keys: Space plays, ← → step, Home End, ↑ ↓ choose a chunk, Esc lets go.</p>
<p class="soft" id="notes"></p>
"""

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --panel: #f6f8fa; --ink: #24292f; --soft: #57606a; --line: #d0d7de;
  --accent: #0969da; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --panel: #161b22; --ink: #e6edf3; --soft: #9aa4af;
  --line: #30363d; --accent: #58a6ff; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 16px 20px; max-width: 1500px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif }
h1 { font-size: 18px; margin: 0 0 12px } h2 { font-size: 13px; margin: 0 0 8px; color: var(--soft) }
.controls { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-bottom: 14px }
button, select { font: inherit; color: var(--ink); background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 4px 10px; min-width: 38px; cursor: pointer }
button.wide { min-width: 68px } button:hover { border-color: var(--accent) }
button:disabled { opacity: .4; cursor: default }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px }
input[type=range] { flex: 1 1 140px; max-width: 420px; accent-color: var(--accent) }
main { display: grid; grid-template-columns: minmax(300px, 5fr) minmax(300px, 6fr); gap: 14px }
@media (max-width: 760px) { main { grid-template-columns: 1fr } }
section { background: var(--panel); border-radius: 8px; padding: 12px 14px; min-width: 0 }
#circle { display: block; width: 100%; max-height: 62vh }
#circle .node { fill: var(--page); stroke: var(--soft) } #circle .switch { fill: var(--line); stroke: var(--soft) }
#circle text { fill: var(--ink); font-size: 11px; text-anchor: middle; dominant-baseline: central }
#circle .label { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; font-size: 10px }
#circle .dim { opacity: .15 }
#transfers { font: 12px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; margin: 10px 0 0; min-height: 3.4em }
#transfers span { border-bottom: 2px solid; margin-right: 10px; white-space: nowrap } #transfers .dim { opacity: .3 }
.scroll { overflow-x: auto; padding: 3px }
#cells { display: grid; gap: 3px; align-items: center; width: 100% }
#cells .name { font-size: 12px; color: var(--soft); padding-right: 8px; white-space: nowrap }
#cells .head { font-size: 11px; color: var(--soft); text-align: center; overflow: hidden }
.cell { position: relative; height: 26px; border: 1px solid var(--line); border-radius: 4px; overflow: hidden;
  background: var(--page); cursor: pointer; font-size: 11px; display: flex; align-items: center;
  justify-content: center }
.cell i { position: absolute; top: 0; bottom: 0; opacity: .45 } .cell.done i { opacity: .75 }
.cell b { position: relative; font-weight: 500; white-space: nowrap } .cell.new { box-shadow: 0 0 0 2px var(--accent) }
.cell.bad { border-color: var(--bad); box-shadow: 0 0 0 1px var(--bad) } .cell.dim { opacity: .3 }
.cell.here { outline: 2px solid var(--ink); outline-offset: 0 }
#info { margin: 10px 0 0; min-height: 4.4em; white-space: pre-line } .soft { color: var(--soft); font-size: 12px }
"""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const nodes = data.ranks + data.switches, total = data.steps.length;
const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
const nodeName = (n) => (n < data.ranks ? "rank " : "switch ") + n;

// states[k][rank][chunk] after k steps; rows that a step leaves alone are shared
const states = [Array.from({length: nodes}, () => [])];
data.changes.forEach((cells, k) => {
  const rows = k ? states[k - 1].slice() : states[0], fresh = new Set();
  for (const [rank, chunk, words, ranks, twice] of cells) {
    if (!fresh.has(rank)) { rows[rank] = rows[rank].slice(); fresh.add(rank); }
    rows[rank][chunk] = {words, ranks, twice, step: k};
  }
  states[k] = rows;
});

// ---- the circle
const svgns = "http://www.w3.org/2000/svg", svg = byId("circle");
const nodeSize = data.ranks <= 8 ? 14 : 11, radius = Math.max(90, data.ranks * 44 / (2 * Math.PI));
const half = radius + nodeSize + 22;
svg.setAttribute("viewBox", `${-half} ${-half} ${2 * half} ${2 * half}`);
function make(name, attributes, parent, words) {
  const made = document.createElementNS(svgns, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (words !== undefined) made.textContent = words;
  parent.append(made);
  return made;
}
function place(n) {
  const inner = n >= data.ranks;
  const turn = inner ? (n - data.ranks + 0.5) / data.switches : n / data.ranks;
  const r = !inner ? radius : data.switches === 1 ? 0 : radius * 0.4;
  return [r * Math.sin(2 * Math.PI * turn), -r * Math.cos(2 * Math.PI * turn)];
}
function curve(src, dst) {
  const [ax, ay] = place(src), [bx, by] = place(dst), apart = Math.abs(src - dst);
  const near = Math.max(src, dst) >= data.ranks || apart === 1 || apart === data.ranks - 1;
  const pull = near ? 1 : 0.65, bend = near ? 0.18 : 0.13;
  const cx = (ax + bx) / 2 * pull + (by - ay) * bend, cy = (ay + by) / 2 * pull - (bx - ax) * bend;
  const out = Math.hypot(cx - ax, cy - ay), back = Math.hypot(cx - bx, cy - by);
  const from = [ax + (cx - ax) / out * nodeSize, ay + (cy - ay) / out * nodeSize];
  const tip = [bx + (cx - bx) / back * (nodeSize + 1.5), by + (cy - by) / back * (nodeSize + 1.5)];
  return {from, tip, control: [cx, cy], along: [(bx - cx) / back, (by - cy) / back]};
}
function on(c, t) {
  return [0, 1].map((i) => (1 - t) ** 2 * c.from[i] + 2 * t * (1 - t) * c.control[i] + t * t * c.tip[i]);
}
const arrows = make("g", {}, svg), circles = make("g", {}, svg), tokens = make("g", {}, svg);
for (let n = 0; n < nodes; n++) {
  const [x, y] = place(n), s = nodeSize;
  if (n < data.ranks) make("circle", {cx: x, cy: y, r: s, class: "node"}, circles);
  else make("rect", {x: x - s, y: y - s, width: 2 * s, height: 2 * s, rx: 3, class: "switch"}, circles);
  make("text", {x, y}, circles, n);
}
let drawn = [];
function drawArrows(step) {
  arrows.replaceChildren(); tokens.replaceChildren(); byId("transfers").replaceChildren();
  drawn = (data.steps[step] || []).map((m) => {
    const colour = data.colours[m.chunks[0]], c = curve(m.src, m.dst), g = make("g", {}, arrows), [ux, uy] = c.along;
    const how = m.reduce ? "reduced into" : "copied over";
    make("title", {}, g, `${nodeName(m.src)} → ${nodeName(m.dst)}: ${m.name}, ${how}`);
    const end = [c.tip[0] - ux * 4, c.tip[1] - uy * 4];
    make("path", {d: `M${c.from}Q${c.control} ${end}`, fill: "none", stroke: colour, "stroke-width": 2,
      "stroke-dasharray": m.reduce ? "none" : "5 3"}, g);
    const [px, py] = [c.tip[0] - ux * 7, c.tip[1] - uy * 7], [wx, wy] = [uy * 3.5, ux * 3.5];
    make("path", {d: `M${c.tip}L${px - wx} ${py + wy}L${px + wx} ${py - wy}Z`, fill: colour}, g);
    const token = make("g", {}, tokens);
    make("circle", {r: 5, fill: colour}, token);
    if (data.steps[step].length <= 3 * nodes) make("text", {y: -12, class: "label"}, token, m.label);
    const chip = document.createElement("span");
    chip.textContent = `${m.src}>${m.dst} ${m.name} ${m.reduce ? "+" : "="}`;
    chip.style.borderColor = colour;
    byId("transfers").append(chip, " ");
    for (const part of [g, token, chip]) {
      part.addEventListener("pointerenter", () => point(m.dst, m.chunks[0]));
      part.addEventListener("pointerleave", () => point(null));
    }
    return {m, c, parts: [g, token, chip], token};
  });
}
function moveTokens(t) {
  for (const {c, token} of drawn) token.setAttribute("transform", `translate(${on(c, t)})`);
}

// ---- what every rank holds
const grid = byId("cells"), cells = [];
const wide = Math.max(16, Math.min(96, Math.floor((grid.parentElement.clientWidth - 80) / data.chunks) - 3));
grid.style.gridTemplateColumns = `max-content repeat(${data.chunks}, minmax(${wide}px, 1fr))`;
grid.append(document.createElement("span"));
for (let c = 0; c < data.chunks; c++) {
  const head = document.createElement("span");
  head.className = "head"; head.textContent = wide < 22 && c % 4 ? "" : (wide < 30 ? c : "c" + c);
  grid.append(head);
}
for (let rank = 0; rank < nodes; rank++) {
  const name = document.createElement("span");
  name.className = "name"; name.textContent = nodeName(rank); grid.append(name);
  cells.push(Array.from({length: data.chunks}, (_, chunk) => {
    const cell = document.createElement("div");
    cell.addEventListener("pointerenter", () => point(rank, chunk));
    cell.addEventListener("pointerleave", () => point(null));
    cell.addEventListener("click", () => keep(rank, chunk));
    grid.append(cell);
    return cell;
  }));
}
function isGoal(rank, chunk) { return rank < data.ranks && data.goal[rank][chunk]; }
function isDone(rank, chunk, held) {
  return isGoal(rank, chunk) && held.ranks.length === data.wanted[chunk] && !held.twice.length;
}
function drawCells() {
  states[at].forEach((row, rank) => row.forEach((held, chunk) => {
    const cell = cells[rank][chunk], done = isDone(rank, chunk, held), fill = [];
    const slots = data.wanted[chunk] > 1 ? data.ranks : 1;
    for (const r of held.ranks) {
      const bar = document.createElement("i");
      const left = slots > 1 ? r / slots * 100 : 0;
      bar.style.cssText = `left:${left}%;width:${100 / slots}%;background:${data.colours[chunk]}`;
      fill.push(bar);
    }
    const words = document.createElement("b"), full = held.words + (done ? " ✓" : "");
    words.textContent = full.length * 6.5 <= wide ? full : done ? "✓" : "";
    cell.replaceChildren(...fill, words);
    const flags = {done, new: at && held.step === at, bad: held.twice.length};
    cell.className = ["cell", ...Object.keys(flags).filter((name) => flags[name])].join(" ");
  }));
}

// ---- following one chunk
let pointed = null, kept = null;
function keep(rank, chunk) {
  kept = kept && kept[0] === rank && kept[1] === chunk ? null : [rank, chunk];
  mark();
}
function point(rank, chunk) { pointed = rank === null ? null : [rank, chunk]; mark(); }
function mark() {
  const chosen = pointed || kept;
  cells.forEach((row, rank) => row.forEach((cell, chunk) => {
    cell.classList.toggle("dim", chosen !== null && chunk !== chosen[1]);
    cell.classList.toggle("here", chosen !== null && chunk === chosen[1] && rank === chosen[0]);
  }));
  for (const {m, parts} of drawn) for (const part of parts) {
    part.classList.toggle("dim", chosen !== null && !m.chunks.includes(chosen[1]));
  }
  byId("info").textContent = chosen ? story(...chosen) : "Point at a chunk to follow it; click to keep it.";
}
function story(rank, chunk) {
  const held = states[at][rank][chunk], many = held.ranks.length;
  const s = many > 1 ? "s" : "", when = at ? "after step " + (at - 1) : "before step 0";
  const holds = many ? `contribution${s} of rank${s} ${held.words} (${many} of ${data.wanted[chunk]})` : "nothing yet";
  const lines = [`Chunk ${chunk} at ${nodeName(rank)} ${when}: ${holds}.`];
  const came = [];
  for (let k = 0; k < at; k++) for (const m of data.steps[k]) {
    if (m.dst === rank && m.chunks.includes(chunk)) came.push(`step ${k} from ${m.src} ${m.reduce ? "+" : "="}`);
  }
  if (came.length) lines.push(`Arrived: ${came.join(", ")}.`);
  if (held.twice.length) lines.push(`Counted more than once: ${held.twice.join(", ")}.`);
  const complete = isDone(rank, chunk, held);
  if (isGoal(rank, chunk)) lines.push(complete ? "✓ Complete." : "Must be complete at the end.");
  return lines.join("\n");
}

function choose(by) {
  kept = kept ? [kept[0], (kept[1] + by + data.chunks) % data.chunks] : [0, 0];
  mark();
}

// ---- playback: `at` steps are done; `moving` is the time at which the step under way began, or null
let at = 0, playing = false, moving = null, frame = 0;
const duration = () => 1100 / byId("speed").value;
function show(k) {
  at = Math.max(0, Math.min(total, k)); moving = null; cancelAnimationFrame(frame);
  drawArrows(at ? at - 1 : -1); moveTokens(0.82); drawCells(); mark(); refresh();
}
function refresh() {
  byId("slider").value = at;
  const resting = at ? `after step ${at - 1} (${at} of ${total} done)` : "before step 0";
  byId("where").textContent = moving !== null ? `step ${at} under way` : resting;
  byId("play").textContent = playing ? "Pause" : "Play";
  byId("first").disabled = byId("back").disabled = !at && moving === null;
  byId("forward").disabled = byId("last").disabled = at === total;
}
function advance() {
  if (moving !== null) { show(at + 1); }
  if (at === total) { playing = false; refresh(); return; }
  if (calm) { show(at + 1); if (playing) setTimeout(() => playing && advance(), duration()); return; }
  drawArrows(at); mark(); moving = performance.now(); refresh();
  const tick = (now) => {
    const t = Math.min(1, Math.max(0, (now - moving) / (0.7 * duration())));
    moveTokens(t * t * (3 - 2 * t) * 0.82);
    if (t < 1) { frame = requestAnimationFrame(tick); return; }
    show(at + 1);
    if (playing && at < total) setTimeout(() => playing && moving === null && advance(), 0.3 * duration());
    else { playing = false; refresh(); }
  };
  frame = requestAnimationFrame(tick);
}
function stop() { playing = false; }
const actions = {
  play() {
    playing = !playing;
    if (playing && at === total) show(0);
    if (playing && moving === null) advance();
    refresh();
  },
  forward() { stop(); advance(); },
  back() { stop(); show(moving !== null ? at : at - 1); },
  first() { stop(); show(0); },
  last() { stop(); show(total); },
};
for (const name in actions) byId(name).addEventListener("click", actions[name]);
byId("slider").max = total;
byId("slider").addEventListener("input", (e) => { stop(); show(Number(e.target.value)); });
const keys = {" ": "play", ArrowRight: "forward", ArrowLeft: "back", Home: "first", End: "last"};
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.tagName === "SELECT") return;
  const down = e.key === "ArrowDown", up = e.key === "ArrowUp";
  if (keys[e.key]) actions[keys[e.key]]();
  else if (down || up) choose(down ? 1 : -1);
  else if (e.key === "Escape") { kept = null; mark(); }
  else return;
  e.preventDefault();
});
byId("notes").textContent = data.notes.join("; ");
const asked = /^#step=(\d+)$/.exec(location.hash);
show(asked ? Number(asked[1]) : 0);
"""
