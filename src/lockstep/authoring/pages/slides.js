// Moving through the slides. They lie below one another, so a touch screen scrolls from one to the next by itself.

"use strict";
const root = document.documentElement, slides = [...document.querySelectorAll(".slide")];
let at = 0;

function go(number) {
  at = Math.min(Math.max(number, 0), slides.length - 1);
  slides[at].scrollIntoView({ behavior: "instant" });
  history.replaceState(null, "", `#${at + 1}`);
}
function section(way) {
  let number = at + way;
  while (slides[number] && !slides[number].matches(".title, .section, .exercise")) number += way;
  go(number);
}

// A timeline that is too high becomes smaller while its words can be read; then the text does.
function lower(inner, room) {
  const svg = inner.querySelector(".tl-box svg");
  if (!svg) return;
  svg.style.maxHeight = "";
  const over = inner.getBoundingClientRect().height - room.clientHeight, high = svg.getBoundingClientRect().height;
  const word = Math.min(...[...svg.querySelectorAll("text")].map((one) => parseFloat(getComputedStyle(one).fontSize))) * svg.getScreenCTM().a;
  const least = 0.0175 * room.parentElement.clientHeight / word;
  if (over > 0 && least < 1) svg.style.maxHeight = `${parseFloat(getComputedStyle(svg).height) * Math.max(1 - over / high, least)}px`;
}

// What has little on it is larger, and what is too high then becomes smaller. Pixels in stored pictures grow with the window.
function fit() {
  root.style.setProperty("--root", parseFloat(getComputedStyle(root).fontSize));
  for (const inner of document.querySelectorAll(".fit")) {
    const room = inner.parentElement;
    let zoom = Number(inner.dataset.grow || 1);
    inner.style.zoom = zoom;
    lower(inner, room);
    const full = () => inner.getBoundingClientRect().height > room.clientHeight + 1 || (zoom > 1 && [inner, ...inner.querySelectorAll(".wide")].some((one) => one.scrollWidth > one.clientWidth + 1));
    while (zoom > 0.5 && full()) {
      inner.style.zoom = zoom = Math.round(20 * zoom - 1) / 20;
      lower(inner, room);
    }
    inner.dataset.zoom = zoom.toFixed(2);
    const drawn = [...inner.querySelectorAll(".tl-box svg")].map((svg) => svg.getScreenCTM().a);
    room.parentElement.classList.toggle("small", Math.min(zoom * 1.4, ...drawn) < 1);
  }
  slides[at].scrollIntoView({ behavior: "instant" });
}

const keys = {
  ArrowRight: () => go(at + 1), PageDown: () => go(at + 1), Enter: () => go(at + 1),
  ArrowLeft: () => go(at - 1), PageUp: () => go(at - 1), Backspace: () => go(at - 1),
  ArrowDown: () => section(1), ArrowUp: () => section(-1), Home: () => go(0), End: () => go(slides.length - 1),
  f: () => document.fullscreenElement ? document.exitFullscreen() : root.requestFullscreen(),
  t: () => theme(getComputedStyle(root).colorScheme === "dark" ? "light" : "dark"),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || (event.key === "Enter" && event.target.closest("a"))) return;
  const act = event.key === " " ? () => go(at + (event.shiftKey ? -1 : 1)) : keys[event.key] || keys[event.key.toLowerCase()];
  if (act) { event.preventDefault(); act() }
});

let touched = null;
addEventListener("touchstart", ({ touches }) => { touched = touches.length === 1 ? touches[0] : null }, { passive: true });
addEventListener("touchend", ({ changedTouches: [up] }) => {
  const [x, y] = touched ? [up.clientX - touched.clientX, up.clientY - touched.clientY] : [0, 0];
  if (Math.abs(x) > 50 && Math.abs(x) > 2 * Math.abs(y)) go(at + (x < 0 ? 1 : -1));
}, { passive: true });

function theme(name) {
  root.dataset.theme = name;
  try { localStorage.setItem("lockstep-theme", name) } catch { }
}
try { root.dataset.theme = localStorage.getItem("lockstep-theme") || "auto" } catch { }

// What is told of a slide may be a frame old: after two keys in a row, it has left the window again.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && Math.abs(entry.target.getBoundingClientRect().top) < innerHeight / 2) {
    at = slides.indexOf(entry.target);
    history.replaceState(null, "", `#${at + 1}`);
  }
}, { threshold: 0.6 });
addEventListener("hashchange", () => go((parseInt(location.hash.slice(1)) || 1) - 1));
for (const when of ["load", "resize"]) addEventListener(when, fit);
addEventListener("beforeprint", () => { root.classList.add("paper"); fit() });
addEventListener("afterprint", () => { root.classList.remove("paper"); fit() });
at = Math.min(Math.max((parseInt(location.hash.slice(1)) || 1) - 1, 0), slides.length - 1);
fit();
slides.forEach((slide) => seen.observe(slide));
