// --- elements, numbers, and the one tooltip -------------------------------------------------------
const DATA = JSON.parse(document.getElementById("payload").textContent);
const NARROW = document.documentElement.clientWidth <= 820;  // as in report.css
const WIDE = Math.max(280, Math.min(1080, document.documentElement.clientWidth - (NARROW ? 64 : 100)));  // pixels inside a section
const COLOURS = [0, 1, 2, 3, 4, 5, 6].map((i) => `var(--c${i})`);

function make(space, tag, attributes, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const h = (tag, attributes, ...children) => make(null, tag, attributes, children);
const s = (tag, attributes, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)} G`;
  if (size >= 1e6) return `${trim(value / 1e6)} M`;
  if (size >= 1e4) return `${trim(value / 1e3)} k`;
  if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return trim(value);
}
const trim = (value) => String(Number(value.toPrecision(3)));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value >= 0.9995 ? 0 : 1)} %`);
// A line of the evaluation is a success rate or, in the unit "score", a mean score.
const amount = (value, unit) => (unit === "rate" ? percent(value) : number(value));
const difference = (value, unit) => `${value < 0 ? "−" : "+"}${unit === "rate" ? `${Math.abs(100 * value).toFixed(1)} points` : number(Math.abs(value))}`;
const within = ({ low, high }, unit) => (unit === "rate" ? `[${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}]` : `[${number(low)}, ${number(high)}]`);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const tip = h("div", { id: "tip", role: "status" });
function showTip(event, text) {
  tip.textContent = text;
  tip.className = "on";
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 6))}px`;
}
const hideTip = () => { tip.className = ""; };
const tipped = (text) => ({ onmousemove: (event) => showTip(event, text), onmouseleave: hideTip });

function section(title, note, ...content) {
  const [controls, ...rest] = content;
  return h("section", {},
    h("div", { class: "head" }, h("div", {}, h("h2", {}, title), note ? h("div", { class: "note" }, note) : null), controls),
    rest);
}

function choice(options, chosen, choose) {
  const box = h("div", { class: "seg", role: "group" });
  for (const option of options) {
    box.append(h("button", { "aria-pressed": option === chosen, onclick: (event) => {
      for (const button of box.children) button.setAttribute("aria-pressed", button === event.currentTarget);
      choose(option);
    } }, option));
  }
  return box;
}

function legend(entries) {
  return h("div", { class: "legend" }, entries.map(({ label, colour, line }) =>
    h("span", {}, h("i", { class: line ? "swatch line" : "swatch", style: `background:${colour}` }), label)));
}
