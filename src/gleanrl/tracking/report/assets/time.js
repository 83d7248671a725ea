// --- where the time of a step goes -----------------------------------------------------------------
const PARTS = [
  ["environment", "var(--c2)"], ["prefill", "var(--c5)"], ["decode", "var(--c0)"], ["sample", "var(--c0)"], ["reward_wait", "var(--c6)"], ["logprobs", "var(--c3)"],
  ["train", "var(--c1)"], ["publish", "var(--c3)"], ["checkpoint", "var(--c6)"], ["evaluate", "var(--c4)"], ["idle", "var(--idle)"],
];
const MAX_BARS = 90;

function timeParts() {
  const found = PARTS.map(([name, colour]) => ({ name, colour, curve: curveOf(`time/${name}_s`) })).filter((part) => part.curve);
  const detailed = found.some((part) => part.name === "decode" || part.name === "prefill");
  return found.filter((part) => part.name !== "sample" || !detailed);  // sampling is prefill and decode together
}

function timeSection() {
  const parts = timeParts();
  if (!parts.length) return null;
  const steps = [...new Set(parts.flatMap((part) => part.curve.steps))].sort((a, b) => a - b);
  const lookup = parts.map((part) => new Map(part.curve.steps.map((step, i) => [step, part.curve.values[i] || 0])));
  const whole = curveOf("time/step_s");
  const total = whole ? new Map(whole.steps.map((step, i) => [step, whole.values[i] || 0])) : new Map();
  const table = steps.map((step) => {
    const values = lookup.map((values) => values.get(step) || 0);
    const rest = Math.max(0, (total.get(step) || 0) - values.reduce((a, b) => a + b, 0));
    return { step, values: [...values, rest] };
  });
  const shown = [...parts, { name: "other", colour: "var(--faint)" }];
  const sums = shown.map((_, i) => table.reduce((sum, row) => sum + row.values[i], 0));
  const all = sums.reduce((a, b) => a + b, 0) || 1;
  const entries = shown.map((part, i) => ({ ...part, share: sums[i] / all })).filter((part) => part.share >= 0.0005);
  return section("Where time goes", "Seconds of each step by what was done in them.", null,
    legend(entries.map((part) => ({ label: `${part.name.replaceAll("_", " ")} ${percent(part.share)}`, colour: part.colour }))),
    h("div", { style: "margin-top:14px" }, bars(binned(table), shown, { label: "time by step", format: duration, axis: (value) => `${number(value)} s` })));
}

function binned(table) {
  const size = Math.ceil(table.length / MAX_BARS);
  const out = [];
  for (let i = 0; i < table.length; i += size) {
    const rows = table.slice(i, i + size);
    const values = rows[0].values.map((_, part) => rows.reduce((sum, row) => sum + row.values[part], 0) / rows.length);
    out.push({ label: size === 1 ? `step ${rows[0].step}` : `steps ${rows[0].step}-${rows[rows.length - 1].step}`, step: rows[0].step, values });
  }
  return out;
}

// table: {label, step, values} of each bar, from the bottom up; parts: {name, colour} of each of its values
function bars(table, parts, { label, format, axis = format, height = 230 }) {
  const width = WIDE, left = 46, bottom = 28, top = 8;
  const high = Math.max(...table.map((row) => row.values.reduce((a, b) => a + b, 0))) || 1;
  const py = (value) => top + (1 - value / high) * (height - top - bottom);
  const slot = (width - left) / table.length, bar = Math.max(1.5, Math.min(slot - 2, 46));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(0, high, 4)) {
    svg.append(s("line", { class: "grid", x1: left, x2: width, y1: py(value), y2: py(value) }),
      s("text", { x: left - 8, y: py(value) + 4, "text-anchor": "end" }, axis(value)));
  }
  const every = Math.ceil(table.length / (NARROW ? 5 : 15));
  table.forEach((row, i) => {
    const x = left + i * slot + (slot - bar) / 2;
    const lines = parts.map((part, p) => (row.values[p] > 0 ? `${part.name}  ${format(row.values[p])}` : null)).filter(Boolean);
    const column = s("g", tipped([row.label, ...lines].join("\n")), s("rect", { x: left + i * slot, y: top, width: slot, height: height - top - bottom, fill: "transparent" }));
    let base = 0;
    row.values.forEach((value, p) => {
      if (value > 0) column.append(s("rect", { x, width: bar, y: py(base + value), height: Math.max(0, py(base) - py(base + value)), fill: parts[p].colour }));
      base += value;
    });
    svg.append(column);
    if (i % every === 0) svg.append(s("text", { x: x + bar / 2, y: height - 8, "text-anchor": "middle" }, row.step));
  });
  return svg;
}
