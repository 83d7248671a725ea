// --- one line chart for everything: curves with intervals, reference lines, a crosshair ------------
function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const best = [1, 2, 5, 10].map((factor) => factor * step).find((size) => (high - low) / size <= count);
  const out = [];
  for (let value = Math.ceil(low / best - 1e-9) * best; value <= high + best * 1e-9; value += best) out.push(Number(value.toPrecision(12)));
  return out;
}

// One number of decimals for all marks of an axis: enough to tell neighbours apart.
function evenly(marks) {
  const step = marks.length > 1 ? marks[1] - marks[0] : 1;
  const top = Math.max(...marks.map(Math.abs));
  if (top >= 1e4 || (top < 0.001 && top > 0)) return number;
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return (value) => value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function range(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  let low = Math.min(...known), high = Math.max(...known);
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  return [low, high];
}

const path = (xs, ys) => {
  let pen = "M";
  return xs.map((x, i) => {
    if (ys[i] === null) { pen = "M"; return ""; }
    const out = `${pen}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
    pen = "L";
    return out;
  }).join("");
};

// series: {label, colour, xs, ys, low, high, width, dots, dash, faint}; references: {label, value}; marks: values of the y axis
function chart({ series, references = [], width = WIDE, height = NARROW ? 260 : 330, x = null, y = null, marks: chosen = null, format = number, xFormat = number, xLabel = "step", margin = {} }) {
  const m = { top: 10, right: 16, bottom: 30, left: 46, ...margin };
  const [x0, x1] = x || range(series.flatMap((one) => one.xs));
  const [y0, y1] = y || range(series.flatMap((one) => [...one.ys, ...(one.low || []), ...(one.high || [])]));
  const px = (x) => m.left + ((x - x0) / (x1 - x0)) * (width - m.left - m.right);
  const py = (v) => (v === null || v === undefined ? null : m.top + (1 - (v - y0) / (y1 - y0)) * (height - m.top - m.bottom));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": series.map((one) => one.label).join(", ") });
  const small = height < 200;
  const marks = chosen || ticks(y0, y1, small ? 4 : 6);
  const axis = format === number ? evenly(marks) : format;
  for (const value of marks) {
    svg.append(s("line", { class: "grid", x1: m.left, x2: width - m.right, y1: py(value), y2: py(value) }),
      s("text", { x: m.left - 8, y: py(value) + 4, "text-anchor": "end" }, axis(value)));
  }
  for (const value of ticks(x0, x1, small || NARROW ? 4 : 10).filter((tick) => xLabel !== "step" || Number.isInteger(tick))) {
    svg.append(s("text", { x: px(value), y: height - m.bottom + 18, "text-anchor": "middle" }, xFormat(value)));
  }
  drawReferences(svg, references, py, m, width);
  for (const one of series) drawSeries(svg, one, px, py);
  addCrosshair(svg, { series, px, py, m, width, height, format, xFormat, xLabel });
  return svg;
}

function drawReferences(svg, references, py, m, width) {
  let free = Infinity;  // labels are placed from the bottom up and do not overlap
  for (const { label, value } of [...references].sort((a, b) => a.value - b.value)) {
    const at = py(value), text = Math.min(at + 4, free - 14);
    free = text;
    const place = NARROW ? { x: width - m.right, y: text - 8, "text-anchor": "end" } : { x: width - m.right + 8, y: text };
    svg.append(s("line", { class: "reference", x1: m.left, x2: width - m.right, y1: at, y2: at }), s("text", place, label));
  }
}

function drawSeries(svg, one, px, py) {
  const xs = one.xs.map(px), ys = one.ys.map(py);
  if (one.low && one.high) {
    const known = xs.map((_, i) => i).filter((i) => one.low[i] !== null && one.high[i] !== null);
    const edge = [...known.map((i) => `${xs[i].toFixed(1)} ${py(one.high[i]).toFixed(1)}`),
      ...known.reverse().map((i) => `${xs[i].toFixed(1)} ${py(one.low[i]).toFixed(1)}`)];
    if (edge.length) svg.append(s("path", { d: `M${edge.join("L")}Z`, fill: one.colour, opacity: 0.14 }));
  }
  svg.append(s("path", { class: "curve", d: path(xs, ys), stroke: one.colour, "stroke-dasharray": one.dash,
    opacity: one.faint ? 0.3 : 1, style: one.width ? `stroke-width:${one.width}` : null }));
  if (one.dots || one.xs.length === 1) {
    xs.forEach((x, i) => { if (ys[i] !== null) svg.append(s("circle", { cx: x, cy: ys[i], r: 3.2, fill: one.colour })); });
  }
}

function addCrosshair(svg, { series, px, py, m, width, height, format, xFormat, xLabel }) {
  const named = series.filter((one) => !one.faint);
  const all = [...new Set(named.flatMap((one) => one.xs))].sort((a, b) => a - b);
  const line = s("line", { class: "cross", y1: m.top, y2: height - m.bottom, visibility: "hidden" });
  const area = s("rect", { x: m.left, y: 0, width: width - m.left - m.right, height: height, fill: "transparent" });
  area.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const x = all.reduce((best, value) => (Math.abs(px(value) - at) < Math.abs(px(best) - at) ? value : best), all[0]);
    line.setAttribute("x1", px(x));
    line.setAttribute("x2", px(x));
    line.setAttribute("visibility", "visible");
    const rows = named.map((one) => {
      const i = one.xs.indexOf(x);
      if (i < 0 || one.ys[i] === null) return null;
      const interval = one.low && one.low[i] !== null ? `  [${format(one.low[i])}, ${format(one.high[i])}]` : "";
      return `${one.label}  ${format(one.ys[i])}${interval}`;
    }).filter(Boolean);
    showTip(event, [`${xLabel} ${xFormat(x)}`, ...rows].join("\n"));
  });
  area.addEventListener("mouseleave", () => { line.setAttribute("visibility", "hidden"); hideTip(); });
  svg.append(line, area);
}
