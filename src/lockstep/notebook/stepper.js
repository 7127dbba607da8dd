// The all-reduce stepper's page. Who sends what to whom comes from stepper.py; here it is only carried out and shown.

const DARK = `color-scheme: dark; --fg: #e6edf3; --quiet: #9da7b1; --bg: #111417; --line: #3d444d;
  --own: #2b3036; --part: #6b4e0f; --full: #1d5b30; --mark: #6cb6ff; --button: #22272e`;
const STYLE = `
:root { color-scheme: light dark; --fg: #1b1f24; --quiet: #57606a; --bg: #fff; --line: #d0d7de; --own: #eef1f4;
  --part: #fbe3b5; --full: #bfe6c8; --mark: #0b62c4; --button: #f3f5f7 }
@media (prefers-color-scheme: dark) { :root { ${DARK} } }
:root[data-theme=dark] { ${DARK} }
* { box-sizing: border-box }
body { margin: 0; font: 14px/1.4 system-ui, sans-serif; color: var(--fg); background: var(--bg) }
h1 { position: absolute; width: 1px; height: 1px; margin: 0; overflow: hidden; clip-path: inset(50%) }
#stepper { padding: 8px 10px; max-width: 780px; outline-offset: -2px }
.row { display: flex; flex-wrap: wrap; gap: 6px 12px; align-items: center; margin-bottom: 8px }
button, select { font: inherit; color: inherit; background: var(--button); border: 1px solid var(--line);
  border-radius: 6px; min-height: 36px; padding: 2px 12px }
button { min-width: 44px; touch-action: manipulation } button:disabled { opacity: .45 }
input[type=range] { flex: 1; min-width: 110px; min-height: 36px; accent-color: var(--mark) }
:focus-visible { outline: 3px solid var(--mark); outline-offset: 1px }
.field { position: relative; overflow-x: auto }
table { border-spacing: 7px 9px; border-collapse: separate }
th { font-weight: 400; text-align: left; color: var(--quiet); white-space: nowrap; padding-right: 6px }
td { padding: 0; border-radius: 5px; background: var(--own); border: 2px solid transparent; text-align: center }
td.part { background: var(--part) } td.full { background: var(--full) } td.fresh { border-color: var(--mark) }
td span { display: inline-block; min-width: 1.8em; padding: 1px 2px; font-variant-numeric: tabular-nums }
td.sent { border: 0; background: none; color: var(--quiet); white-space: nowrap; padding-left: 10px; text-align: right }
svg { position: absolute; left: 0; top: 0; pointer-events: none; overflow: visible }
path { stroke: var(--mark); stroke-width: 2; fill: none } marker path { fill: var(--mark); stroke: none }
.key i { display: inline-block; width: 14px; height: 14px; border-radius: 3px; vertical-align: -2px; margin-right: 4px }
.key { color: var(--quiet); font-size: 13px } .key span { margin-right: 12px }
p { margin: 4px 0 }
`;

function carryOut(schedule, ends, values) {
  const history = [{ numbers: values.map((row) => [...row]), held: values.map(() => Array(schedule.chunks).fill(1)) }];
  for (const step of schedule.steps) {
    const before = history[history.length - 1];
    const after = { numbers: before.numbers.map((row) => [...row]), held: before.held.map((row) => [...row]) };
    for (const [sender, receiver, chunk, how] of step.moves) {
      const source = how === "own" ? values : before.numbers;
      const count = how === "own" ? 1 : before.held[sender][chunk];
      after.held[receiver][chunk] = how === "copy" ? count : after.held[receiver][chunk] + count;
      for (let i = ends[chunk]; i < ends[chunk + 1]; i++) {
        after.numbers[receiver][i] = (how === "copy" ? 0 : after.numbers[receiver][i]) + source[sender][i];
      }
    }
    history.push(after);
  }
  return history;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function mount(root, data) {
  const now = { ranks: data.first.ranks, length: data.first.length, way: "ring", step: 0 };
  const choose = (label, options, pick) => {
    const select = element("select", { onchange: () => pick(select.value) });
    for (const [value, text] of options) select.append(element("option", { value, textContent: text }));
    return [element("label", {}, label + " ", select), select];
  };
  const counts = Array.from({ length: data.largest - 1 }, (_, i) => [i + 2, i + 2]);
  const change = (key, number) => (value) => { now[key] = number ? Number(value) : value; now.step = 0; show(); };
  const [ranksLabel, ranks] = choose("Ranks", counts, change("ranks", true));
  const [lengthLabel, length] = choose("Numbers", data.lengths.map((n) => [n, n]), change("length", true));
  const ways = [["ring", "ring"], ["naive", "everybody sends everything"]];
  const [wayLabel, way] = choose("Way", ways, change("way", false));
  const go = (step) => { now.step = Math.max(0, Math.min(schedule().steps.length, step)); show(); };
  const button = (text, label, act) => element("button", { type: "button", textContent: text, ariaLabel: label, onclick: act });
  const first = button("|◀", "to the beginning", () => go(0));
  const back = button("◀", "one step back", () => go(now.step - 1));
  const next = button("▶", "one step forward", () => go(now.step + 1));
  const last = button("▶|", "to the end", () => go(Infinity));
  const slider = element("input", { type: "range", min: 0, ariaLabel: "step", oninput: () => go(Number(slider.value)) });
  const table = element("table");
  const field = element("div", { className: "field" }, table);
  const said = element("p"), cost = element("p");
  said.setAttribute("role", "status");
  const key = element("p", { className: "key" });
  for (const [name, text] of [["own", "what the rank brought"], ["part", "a partial sum"], ["full", "the sum of all"]]) {
    const swatch = element("i");
    swatch.style.background = `var(--${name})`;
    key.append(element("span", {}, swatch, text));
  }
  key.append("Keys: ← → Home End");
  root.append(element("style", { textContent: STYLE }),
    element("div", { className: "row" }, ranksLabel, lengthLabel, wayLabel),
    element("div", { className: "row" }, first, back, next, last, slider), said, field, key, cost);
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.ariaLabel = "All-reduce, step by step. Arrow keys go forward and back.";
  root.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.target === slider) return;
    const target = { ArrowRight: now.step + 1, ArrowLeft: now.step - 1, Home: 0, End: Infinity }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    go(target);
  });
  window.addEventListener("resize", show);

  function schedule(name = now.way) { return data.schedules[`${name}/${now.ranks}`]; }
  function ends(plan) { return data.bounds[`${now.length}/${plan.chunks}`]; }
  function sent(plan, steps) {
    const total = Array(now.ranks).fill(0), at = ends(plan);
    for (const step of plan.steps.slice(0, steps)) {
      for (const [sender, , chunk] of step.moves) total[sender] += (at[chunk + 1] - at[chunk]) * data.numberBytes;
    }
    return total;
  }

  function show() {
    const plan = schedule(), at = ends(plan), count = plan.steps.length;
    const values = data.values[now.length].slice(0, now.ranks);
    const state = carryOut(plan, at, values)[now.step];
    const step = now.step ? plan.steps[now.step - 1] : null;
    const fresh = new Set(step ? step.moves.map(([, receiver, chunk]) => `${receiver}/${chunk}`) : []);
    const bytes = sent(plan, now.step);
    ranks.value = now.ranks; length.value = now.length; way.value = now.way;
    slider.max = count; slider.value = now.step;
    slider.setAttribute("aria-valuetext", `step ${now.step} of ${count}`);
    first.disabled = back.disabled = now.step === 0;
    next.disabled = last.disabled = now.step === count;
    table.replaceChildren(...values.map((_, rank) => {
      const row = element("tr", {}, element("th", { scope: "row", textContent: `rank ${rank}` }));
      for (let chunk = 0; chunk < plan.chunks; chunk++) {
        const held = state.held[rank][chunk];
        const kind = held === 1 ? "own" : held === now.ranks ? "full" : "part";
        const cell = element("td", { className: kind + (fresh.has(`${rank}/${chunk}`) ? " fresh" : "") });
        if (at[chunk] === at[chunk + 1]) cell.append(element("span", { textContent: "–", title: "empty chunk" }));
        for (let i = at[chunk]; i < at[chunk + 1]; i++) cell.append(element("span", { textContent: state.numbers[rank][i] }));
        row.append(cell);
      }
      row.append(element("td", { className: "sent", textContent: `sent ${bytes[rank]} B` }));
      return row;
    }));
    said.textContent = tell(step, count, at);
    const whole = now.length * data.numberBytes;
    const ring = sent(schedule("ring")), naive = sent(schedule("naive"));
    const times = (all) => `${Math.max(...all)} bytes a rank, ${(Math.max(...all) / whole).toFixed(2)} × the tensor`;
    cost.textContent = `The tensor has ${whole} bytes. To the end, the ring sends at most ${times(ring)}; `
      + `everybody to everybody ${times(naive)}.`;
    arrows(step);
  }

  function tell(step, count, at) {
    if (!step) return `Before the first of ${count} steps: every rank holds what it brought.`;
    const [sender, receiver, chunk, how] = step.moves[0];
    const size = (at[chunk + 1] - at[chunk]) * data.numberBytes;
    const does = how === "copy" ? "puts it in place of its own" : "adds it";
    const what = how === "own" ? `all it brought (${size} bytes)` : `chunk ${chunk} (${size} bytes)`;
    const end = now.step === count ? " Done: all ranks hold the same sum." : "";
    return `Step ${now.step} of ${count}, ${step.phase}: all ranks send at once. Rank ${sender} sends ${what} to `
      + `rank ${receiver}, which ${does}.${end}`;
  }

  function arrows(step) {
    field.querySelector("svg")?.remove();
    if (!step) return;
    const space = "http://www.w3.org/2000/svg";
    const drawing = document.createElementNS(space, "svg");
    drawing.setAttribute("aria-hidden", "true");
    drawing.setAttribute("width", table.offsetWidth);
    drawing.setAttribute("height", table.offsetHeight);
    drawing.innerHTML = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
      + 'orient="auto"><path d="M0 0 8 4 0 8z"/></marker>';
    step.moves.forEach(([sender, receiver, chunk], index) => {
      const from = table.rows[sender].cells[chunk + 1], to = table.rows[receiver].cells[chunk + 1];
      const down = receiver > sender, left = from.offsetLeft;
      const x = left + 9 + (now.way === "naive" ? index * 14 : 0);
      const y1 = from.offsetTop + (down ? from.offsetHeight - 5 : 5), y2 = to.offsetTop + (down ? 1 : to.offsetHeight - 1);
      const middle = (cell) => cell.offsetTop + cell.offsetHeight / 2;
      const path = document.createElementNS(space, "path");
      // Where a ring closes, the arrow passes other ranks' rows: it runs beside their numbers.
      const beside = now.way === "ring" && Math.abs(receiver - sender) > 1;
      path.setAttribute("d", beside ? `M${left} ${middle(from)}H${left - 4}V${middle(to)}H${left + 2}` : `M${x} ${y1}L${x} ${y2}`);
      path.setAttribute("marker-end", "url(#tip)");
      drawing.append(path);
    });
    field.append(drawing);
  }

  show();
}
