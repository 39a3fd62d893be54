"""The elements of the page that plays a schedule, and how they look."""

__all__ = ["BODY", "STYLE"]

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
