// --- headline, learning curve, evaluation table ---------------------------------------------------
const findCurve = (curves, name) => curves.find((curve) => curve.name === name);
const curveOf = (name) => findCurve(DATA.curves, name);

function headline() {
  const f = DATA.facts;
  const steps = DATA.evaluation ? `after ${DATA.evaluation.step} steps` : `${f.steps}${f.planned_steps ? ` of ${f.planned_steps}` : ""} steps`;
  const about = [f.environment, f.model && `model ${f.model}`, f.schedule && `${f.schedule} schedule`, steps, f.seed !== null && `seed ${f.seed}`].filter(Boolean);
  return [pageHeader(DATA.evaluation ? `Evaluation of ${DATA.evaluation.evaluated}` : DATA.name, about), f.hints.map((text) => h("p", { class: "hint" }, text))];
}

function pageHeader(title, about) {
  const dark = document.documentElement.dataset.theme === "dark";
  const button = h("button", { class: "toggle", onclick: () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    button.textContent = next === "dark" ? "Light" : "Dark";
  } }, dark ? "Light" : "Dark");
  return h("header", {},
    h("div", {}, h("div", { class: "brand" }, "Glean RL"), h("h1", {}, title), h("div", { class: "sub" }, about.join("  ·  "))),
    button);
}

function tile(label, value, detail) {
  return h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: "value num" }, value), h("div", { class: "detail num" }, detail));
}

function tiles() {
  const f = DATA.facts;
  const main = [f.returns && !f.headline ? evaluationTile("Evaluation return", f.returns) : evaluationTile("Held-out success", f.headline),
    f.score ? evaluationTile("Held-out score", f.score) : null];
  if (DATA.evaluation) return h("div", { class: "tiles" }, main, attemptTiles());
  return h("div", { class: "tiles" }, main,
    tile("Training reward", f.reward ? number(f.reward[1]) : "–", f.reward ? `${number(f.reward[0])} at first` : "nothing trained yet"),
    tile("Time", duration(f.seconds), f.step_seconds === null ? "" : `${duration(f.step_seconds)} a step, median`),
    f.environment_steps !== null ? tile("Environment steps", number(f.environment_steps), "") : tile("Tokens sampled", number(f.tokens_sampled),
      [f.sampler_rate && `${number(f.sampler_rate)}/s sampling`, f.learner_rate && `${number(f.learner_rate)}/s learning`].filter(Boolean).join(", ")));
}

// The first and the last evaluation of a measure, its change, and the interval of the last.
function evaluationTile(label, line) {
  if (!line) return tile(label, "–", "not evaluated yet");
  const { unit, first, change } = line, last = line.last || first;
  const value = line.last ? [h("span", { class: "from" }, `${amount(first.value, unit)} → `), amount(last.value, unit)] : amount(last.value, unit);
  const interval = last.low !== null ? `95 % interval ${amount(last.low, unit)} to ${amount(last.high, unit)}, ` : "";
  return tile(label, value, [change === null ? "" : [h("span", { class: change >= 0 ? "good" : "bad" }, difference(change, unit)), ", "],
    interval, line.last && first.step ? `steps ${first.step} → ${last.step}` : `step ${last.step}`]);
}

function smoothed(ys) {
  let mean = null;
  return ys.map((y) => (y === null ? mean : (mean = mean === null ? y : 0.75 * mean + 0.25 * y)));
}

function learning() {
  const measures = {
    success: { held: [["eval/sampled/pass@1", "held-out, sampled", 0, true], ["eval/greedy/success", "held-out, greedy", 1, false]], training: "reward/success" },
    score: { held: [["eval/sampled/score", "held-out, sampled", 0, true], ["eval/greedy/score", "held-out, greedy", 1, false], ["eval/return", "evaluation", 0, true]], training: "reward/mean" },
  };  // two bands would hide one another: the interval of greedy attempts is in the table
  const rated = curveOf("eval/sampled/pass@1") || curveOf("eval/greedy/success") || curveOf("reward/success");
  const state = { axis: "step", measure: DATA.facts.returns || !rated ? "score" : "success" };
  const start = DATA.facts.headline && DATA.facts.headline.first;
  const references = DATA.facts.baselines.map(({ label, value }) => ({ label: `${label} ${percent(value)}`, value }));
  if (start && start.step === 0) references.push({ label: `at start ${percent(start.value)}`, value: start.value });
  const holder = h("div", {});
  const draw = () => {
    const xs = (curve) => (state.axis === "step" ? curve.steps : curve.times.map((time) => time / 60));
    const series = [], { held, training: name } = measures[state.measure];
    const training = curveOf(name);
    if (training) {
      const base = { label: "training", colour: COLOURS[2], xs: xs(training) };
      series.push({ ...base, ys: training.values, width: 1.2, faint: true }, { ...base, label: "training, smoothed", ys: smoothed(training.values), width: 1.8 });
    }
    for (const [name, label, colour, band] of held) {
      const curve = curveOf(name);
      if (curve) series.push({ label, colour: COLOURS[colour], dots: true, xs: xs(curve), ys: curve.values, low: band && curve.low, high: band && curve.high });
    }
    if (!series.length) return holder.replaceChildren(h("p", { class: "empty" }, "No reward and no evaluation has been logged yet."));
    const rates = state.measure === "success";
    const shown = rates ? references : [];
    holder.replaceChildren(
      chart({ series, references: shown, y: rates ? [0, 1] : null, height: NARROW ? 260 : 380, margin: { right: shown.length && !NARROW ? 128 : 16 },
        format: rates ? (v) => `${Math.round(1000 * v) / 10} %` : number, xLabel: state.axis === "step" ? "step" : "minute" }),
      h("div", { style: "margin-top:10px" }, legend(series.filter((one) => !one.faint).map((one) => ({ ...one, line: true })))));
  };
  draw();
  const change = (key) => (value) => { state[key] = value; draw(); };
  const notes = { returns: "Return of evaluation episodes, with 95 % intervals, and that of training episodes.",
    score: "Success or mean score on tasks that training never sees, with 95 % intervals, and on the training tasks.",
    success: "Success on tasks that training never sees, with 95 % intervals, and on the training tasks." };
  const note = notes[DATA.facts.returns ? "returns" : DATA.facts.score ? "score" : "success"];
  return section("Learning", note, h("div", { class: "controls" }, DATA.facts.score ? choice(["success", "score"], state.measure, change("measure")) : null,
    choice(["step", "minutes"], "step", change("axis"))), holder);
}

function evaluation() {
  const f = DATA.facts;
  if (!f.evaluation.length && !f.baselines.length) return null;
  const cell = (point, unit) => h("td", { class: "r num" }, !point ? "" : [amount(point.value, unit),
    point.low !== null && point.low !== undefined ? h("span", { class: "interval" }, within(point, unit)) : null]);
  const first = f.evaluation[0];
  const compared = f.evaluation.some((line) => line.last);
  const late = first && first.late_mean !== null;
  const change = (line) => (line.change === null ? "" : h("span", { class: line.change >= 0 ? "good" : "bad" }, difference(line.change, line.unit)));
  const heading = (text) => h("th", { class: "r" }, text);
  const empty = compared ? h("td") : null;
  const note = f.score ? `Success is a score of at least ${number(f.success_threshold)} (reward.success_threshold).` : null;
  return section("Evaluation on held-out tasks", note, null,
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "measure"), heading(first ? `step ${first.first.step}` : ""),
        compared ? [heading(`step ${(first.last || first.first).step}`), heading("change")] : null,
        late ? heading(`mean of steps ${first.late_steps.join(", ")}`) : null)),
      h("tbody", {},
        f.evaluation.map((line) => h("tr", {}, h("td", {}, line.label), cell(line.first, line.unit),
          compared ? [cell(line.last, line.unit), h("td", { class: "r num" }, change(line))] : null,
          late ? cell(line.late_mean === null ? null : { value: line.late_mean }, line.unit) : null)),
        f.baselines.map((line) => h("tr", { class: "soft" }, h("td", {}, `${line.label} (baseline)`), empty && empty.cloneNode(), cell(line, "rate"),
          empty && empty.cloneNode(), late ? h("td") : null))))));
}

function turnRewards() {
  const found = DATA.curves.filter(({ name }) => name.startsWith("turn_reward/"));
  if (found.length < 2) return null;
  const steps = range(found.flatMap((curve) => curve.steps)), fifth = (steps[1] - steps[0]) / 5;
  const series = [["first fifth of the steps", 4, (step) => step <= steps[0] + fifth], ["last fifth of the steps", 0, (step) => step >= steps[1] - fifth]].map(([label, colour, within]) => ({
    label, colour: COLOURS[colour], dots: true, xs: found.map(({ name }) => Number(name.split("/")[1])),
    ys: found.map((curve) => curve.values.filter((_, i) => within(curve.steps[i]))).map((values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null)),
  }));
  return section("Turn rewards", "Mean reward of a turn of the training episodes, by the number of the turn.", null,
    chart({ series, xLabel: "turn", height: 220 }), legend(series.map((one) => ({ ...one, line: true }))));
}
