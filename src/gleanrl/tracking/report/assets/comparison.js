// --- several runs side by side -----------------------------------------------------------------------
const runColour = (i) => COLOURS[i % COLOURS.length];
const comparedCurves = (name) => DATA.comparison.runs.map((run, i) => ({ run, colour: runColour(i), curve: findCurve(run.curves, name) })).filter(({ curve }) => curve);
const runLegend = () => legend(DATA.comparison.runs.map(({ name }, i) => ({ label: name, colour: runColour(i), line: true })));

function comparedHeadline() {
  const { runs, settings } = DATA.comparison;
  return pageHeader(runs.map((run) => run.name).join(" · "), [`${runs.length} runs`, settings.length === 1 ? "1 setting differs" : `${settings.length} settings differ`]);
}

// Names of the metrics of any run, in the order of the reports of single runs.
const comparedNames = () => [...new Set(DATA.comparison.runs.flatMap((run) => run.curves.map((curve) => curve.name)))];

function comparedLearning() {
  const known = comparedNames();
  if (!known.length) return null;
  const holder = h("div", {});
  const select = h("select", { "aria-label": "metric", onchange: (event) => draw(event.target.value) }, known.map((name) => h("option", { value: name }, name)));
  const draw = (name) => {
    const found = comparedCurves(name);
    const series = found.map(({ run, colour, curve }) => ({ label: run.name, colour, xs: curve.steps, ys: curve.values,
      low: found.length <= 3 ? curve.low : null, high: found.length <= 3 ? curve.high : null, dots: curve.steps.length <= 40 }));
    holder.replaceChildren(chart({ series, height: NARROW ? 260 : 380 }));
  };
  const first = ["eval/sampled/pass@1", "eval/return", "reward/mean"].find((name) => known.includes(name)) || known[0];
  select.value = first;
  draw(first);
  return section("Curves", "Bands are 95 % intervals; they are left out for more than three runs.", select, holder, h("div", { style: "margin-top:10px" }, runLegend()));
}

function comparedResults() {
  const { runs } = DATA.comparison;
  const lines = new Map();  // name of a measure -> its label and unit
  for (const run of runs) for (const { name, label, unit } of [...run.facts.evaluation, ...(run.facts.returns ? [{ ...run.facts.returns, label: "evaluation return" }] : [])]) lines.set(name, { label, unit });
  const heading = (text) => h("th", { class: "r" }, text);
  const cell = (...content) => h("td", { class: "r num" }, content);
  const measured = ({ facts }, name, unit) => {
    const line = [...facts.evaluation, facts.returns].find((one) => one && one.name === name);
    if (!line) return cell("–");
    const last = line.last || line.first;
    return cell(amount(last.value, unit), last.low !== null ? h("span", { class: "interval" }, within(last, unit)) : null);
  };
  const row = (label, value) => h("tr", {}, h("td", {}, label), runs.map((run) => cell(value(run.facts))));
  return section("Results", "The last evaluation of each run, with 95 % intervals.", null,
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, ""), runs.map((run, i) => h("th", { class: "r" }, h("i", { class: "swatch line inline", style: `background:${runColour(i)}` }), run.name)))),
      h("tbody", {}, [...lines].map(([name, { label, unit }]) => h("tr", {}, h("td", {}, label), runs.map((run) => measured(run, name, unit)))),
        row("steps", (f) => (f.planned_steps ? `${f.steps} of ${f.planned_steps}` : f.steps)),
        row("training reward, last step", (f) => number(f.reward && f.reward[1])),
        row("time in steps", (f) => duration(f.seconds)), row("median step", (f) => duration(f.step_seconds)),
        row("tokens sampled", (f) => number(f.tokens_sampled))))));
}

function comparedSettings() {
  const { runs, settings } = DATA.comparison;
  const value = (v) => (v === null ? "none" : typeof v === "object" ? JSON.stringify(v) : String(v));
  return section("Settings that differ", null, null, settings.length
    ? h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "setting"), runs.map((run) => h("th", { class: "r" }, run.name)))),
      h("tbody", {}, settings.map(([key, values]) => h("tr", {}, h("td", { class: "mono" }, key), values.map((v) => h("td", { class: "r mono" }, value(v))))))))
    : h("p", { class: "empty" }, "None."));
}

function comparedMetrics() {
  const known = comparedNames();
  if (!known.length) return null;
  return metricCards(known.map((name) => {
    const found = comparedCurves(name);
    return { name, changes: found.some(({ curve }) => curve.values.some((value) => value !== found[0].curve.values[0])), first: found[0].curve.values[0],
      card: () => h("div", { class: "multiple" }, h("div", { class: "name" }, h("span", { title: name }, name)),
        chart({ series: found.map(({ run, colour, curve }) => ({ label: run.name, colour, xs: curve.steps, ys: curve.values, width: 1.7 })), width: 300, height: 120, margin: { left: 40, right: 6, bottom: 22, top: 10 } })) };
  }), runLegend());
}
