// --- what ran when, inside one step ----------------------------------------------------------------
const LANES = { environment: "var(--c2)", sample: "var(--c0)", prefill: "var(--c5)", decode: "var(--c0)", score: "var(--c6)", logprobs: "var(--c3)", train: "var(--c1)",
  publish: "var(--c3)", evaluate: "var(--c4)", checkpoint: "var(--c6)" };
const laneColour = (kind) => LANES[kind] || (/wait/.test(kind) ? "var(--idle)" : "var(--c3)");

function gantt() {
  if (!DATA.timeline.length) return null;
  const holder = h("div", {});
  const select = h("select", { "aria-label": "which step", onchange: (event) => show(Number(event.target.value)) },
    DATA.timeline.map((window, i) => h("option", { value: i }, window.label)));
  const show = (index) => holder.replaceChildren(h("p", { class: "small soft", style: "margin-bottom:12px" }, idleness(DATA.timeline[index])), drawWindow(DATA.timeline[index]));
  const middle = Math.floor(DATA.timeline.length / 2);
  select.value = middle;
  show(middle);
  return section("Timeline of a step", "Each bar is a span of work; what overlaps lies in rows of its own. The share is the time in which any of it went on.", select, holder);
}

function idleness({ seconds, idle, reward_wait }) {
  const waited = reward_wait > 0 ? `, ${percent(reward_wait / seconds)} while rewards were pending` : "";
  return `Device idle ${percent(idle / seconds)} of ${duration(seconds)}${waited}.`;
}

function drawWindow({ seconds, lanes }) {
  const width = WIDE, left = NARROW ? 126 : 150, right = 20, row = 15, gap = 11, top = 6;
  const px = (time) => left + (time / seconds) * (width - left - right);
  let y = top;
  const svg = s("svg", { role: "img", "aria-label": "timeline" });
  const grid = s("g", {});
  svg.append(grid);
  for (const lane of lanes) {
    const height = lane.rows * row;
    svg.append(s("text", { x: 0, y: y + height / 2 + 4, style: "fill:var(--ink);font-size:13px" }, lane.kind),
      s("text", { x: left - 14, y: y + height / 2 + 4, "text-anchor": "end" }, percent(lane.busy / seconds)));
    for (const [index, start, end, label] of lane.spans) {
      const text = [lane.kind, `${duration(end - start)} from ${duration(start)}`, label].filter(Boolean).join("\n");
      svg.append(s("rect", { x: px(start), y: y + index * row, width: Math.max(0.8, px(end) - px(start)), height: row - 2, rx: 2,
        fill: laneColour(lane.kind), ...tipped(text) }));
    }
    y += height + gap;
  }
  for (const time of ticks(0, seconds, NARROW ? 3 : 10)) {
    grid.append(s("line", { class: "grid", x1: px(time), x2: px(time), y1: top, y2: y - gap + 4 }),
      s("text", { x: px(time), y: y + 10, "text-anchor": "middle" }, duration(time)));
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${y + 16}`);
  return svg;
}
