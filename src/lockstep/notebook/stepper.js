// The all-reduce stepper's page. Who sends what to whom comes from stepper.py; here it is only carried out and shown.
// A step shows its result at once, for whoever reads it out; what moves is painted above it and goes away.

const ASKED = 1;  // the chunk of which is asked where it ends
const FLIGHT = 650, PAUSE = 1500;  // milliseconds

const DARK = `color-scheme: dark; --fg: #e6edf3; --quiet: #9da7b1; --bg: #111417; --line: #3d444d;
  --own: #2b3036; --part: #6b4e0f; --full: #1d5b30; --mark: #6cb6ff; --button: #22272e; --right: #56d364; --wrong: #ff8f85`;
const STYLE = `
:root { color-scheme: light dark; --fg: #1b1f24; --quiet: #57606a; --bg: #fff; --line: #d0d7de; --own: #eef1f4;
  --part: #fbe3b5; --full: #bfe6c8; --mark: #0b62c4; --button: #f3f5f7; --right: #1a7f37; --wrong: #b42318 }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { ${DARK} } }
:root[data-theme=light] { color-scheme: light }
:root[data-theme=dark] { ${DARK} }
* { box-sizing: border-box }
body { margin: 0; font: 14px/1.4 system-ui, sans-serif; color: var(--fg); background: var(--bg) }
h1 { position: absolute; width: 1px; height: 1px; margin: 0; overflow: hidden; clip-path: inset(50%) }
#stepper { padding: 8px 10px; max-width: 780px; outline-offset: -2px }
.row { display: flex; flex-wrap: wrap; gap: 6px 12px; align-items: center; margin-bottom: 8px }
button, select { font: inherit; color: inherit; background: var(--button); border: 1px solid var(--line);
  border-radius: 6px; min-height: 36px; padding: 2px 12px }
button { min-width: 44px; touch-action: manipulation } button[aria-disabled=true] { opacity: .45 }
.play { min-width: 92px }
input[type=range] { flex: 1; min-width: 110px; min-height: 36px; accent-color: var(--mark) }
:focus-visible { outline: 3px solid var(--mark); outline-offset: 1px }
.field { position: relative; padding-left: 1px; overflow-x: auto; overflow-y: hidden }
table { border-spacing: 16px 15px; border-collapse: separate; margin: -6px -16px }
thead th { text-align: center; font-size: 12px; padding: 0 }
th { font-weight: 400; text-align: left; color: var(--quiet); white-space: nowrap; padding: 0 }
td { padding: 0; border-radius: 5px; background: var(--own); border: 2px solid transparent; text-align: center }
.part { background: var(--part) } .full { background: var(--full) } td.fresh { border-color: var(--mark) }
td.guess { outline: 2px dashed var(--mark); outline-offset: 3px }
td span, .ghost span { display: inline-block; min-width: 1.8em; padding: 1px 2px; font-variant-numeric: tabular-nums }
td.corner { border: 0; background: none }
td.sent { border: 0; background: none; color: var(--quiet); white-space: nowrap; min-width: 10ch; text-align: left }
@media (max-width: 480px) { table { border-spacing: 9px 13px; margin: -6px 0 -6px -9px } td.sent { font-size: 12px; min-width: 8ch } }
@media (max-width: 380px) { table { border-spacing: 6px 13px; margin-left: -6px } th { font-size: 12px } thead th { white-space: normal }
  td span, .ghost span { min-width: 1.4em } td.sent { white-space: normal; font-size: 11px; min-width: 4ch } }
.ghost { position: absolute; border-radius: 5px; border: 2px solid transparent; text-align: center; background: var(--own) }
.ghost.part { background: var(--part) } .ghost.full { background: var(--full) }
.ghost.flies { border-color: var(--mark); box-shadow: 0 2px 8px rgb(0 0 0 / .35) }
svg { position: absolute; left: 0; top: 0; pointer-events: none; overflow: visible }
path { stroke: var(--mark); stroke-width: 2; fill: none } marker path { fill: var(--mark); stroke: none }
#stepper { display: flex; flex-direction: column } #stepper > * { min-width: 0 }
.asks { gap: 4px 8px; margin: 0 } .asks p { flex-basis: 100% } .asks[hidden], .asks[hidden] + .told { display: none }
.asks, .told { border-left: 3px solid var(--mark); padding-left: 10px } .told { margin-bottom: 8px; padding-top: 4px }
.asks.right { --verdict: var(--right) } .asks.wrong { --verdict: var(--wrong) }
.asks button { min-height: 30px; padding: 0 10px } .asks button[aria-pressed=true] { background: var(--verdict, var(--mark)); color: var(--bg) }
.head { display: contents }
.verdict { order: 1; min-height: 1.4em; margin: 0; font-weight: 600; color: var(--verdict, inherit) }
.rule { margin: 0; color: var(--quiet) }
/* Where there is room, the answer's place is kept below its question. On a phone the answer takes the question's place,
   and captions, which differ in height, are below the picture. */
.asks:not(.seen) + .told .rule { visibility: hidden }
@media (max-width: 480px) {
  .asks { margin-bottom: 8px } .head { display: grid; flex-basis: 100% } .head p { grid-area: 1 / 1; margin: 4px 0 }
  .seen .question { visibility: hidden } .asks:not(.seen) + .told { display: none }
  .said { min-height: 0 !important } .said { order: 1 } .told, .key, .cost { order: 2 }
}
@media (pointer: coarse) { .key .keys { display: none } }
.key .own { background: var(--own) } .key i { display: inline-block; width: 14px; height: 14px; border-radius: 3px; vertical-align: -2px; margin-right: 4px }
.key .fresh { border: 2px solid var(--mark) } .key .guess { border: 2px dashed var(--mark) }
.key { color: var(--quiet); font-size: 13px } .key span { display: inline-block; margin-right: 12px; white-space: nowrap } .key [hidden] { display: none }
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
  const now = { ranks: data.first.ranks, length: data.first.length, way: "ring", step: 0, guess: null, seen: false };
  const choose = (label, options, pick) => {
    const select = element("select", { onchange: () => pick(select.value) });
    for (const [value, text] of options) select.append(element("option", { value, textContent: text }));
    return [element("label", {}, label + " ", select), select];
  };
  const counts = Array.from({ length: data.largest - 1 }, (_, i) => [i + 2, i + 2]);
  const change = (key, number) => (value) => {
    now[key] = number ? Number(value) : value;
    [now.guess, now.seen] = [null, false];
    stop();
    fresh();
    go(0);
  };
  const [ranksLabel, ranks] = choose("Ranks", counts, change("ranks", true));
  const [lengthLabel, length] = choose("Numbers", data.lengths.map((n) => [n, n]), change("length", true));
  const ways = [["ring", "ring"], ["naive", "every rank sends everything"]];
  const [wayLabel, way] = choose("Method", ways, change("way", false));
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let playing = 0;
  const go = (step) => {
    const before = now.step;
    now.step = Math.max(0, Math.min(schedule().steps.length, step));
    const old = [...table.rows].map((row) => [...row.cells]);
    show();
    if (now.step === before + 1 && !still.matches) fly(old);
  };
  const by = (step) => () => { stop(); go(step()); };
  const stop = () => { clearInterval(playing); playing = 0; named(); };
  const play = () => {
    if (playing) return stop();
    go(now.step === schedule().steps.length ? 0 : now.step + 1);
    playing = setInterval(() => { go(now.step + 1); if (now.step === schedule().steps.length) stop(); }, PAUSE);
    named();
  };
  const named = () => { player.textContent = playing ? "❚❚ Pause" : "▶ Play"; };
  const button = (text, label, act) => element("button", { type: "button", textContent: text, ariaLabel: label, onclick: act });
  const first = button("|◀", "to the beginning", by(() => 0));
  const back = button("◀", "one step back", by(() => now.step - 1));
  const next = button("▶", "one step forward", by(() => now.step + 1));
  const last = button("▶|", "to the end", by(() => Infinity));
  const player = element("button", { type: "button", className: "play", onclick: play });
  const slider = element("input", { type: "range", min: 0, ariaLabel: "step", oninput: by(() => Number(slider.value)) });
  const table = element("table");
  const field = element("div", { className: "field" }, table);
  const said = element("p", { className: "said" }), cost = element("p", { className: "cost" });
  said.setAttribute("role", "status");
  const asks = element("div", { className: "row asks", role: "group" });
  const question = element("p", { className: "question" });
  const verdict = element("p", { className: "verdict", ariaLive: "polite" });
  const rule = element("p", { className: "rule" });
  const told = element("div", { className: "told" }, rule);
  const key = element("p", { className: "key" });
  for (const [name, text] of [["own", "the rank's own numbers"], ["part", "a sum over some ranks"],
    ["full", "the sum over all ranks"], ["fresh", "just arrived"], ["guess", "your choice"]]) {
    key.append(element("span", {}, element("i", { className: name }), text));
  }
  key.append(element("span", { className: "keys", textContent: "Keys: ← → Home End" }));
  root.append(element("style", { textContent: STYLE }),
    element("div", { className: "row" }, ranksLabel, lengthLabel, wayLabel), asks, told,
    element("div", { className: "row" }, player, first, back, next, last, slider), said, field, key, cost);
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.ariaLabel = "All-reduce, step by step. The arrow keys step forward and back.";
  root.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.target === slider) return;
    const target = { ArrowRight: now.step + 1, ArrowLeft: now.step - 1, Home: 0, End: Infinity }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    by(() => target)();
  });

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
    const arrived = new Set(step ? step.moves.map(([, receiver, chunk]) => `${receiver}/${chunk}`) : []);
    const bytes = sent(plan, now.step);
    ranks.value = now.ranks; length.value = now.length; way.value = now.way;
    slider.max = count; slider.value = now.step;
    slider.setAttribute("aria-valuetext", `step ${now.step} of ${count}`);
    // `disabled` would take the keyboard's focus away.
    for (const one of [first, back]) one.ariaDisabled = now.step === 0;
    for (const one of [next, last]) one.ariaDisabled = now.step === count;
    const body = element("tbody", {}, ...values.map((_, rank) => {
      const row = element("tr", {}, element("th", { scope: "row", textContent: `rank ${rank}` }));
      for (let chunk = 0; chunk < plan.chunks; chunk++) {
        const held = state.held[rank][chunk];
        const kind = held === 1 ? "own" : held === now.ranks ? "full" : "part";
        const cell = element("td", { className: kind + (arrived.has(`${rank}/${chunk}`) ? " fresh" : "") });
        if (chunk === ASKED && rank === now.guess) cell.classList.add("guess");
        if (at[chunk] === at[chunk + 1]) cell.append(element("span", { textContent: "–", title: "empty chunk" }));
        for (let i = at[chunk]; i < at[chunk + 1]; i++) cell.append(element("span", { textContent: state.numbers[rank][i] }));
        row.append(cell);
      }
      row.append(element("td", { className: "sent", textContent: `sent ${bytes[rank]}\u00a0B` }));
      return row;
    }));
    const names = Array.from({ length: plan.chunks }, (_, chunk) => element("th", {
      scope: "col", textContent: plan.chunks > 1 ? `chunk ${chunk}` : "the whole tensor" }));
    table.replaceChildren(element("thead", {}, element("tr", {}, element("td", { className: "corner" }), ...names)), body);
    judge();
    said.textContent = tell(now.step);
    const whole = now.length * data.numberBytes;
    const ring = sent(schedule("ring")), naive = sent(schedule("naive"));
    const times = (all) => `${Math.max(...all)} bytes (${(Math.max(...all) / whole).toFixed(2)} × the tensor)`;
    cost.textContent = `The tensor has ${whole} bytes. In all steps together, a rank sends up to ${times(ring)} in the ring, `
      + `and ${times(naive)} if every rank sends everything.`;
    arrows(step);
  }

  function tell(number) {
    const plan = schedule(), at = ends(plan), count = plan.steps.length, step = plan.steps[number - 1];
    if (!step) return `Before step 1 of ${count}: each rank holds its own numbers.`;
    const [sender, receiver, chunk, how] = step.moves[0];
    const size = (at[chunk + 1] - at[chunk]) * data.numberBytes;
    const does = how === "copy" ? "replaces its own chunk with it" : "adds it to its own";
    const what = how === "own" ? `all its own numbers (${size} bytes)` : `chunk ${chunk} (${size} bytes)`;
    const end = number === count ? " Done: all ranks hold the same sum." : "";
    return `Step ${number} of ${count}, ${step.phase}: all ranks send at once. Rank ${sender} sends ${what} to `
      + `rank ${receiver}, which ${does}.${answer(number)}${end}`;
  }

  // Where the asked chunk is complete first, and after which step; null where every rank sends everything.
  function ending() {
    const plan = schedule(), all = carryOut(plan, ends(plan), data.values[now.length].slice(0, now.ranks));
    if (plan.chunks === 1) return null;
    const step = all.findIndex((state) => state.held.some((row) => row[ASKED] === now.ranks));
    return { step, rank: all[step].held.findIndex((row) => row[ASKED] === now.ranks) };
  }

  function answer(number) {
    const end = ending();
    return number === end?.step ? ` Chunk ${ASKED} is now complete on rank ${end.rank}.` : "";
  }

  // Once the answer has been seen, it stays, beside any choice.
  function judge() {
    const end = ending(), guessed = now.guess !== null;
    now.seen ||= end !== null && now.step >= end.step;
    for (const one of asks.querySelectorAll("button")) one.ariaPressed = Number(one.dataset.rank) === now.guess;
    const right = now.seen && now.guess === end.rank, wrong = now.seen && guessed && !right;
    asks.classList.toggle("right", right);
    asks.classList.toggle("wrong", wrong);
    const head = right ? "✓ Right: chunk" : wrong ? `✗ Not on rank ${now.guess}: chunk` : "Chunk";
    const text = now.seen ? `${head} ${ASKED} was complete first on rank ${end.rank}, after step ${end.step}.` : "";
    asks.classList.toggle("seen", now.seen);
    if (verdict.textContent !== text) verdict.textContent = text;  // a screen reader says each change
  }

  // The question again for other ranks, and room for the longest caption, so that nothing below it ever moves.
  function fresh() {
    const end = ending(), guess = (rank) => () => { now.guess = rank; show(); };
    asks.hidden = key.querySelector(".guess").parentNode.hidden = end === null;
    asks.ariaLabel = `Where does chunk ${ASKED} end?`;
    question.replaceChildren(element("b", { textContent: `Where does chunk ${ASKED} end? ` }),
      "On which rank will its sum be complete first? Choose, then press Play.");
    asks.replaceChildren(element("div", { className: "head" }, question, verdict),
      ...Array.from({ length: now.ranks }, (_, rank) => button(`rank ${rank}`, `rank ${rank}`, guess(rank))));
    const start = ASKED % now.ranks;
    rule.textContent = `The rule: chunk ${ASKED} starts on rank ${start} and moves to the next rank in each step. Each rank adds its own `
      + `numbers, so after ${now.ranks - 1} step${now.ranks > 2 ? "s" : ""} the chunk holds all ${now.ranks} ranks' numbers.`;
    asks.querySelectorAll("button").forEach((one, rank) => { one.dataset.rank = rank; });
    room();
  }

  function room() {
    const shown = said.textContent;
    said.style.minHeight = "";
    said.removeAttribute("role");
    const heights = [0, ...schedule().steps.map((_, number) => number + 1)].map((number) => {
      said.textContent = tell(number);
      return Math.ceil(said.getBoundingClientRect().height);
    });
    said.style.minHeight = `${Math.max(...heights)}px`;
    said.textContent = shown;
    said.setAttribute("role", "status");
  }

  // Within the field, whose left and top are those of the drawing.
  function place(cell) {
    const outer = field.getBoundingClientRect(), { left, top, width, height } = cell.getBoundingClientRect();
    return { left: left - outer.left + field.scrollLeft, top: top - outer.top, width, height };
  }

  // What was sent flies from its place to the receiver's, above what the receiver had until then.
  function fly(old) {
    field.querySelectorAll(".ghost").forEach((one) => one.remove());
    const over = (cell, like, kind) => {
      const ghost = element("div", { className: `ghost ${like.className.replace(/fresh|guess/g, "")} ${kind}`, ariaHidden: "true" });
      ghost.append(...[...like.childNodes].map((one) => one.cloneNode(true)));
      const { left, top, width, height } = place(cell);
      Object.assign(ghost.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
      field.append(ghost);
      return ghost;
    };
    const moves = schedule().steps[now.step - 1].moves;
    const covers = moves.map(([, to, chunk]) => over(table.rows[to + 1].cells[chunk + 1], old[to + 1][chunk + 1], ""));
    const flights = moves.map(([from, to, chunk]) => {
      const start = table.rows[from + 1].cells[chunk + 1], end = table.rows[to + 1].cells[chunk + 1];
      const ghost = over(start, old[from + 1][chunk + 1], "flies"), down = place(end).top - place(start).top;
      const away = Math.abs(from - to) > 1 ? Math.min(30, place(start).width / 2) : 0;
      const path = [[0, 0], [away, down / 2], [0, down]].map(([x, y]) => ({ transform: `translate(${x}px, ${y}px)` }));
      return ghost.animate(path, { duration: FLIGHT, easing: "ease-in-out", fill: "forwards" });
    });
    Promise.allSettled(flights.map((one) => one.finished)).then(() => {
      for (const one of [...covers, ...flights.map((flight) => flight.effect.target)]) one.remove();
    });
  }

  function arrows(step) {
    field.querySelector("svg")?.remove();
    if (!step) return;
    const space = "http://www.w3.org/2000/svg";
    const drawing = document.createElementNS(space, "svg");
    drawing.setAttribute("aria-hidden", "true");
    drawing.setAttribute("width", field.clientWidth);
    drawing.setAttribute("height", field.clientHeight);
    drawing.innerHTML = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
      + 'orient="auto"><path d="M0 0 8 4 0 8z"/></marker>';
    step.moves.forEach(([sender, receiver, chunk], index) => {
      const from = place(table.rows[sender + 1].cells[chunk + 1]), to = place(table.rows[receiver + 1].cells[chunk + 1]);
      const down = receiver > sender;
      // Arrows keep to the gaps between rows and columns, off the numbers.
      const x = from.left + from.width / 2 + (now.way === "naive" ? (index - (now.ranks - 1) / 2) * 14 : 0);
      const y1 = from.top + (down ? from.height : 0), y2 = to.top + (down ? 0 : to.height);
      const beside = Math.abs(receiver - sender) > 1, middle = (cell) => cell.top + cell.height / 2;
      const gap = from.left - 7 - (now.way === "naive" ? 3 * index : 0);
      const path = document.createElementNS(space, "path");
      path.setAttribute("d", beside ? `M${from.left} ${middle(from)}H${gap}V${middle(to)}H${to.left - 1}` : `M${x} ${y1}L${x} ${y2}`);
      path.setAttribute("marker-end", "url(#tip)");
      drawing.append(path);
    });
    field.append(drawing);
  }

  named();
  fresh();
  show();
  // The frame around this page is as high as the page: what made the frame listens.
  new ResizeObserver(() => parent.postMessage({ lockstepHeight: Math.ceil(root.getBoundingClientRect().height) }, "*")).observe(root);
  let wide = root.clientWidth;
  addEventListener("resize", () => { if (root.clientWidth !== wide) { wide = root.clientWidth; room(); show(); } });
}
