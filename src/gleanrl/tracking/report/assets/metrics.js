// --- every metric, small ---------------------------------------------------------------------------
const FIRST_SHOWN = 12;

function metrics() {
  const colours = new Map();  // one for each kind of metric: reward, loss, time, ...
  for (const { name } of DATA.curves) if (!colours.has(kindOf(name))) colours.set(kindOf(name), COLOURS[colours.size % COLOURS.length]);
  return metricCards(DATA.curves.map((curve) => ({ name: curve.name, changes: new Set(curve.values).size > 1, first: curve.values[0],
    card: () => multiple(curve, colours.get(kindOf(curve.name))) })));
}

// entries: {name, changes, first, card} of each metric; card() draws it, and first is the value of one that never changes
function metricCards(entries, key = null) {
  const grid = h("div", {});
  const state = { query: "", all: false };
  const show = () => {
    const found = entries.filter((entry) => entry.name.toLowerCase().includes(state.query));
    const moving = found.filter((entry) => entry.changes), constant = found.filter((entry) => !entry.changes);
    const whole = state.all || state.query || moving.length <= FIRST_SHOWN;
    const more = h("button", { class: "toggle", style: "margin-top:14px", onclick: () => { state.all = true; show(); } }, `Show all ${found.length} metrics`);
    grid.replaceChildren(
      h("div", { class: "multiples" }, (whole ? moving : moving.slice(0, FIRST_SHOWN)).map((entry) => entry.card())),
      !whole ? more : constant.length ? h("div", { class: "constant" }, h("h3", {}, "Never changed"),
        constant.map((entry) => h("code", {}, `${entry.name} ${number(entry.first)}`))) : "");
  };
  show();
  const search = h("input", { type: "search", placeholder: "find a metric", oninput: (event) => { state.query = event.target.value.trim().toLowerCase(); show(); } });
  return section("Metrics", key, search, grid);
}

const kindOf = (name) => name.split("/")[0];

function multiple(curve, colour) {
  const last = curve.values[curve.values.length - 1];
  const series = [{ label: curve.name, colour, xs: curve.steps, ys: curve.values, low: curve.low, high: curve.high, width: 1.9 }];
  return h("div", { class: "multiple" },
    h("div", { class: "name" }, h("span", { title: curve.name }, curve.name), h("span", { class: "num" }, number(last))),
    chart({ series, width: 300, height: 120, margin: { left: 40, right: 6, bottom: 22, top: 10 } }));
}
