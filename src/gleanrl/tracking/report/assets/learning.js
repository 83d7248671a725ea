// --- headline, learning curve, evaluation table ---------------------------------------------------
const curveOf = (name) => DATA.curves.find((curve) => curve.name === name);

function headline() {
  const f = DATA.facts;
  const about = [f.environment, f.model && `model ${f.model}`, f.schedule && `${f.schedule} schedule`,
    `${f.steps}${f.planned_steps ? ` of ${f.planned_steps}` : ""} steps`, f.seed !== null && `seed ${f.seed}`].filter(Boolean);
  const dark = document.documentElement.dataset.theme === "dark";
  const button = h("button", { class: "toggle", onclick: () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    button.textContent = next === "dark" ? "Light" : "Dark";
  } }, dark ? "Light" : "Dark");
  return h("header", {},
    h("div", {}, h("div", { class: "brand" }, "Glean RL"), h("h1", {}, DATA.name), h("div", { class: "sub" }, about.join("  ·  "))),
    button);
}

function tiles() {
  const f = DATA.facts;
  const tile = (label, value, detail) =>
    h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: "value num" }, value), h("div", { class: "detail num" }, detail));
  return h("div", { class: "tiles" }, successTile(tile),
    tile("Training reward", f.reward ? number(f.reward[1]) : "–", f.reward ? `${number(f.reward[0])} at first` : "nothing trained yet"),
    tile("Time", duration(f.seconds), f.step_seconds === null ? "" : `${duration(f.step_seconds)} a step, median`),
    f.environment_steps !== null ? tile("Environment steps", number(f.environment_steps), "") : tile("Tokens sampled", number(f.tokens_sampled),
      [f.sampler_rate && `${number(f.sampler_rate)}/s sampling`, f.learner_rate && `${number(f.learner_rate)}/s learning`].filter(Boolean).join(", ")));
}

function returnTile(tile, { before, after }) {
  const last = after || before;
  const interval = last.low !== null ? `95 % interval ${number(last.low)} to ${number(last.high)}, ` : "";
  const value = after ? [h("span", { class: "from" }, `${number(before.value)} → `), number(last.value)] : number(last.value);
  return tile("Evaluation return", value, `${interval}step ${last.step}`);
}

function successTile(tile) {
  const head = DATA.facts.headline;
  if (!head && DATA.facts.returns) return returnTile(tile, DATA.facts.returns);
  if (!head) return tile("Held-out success", "–", "not evaluated yet");
  const last = head.after || head.before;
  const interval = last.low !== null ? `95 % interval ${percent(last.low)} to ${percent(last.high)}, ` : "";
  const value = head.after
    ? [h("span", { class: "from" }, `${percent(head.before.value)} → `), percent(last.value)]
    : percent(last.value);
  const change = head.change === null ? "" : h("span", { class: head.change >= 0 ? "good" : "bad" }, points(head.change));
  return tile("Held-out success", value, [change, change ? ", " : "", interval, `step ${last.step}`]);
}

function smoothed(ys) {
  let mean = null;
  return ys.map((y) => (y === null ? mean : (mean = mean === null ? y : 0.75 * mean + 0.25 * y)));
}

function learning() {
  const wanted = [
    ["eval/sampled/pass@1", "held-out, sampled", COLOURS[0], "band"],
    ["eval/greedy/success", "held-out, greedy", COLOURS[1], null],  // its interval is in the table: two bands hide one another
    ["eval/return", "evaluation", COLOURS[0], "band"],
  ];
  const training = curveOf("reward/success") || curveOf("reward/mean");
  const references = DATA.facts.baselines.map(({ label, value }) => ({ label: `${label} ${percent(value)}`, value }));
  const start = DATA.facts.headline && DATA.facts.headline.before;
  if (start && start.step === 0 && !references.some((one) => one.label.startsWith("warm start"))) {
    references.push({ label: `at start ${percent(start.value)}`, value: start.value });
  }
  const holder = h("div", {});
  const draw = (axis) => {
    const xs = (curve) => (axis === "step" ? curve.steps : curve.times.map((time) => time / 60));
    const series = [];
    if (training) {
      const base = { label: "training", colour: COLOURS[2], xs: xs(training) };
      series.push({ ...base, ys: training.values, width: 1.2, faint: true }, { ...base, label: "training, smoothed", ys: smoothed(training.values), width: 1.8 });
    }
    for (const [name, label, colour, band] of wanted) {
      const curve = curveOf(name);
      if (curve) series.push({ label, colour, dots: true, xs: xs(curve), ys: curve.values, low: band && curve.low, high: band && curve.high });
    }
    if (!series.length) return holder.replaceChildren(h("p", { class: "empty" }, "No reward and no evaluation has been logged yet."));
    const values = series.flatMap((one) => one.ys).filter((value) => value !== null);
    const isRate = Math.min(...values) >= 0 && Math.max(...values) <= 1;
    holder.replaceChildren(
      chart({ series, references: isRate ? references : [], y: isRate ? [0, 1] : null, height: 380, margin: { right: isRate && references.length ? 128 : 16 },
        format: isRate ? (v) => `${Math.round(1000 * v) / 10} %` : number, xLabel: axis === "step" ? "step" : "minute" }),
      h("div", { style: "margin-top:10px" }, legend(series.filter((one) => !one.faint).map((one) => ({ ...one, line: true })))));
  };
  draw("step");
  const note = DATA.facts.returns ? "Return of evaluation episodes, with 95 % intervals, and that of training episodes." : "Success on tasks that training never sees, with 95 % intervals, and on the training tasks.";
  return section("Learning", note, choice(["step", "minutes"], "step", (axis) => draw(axis)), holder);
}

function evaluation() {
  const f = DATA.facts;
  if (!f.evaluation.length && !f.baselines.length) return null;
  const cell = (point) => h("td", { class: "r num" }, !point ? "" : [percent(point.value),
    point.low !== null && point.low !== undefined ? h("span", { class: "interval" }, `[${(100 * point.low).toFixed(1)}, ${(100 * point.high).toFixed(1)}]`) : null]);
  const first = f.evaluation[0];
  const late = first && first.late_mean !== null;
  const change = (line) => (line.change === null ? "" : h("span", { class: line.change >= 0 ? "good" : "bad" }, points(line.change)));
  const heading = (text) => h("th", { class: "r" }, text);
  return section("Evaluation on held-out tasks", null, null,
    h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "measure"), heading(first ? `step ${first.before.step}` : ""),
        heading(first && first.after ? `step ${first.after.step}` : ""), heading("change"),
        late ? heading(`mean of steps ${first.late_steps.join(", ")}`) : null)),
      h("tbody", {},
        f.evaluation.map((line) => h("tr", {}, h("td", {}, line.label), cell(line.before), cell(line.after),
          h("td", { class: "r num" }, change(line)), late ? cell(line.late_mean === null ? null : { value: line.late_mean }) : null)),
        f.baselines.map((line) => h("tr", { class: "soft" }, h("td", {}, `${line.label} (baseline)`), h("td"), cell(line), h("td"), late ? h("td") : null)))));
}
