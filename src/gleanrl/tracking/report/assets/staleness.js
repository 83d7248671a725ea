// --- ages of the trained data: over the run, and step by step --------------------------------------------
function staleness() {
  const found = DATA.staleness;
  if (!found) return null;
  const { bound, labels } = found;
  const plural = (label) => `${label} ${label === "1" ? "step" : "steps"}`;
  const parts = labels.map((label, i) => ({ name: `${plural(label)} old`, colour: ease(labels.length > 1 ? i / (labels.length - 1) : 0) }));
  const table = found.steps.map((step, i) => ({ step, values: found.by_step.map((row) => row[i]) }));
  const note = `Steps between sampling and learning, counted when a group is learned from${bound === null ? "" : `; the schedule allows ${bound}`}.`;
  return section("Staleness", note, null,
    h("div", { class: "halves" },
      h("div", {}, h("h3", {}, "Over the whole run"), ageTable(found, parts, plural)),
      h("div", {}, h("h3", {}, "Step by step"), ageCurve(bound))),
    h("h3", {}, "Groups of each step by age"),
    legend(parts.map(({ name, colour }) => ({ label: name, colour }))),
    h("div", { style: "margin-top:14px" }, bars(binned(table), parts, { label: "groups by age", format: number, height: 180 })));
}

function ageTable({ labels, groups, tokens }, parts, plural) {
  const all = (counts) => counts.reduce((a, b) => a + b, 0) || 1;
  const [group, token] = [all(groups), all(tokens)];
  const most = Math.max(1, ...groups);
  const share = (count, whole) => (count ? `${trim((100 * count) / whole)} %` : "–");
  return h("div", { class: "uses ages" },
    ["age", "", "groups", "", "tokens"].map((text) => h("span", { class: "soft" }, text)),
    labels.map((label, i) => [
      h("span", { class: "num soft" }, plural(label)),
      h("span", { class: "track" }, h("i", { style: `width:${(100 * groups[i]) / most}%;background:${parts[i].colour}` })),
      h("span", { class: "num" }, number(groups[i])), h("span", { class: "num soft" }, share(groups[i], group)),
      h("span", { class: "num soft" }, share(tokens[i], token))]));
}

function ageCurve(bound) {
  const lines = [["schedule/staleness_max", "oldest group", 4], ["schedule/staleness_mean", "mean of the groups", 0]];
  const series = lines.map(([name, label, colour]) => [curveOf(name), label, colour]).filter(([curve]) => curve)
    .map(([curve, label, colour]) => ({ label, colour: COLOURS[colour], xs: curve.steps, ys: curve.values, width: 1.9 }));
  if (!series.length) return null;
  const top = Math.max(1, bound || 0, ...series.flatMap((one) => one.ys));
  return [chart({ series, y: [0, 1.06 * top], width: Math.min(520, WIDE), height: 199, references: bound === null ? [] : [{ value: bound, label: "bound" }], margin: { left: 34, right: bound === null ? 8 : 48 } }),
    h("div", { style: "margin-top:8px" }, legend(series.map((one) => ({ ...one, line: true }))))];
}
