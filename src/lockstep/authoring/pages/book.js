// What the book does by itself: theme, search, questions, marks. It opens from a file, so it fetches nothing.

"use strict";
const page = document.body.dataset.page;

const kept = {
  read(name) { try { return JSON.parse(localStorage.getItem(`lockstep-${name}`)) || {} } catch { return {} } },
  write(name, value) { try { localStorage.setItem(`lockstep-${name}`, JSON.stringify(value)) } catch { } },
  put(name, key, value) { this.write(name, { ...this.read(name), [key]: value }) },
};

// Theme: as the system, light, dark ----------------------------------------------------------------------------------

const themes = ["auto", "light", "dark"];
const button = document.querySelector(".theme");
const texts = [...document.querySelectorAll("iframe[srcdoc]")].map((frame) => frame.srcdoc);
const night = matchMedia("(prefers-color-scheme: dark)");
const system = () => night.matches ? "dark" : "light";
function paint(theme) {
  document.documentElement.dataset.theme = theme;
  // A sandboxed frame cannot see the page's theme: it is told which one to show.
  const shown = theme === "auto" ? system() : theme;
  document.querySelectorAll("iframe[srcdoc]").forEach((frame, number) => {
    const text = texts[number].replace("data-theme=auto", `data-theme=${shown}`);
    if (frame.srcdoc === text) return;
    const fresh = frame.cloneNode();  // a lazy frame that has not been loaded yet would load its old text
    fresh.srcdoc = text;
    frame.replaceWith(fresh);
  });
  button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
  button.setAttribute("aria-label", `Theme: ${theme === "auto" ? "as the system" : theme}. Change`);
}
button.addEventListener("click", () => {
  // The first press shows the other theme, the second the system's, the third follows the system again.
  const order = system() === "dark" ? ["auto", "light", "dark"] : ["auto", "dark", "light"];
  const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % order.length];
  try { localStorage.setItem("lockstep-theme", next) } catch { }
  paint(next);
});
paint(themes.includes(document.documentElement.dataset.theme) ? document.documentElement.dataset.theme : "auto");
night.addEventListener("change", () => paint(document.documentElement.dataset.theme));

// Search -------------------------------------------------------------------------------------------------------------

const box = document.querySelector(".search input"), list = document.querySelector(".found");
const titles = Object.fromEntries([...document.querySelectorAll(".chapters a")].map((a) => [a.getAttribute("href"), a.title]));
let index = null, chosen = -1;

function load() {
  return index ||= new Promise((done) => {
    const script = document.createElement("script");
    script.src = "assets/search.js";
    script.onload = () => done(window.lockstepSearch.map(([file, anchor, title, text]) =>
      ({ file, anchor, title, text, lower: text.toLowerCase(), name: title.toLowerCase() })));
    document.head.append(script);
  });
}

function find(places, question) {
  const terms = question.toLowerCase().split(/\s+/).filter(Boolean);
  const scored = [];
  for (const place of places) {
    let score = 0;
    for (const term of terms) {
      const times = place.lower.split(term).length - 1, inTitle = place.name.includes(term);
      if (!times && !inTitle) { score = 0; break }
      score += Math.min(times, 5) + (inTitle ? 20 : 0) + (place.name === term ? 20 : 0);
    }
    if (score) scored.push([score + (place.lower.includes(question.toLowerCase()) ? 5 : 0), place]);
  }
  return { terms, places: scored.sort((a, b) => b[0] - a[0]).slice(0, 12).map(([, place]) => place), of: scored.length };
}

function marked(text, terms) {
  const fragment = document.createDocumentFragment();
  const escaped = terms.map((term) => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  for (const piece of text.split(new RegExp(`(${escaped.join("|")})`, "i"))) {
    if (terms.includes(piece.toLowerCase())) {
      const mark = document.createElement("mark");
      mark.textContent = piece;
      fragment.append(mark);
    } else fragment.append(piece);
  }
  return fragment;
}

async function search() {
  const question = box.value.trim();
  chosen = -1;
  if (question.length < 2) { list.hidden = true; return }
  const found = find(await load(), question);
  if (question !== box.value.trim()) return;
  list.replaceChildren(...found.places.map((place) => {
    const link = document.createElement("a"), name = document.createElement("b"), note = document.createElement("small");
    link.href = `${place.file}.html#${place.anchor}`;
    link.setAttribute("role", "option");
    name.append(marked(place.title, found.terms));
    const at = Math.max(0, place.lower.indexOf(found.terms.find((term) => place.lower.includes(term)) ?? "") - 50);
    note.append(`${titles[`${place.file}.html`]} · ${at ? "…" : ""}`, marked(place.text.slice(at, at + 150), found.terms), "…");
    link.append(name, note);
    return link;
  }));
  if (!found.places.length) {
    const none = document.createElement("p");
    none.textContent = `Nothing here says “${question}”.`;
    list.append(none);
  }
  list.hidden = false;
}

box.addEventListener("focus", load, { once: true });
box.addEventListener("input", search);
box.addEventListener("keydown", (event) => {
  const links = [...list.querySelectorAll("a")];
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    if (!links.length) return;
    chosen = (chosen + (event.key === "ArrowDown" ? 1 : links.length - (chosen < 0 ? 0 : 1))) % links.length;
    links.forEach((link, number) => link.setAttribute("aria-selected", number === chosen));
    links[chosen].scrollIntoView({ block: "nearest" });
  } else if (event.key === "Enter" && links.length) links[Math.max(chosen, 0)].click();
  else if (event.key === "Escape") { list.hidden = true; box.blur() }
});
list.addEventListener("click", () => { list.hidden = true });
document.addEventListener("click", (event) => { if (!event.target.closest(".search")) list.hidden = true });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) { event.preventDefault(); box.focus() }
});

// In the contents, a question that has been answered rightly is ticked.
function ticked() {
  const answers = kept.read("quizzes");
  for (const mark of document.querySelectorAll(".places .mark[data-keys]")) {
    const right = mark.dataset.keys.split(" ").every((key) => answers[key] === "right");
    mark.textContent = right ? "✓" : "?";
    mark.title = right ? "answered" : "with a question";
    mark.classList.toggle("right", right);
  }
}
ticked();

// Questions: a list becomes buttons; what is behind them is decoded only when one is pressed ---------------------------

for (const quiz of document.querySelectorAll(".quiz")) {
  const key = quiz.dataset.key, feedback = quiz.querySelector(".feedback");
  const buttons = [...quiz.querySelectorAll(".choices li")].map((item) => {
    const made = document.createElement("button");
    made.type = "button";
    made.setAttribute("aria-pressed", false);
    made.append(...item.childNodes);
    item.append(made);
    return made;
  });
  const choose = (number) => {
    const pressed = buttons[number];
    const bytes = Uint8Array.from(atob(quiz.dataset.sealed), (letter) => letter.charCodeAt(0));
    const [right, because] = JSON.parse(new TextDecoder().decode(bytes))[number];
    buttons.forEach((one) => { one.setAttribute("aria-pressed", one === pressed); one.className = "" });
    pressed.className = right ? "right" : "wrong";
    feedback.innerHTML = `<b class="${pressed.className}">${right ? "Right." : "Not quite."}</b> ${because}`;
    return right;
  };
  buttons.forEach((pressed, number) => pressed.addEventListener("click", () => {
    const right = choose(number);
    kept.put("choices", key, number);
    if (right || kept.read("quizzes")[key] !== "right") kept.put("quizzes", key, right ? "right" : "wrong");
    ticked();
  }));
  const before = kept.read("choices")[key];
  if (buttons[before]) choose(before);
  else if (kept.read("quizzes")[key] === "right") feedback.textContent = "You have answered this one before.";
}

// What has been read, and where one is ---------------------------------------------------------------------------------

const read = document.querySelector(".read input");
if (read) {
  read.checked = Boolean(kept.read("chapters")[page]);
  read.addEventListener("change", () => kept.put("chapters", page, read.checked));
}
for (const item of document.querySelectorAll(".map > li")) {
  if (kept.read("chapters")[item.dataset.chapter]) {
    item.classList.add("done");
    item.querySelector(".number").title = "read";
  }
}

const start = document.querySelector(".start");
if (start) {
  const chapters = [...document.querySelectorAll(".map > li")];
  const begun = Object.keys({ ...kept.read("chapters"), ...kept.read("quizzes") }).map((key) => key.split("/")[0]);
  const at = Math.max(...chapters.map((one, number) => begun.includes(one.dataset.chapter) ? number : -1));
  const next = chapters.slice(Math.max(at, 0)).find((one) => !one.classList.contains("done"))?.querySelector("h2 a");
  if (at >= 0 && next) [start.textContent, start.href] = [`Continue: ${next.textContent}`, next.href];
}

const links = [...document.querySelectorAll(".places a")];
const headings = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));
function here() {
  let last = -1;
  headings.forEach((heading, number) => { if (heading.getBoundingClientRect().top < 120) last = number });
  links.forEach((link, number) => link.parentElement.classList.toggle("here", number === last));
}
if (links.length) {
  addEventListener("scroll", here, { passive: true });
  here();
  if (matchMedia("(max-width: 74rem)").matches) document.querySelector(".places details").open = false;
}

// A place inside something folded is unfolded; on paper all of it is --------------------------------------------------

function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
}
addEventListener("hashchange", unfold);
unfold();
// Newer browsers print what is folded as the style sheet says; older ones need it unfolded, and folded again afterward.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("main details:not([open])")];
  folded.forEach((one) => { one.open = true });
});
addEventListener("afterprint", () => folded.forEach((one) => { one.open = false }));
// What is wider than its place can be scrolled, also with the keyboard, and fades where it goes on.
for (const one of document.querySelectorAll("pre, .wide, main p:has(> img)")) {
  const more = () => {
    one.classList.toggle("more", one.scrollLeft + one.clientWidth < one.scrollWidth - 1);
    if (one.scrollWidth > one.clientWidth && !one.querySelector("[tabindex]")) one.tabIndex = 0;
  };
  one.addEventListener("scroll", more, { passive: true });
  for (const event of ["load", "resize"]) addEventListener(event, more);
}
