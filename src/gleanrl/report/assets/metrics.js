// --- every metric, small ---------------------------------------------------------------------------
const TITLES = { reward: "Reward", loss: "Loss", learner: "Learner", ratio: "Ratios", sampler: "Sampler", staleness: "Staleness", groups: "Groups",
  episode: "Episodes", stop: "How episodes ended", tokens: "Tokens", time: "Time", eval: "Evaluation" };

function metrics() {
  const grid = h("div", {});
  const show = (query) => {
    const found = DATA.curves.filter((curve) => curve.name.includes(query.trim().toLowerCase()));
    const varies = (curve) => new Set(curve.values).size > 1;
    const groups = new Map();
    for (const curve of found.filter(varies)) {
      const key = curve.name.split("/")[0];
      groups.set(key, [...(groups.get(key) || []), curve]);
    }
    const order = Object.keys(TITLES);
    const place = (key) => (order.includes(key) ? order.indexOf(key) : order.length);
    const constant = found.filter((curve) => !varies(curve));
    grid.replaceChildren(
      ...[...groups].sort(([a], [b]) => place(a) - place(b)).flatMap(([key, curves]) =>
        [h("h3", {}, TITLES[key] || key), h("div", { class: "multiples" }, curves.map(multiple))]),
      constant.length ? h("div", { class: "constant" }, h("h3", {}, "Never changed"),
        constant.map((curve) => h("code", {}, `${curve.name} ${number(curve.values[0])}`))) : "");
  };
  show("");
  const search = h("input", { type: "search", placeholder: "find a metric", oninput: (event) => show(event.target.value) });
  return section("Metrics", null, search, grid);
}

function multiple(curve, index) {
  const label = curve.name.slice(curve.name.indexOf("/") + 1);
  const last = curve.values[curve.values.length - 1];
  const series = [{ label, colour: COLOURS[index % COLOURS.length], xs: curve.steps, ys: curve.values, low: curve.low, high: curve.high, width: 1.9 }];
  return h("div", { class: "multiple" },
    h("div", { class: "name" }, h("span", { title: curve.name }, label), h("span", { class: "num" }, number(last))),
    chart({ series, width: 300, height: 120, margin: { left: 40, right: 6, bottom: 22, top: 10 } }));
}
