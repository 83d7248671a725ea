// --- the experience pool: how it filled, what replay did to the loss, what was replayed how often ------
const ease = (part) => (part < 0.5 ? `color-mix(in oklab, var(--c3), var(--c5) ${Math.round(200 * part)}%)`
  : `color-mix(in oklab, var(--c5), var(--c6) ${Math.round(200 * part - 100)}%)`);  // hard to easy

function experience() {
  const found = DATA.experience;
  if (!found) return null;
  const { pool, problem } = found;
  return section("Experience pool", "Past successes that can be replayed with fresh rollouts, and what replaying them did.", null,
    shelves(found.buckets), replayCards(found.share, found.extra_share),
    problem ? h("p", { class: "empty problem" }, `The pool's file cannot be shown: ${problem}`) : null,
    pool ? uses(pool) : null, pool && pool.most.length ? mostUsed(pool) : null);
}

function shelves({ labels, steps, values }) {
  if (!steps.length) return h("p", { class: "empty" }, "No step has been learned from yet.");
  const rated = labels.filter((label) => label !== "not tried");
  const parts = labels.map((label) => ({ name: label, colour: label === "not tried" ? "var(--idle)" : ease(rated.length > 1 ? rated.indexOf(label) / (rated.length - 1) : 0.5) }));
  const table = steps.map((step, i) => ({ step, values: values.map((row) => row[i]) }));
  return [h("h3", {}, "Tasks that can be replayed, by how many of their latest fresh rollouts solved them"),
    labels.length ? [legend(parts.map(({ name, colour }) => ({ label: name, colour }))),
      h("div", { style: "margin-top:14px" }, bars(binned(table), parts, { label: "tasks by solve rate", format: number, height: 200 }))]
      : h("p", { class: "empty" }, "None yet: no task was solved by some of its rollouts and failed by others.")];
}

function replayCards(share, extraShare) {
  const begun = curveOf("replay/on") || curveOf("pool/tasks");
  if (!begun) return null;
  const x = range(begun.steps);
  const line = (name, label, colour) => ({ label, colour: COLOURS[colour], curve: curveOf(name) });
  const card = (title, lines, options = {}) => {
    const series = lines.filter((one) => one.curve).map(({ label, colour, curve }) => ({ label, colour, xs: curve.steps, ys: curve.values, width: 1.9 }));
    if (!series.length) return null;
    const last = series[series.length - 1].ys.at(-1);
    return h("div", { class: "multiple" },
      h("div", { class: "name" }, h("span", { title }, title), series.length === 1 ? h("span", { class: "num" }, (options.format || number)(last)) : null),
      series.length > 1 ? legend(series.map((one) => ({ ...one, line: true }))) : null,
      (options.draw || chart)({ series, x, width: 300, height: 120, margin: { left: 50, right: 6, bottom: 22, top: 10 }, format: options.format }));
  };
  const both = (name) => [line(`loss/${name}`, "fresh", 0), line(`loss/replayed/${name}`, "replayed", 1)];
  const updates = [];  // extra updates after the step's own, on successes only
  while (curveOf(`replay_update/${updates.length}/tokens/trained`)) updates.push(updates.length);
  const extra = (name) => updates.map((i) => line(`replay_update/${i}/${name}`, `update ${i + 1}`, i % COLOURS.length));
  return h("div", { class: "multiples pool" }, [
    card("Trajectories stored", [line("pool/trajectories", "stored", 2)]),
    card("Tasks retired", [line("pool/retired", "retired", 4)]),
    card("Size of the records", [line("pool/bytes", "bytes", 5)], { format: bytes }),
    card("Replayed share of loss tokens", [{ label: "share", colour: COLOURS[1], curve: share }], { format: share100 }),
    card("Age of what is replayed, in versions", [line("replay/age_mean", "mean", 3), line("replay/age_max", "oldest", 6)]),
    card("Ratio of replayed tokens, now to recorded", [line("loss/replayed/ratio/mean", "mean", 0), line("loss/replayed/ratio/p99", "p99", 3), line("loss/replayed/ratio/max", "max", 4)], { draw: logChart }),
    card("Effective sample size, of all tokens", both("ess"), { format: share100 }),
    card("Loss a token", both("policy_per_token")),
    card("Entropy of the policy, nats", both("entropy")),
    card("Extra updates: share of trained tokens", [{ label: "share", colour: COLOURS[1], curve: extraShare }], { format: share100 }),
    card("Extra updates: tokens", extra("tokens/trained")),
    card("Extra updates: loss", extra("loss/policy")),
    card("Extra updates: ratio, now to recorded", extra("loss/replayed/ratio/mean"), { draw: logChart }),
    card("Extra updates: mean age, in versions", extra("age_mean")),
  ]);
}

const share100 = (value) => `${trim(100 * value)} %`;

function bytes(value) {
  const power = value >= 1e9 ? 3 : value >= 1e6 ? 2 : value >= 1e3 ? 1 : 0;
  return `${trim(value / 1000 ** power)} ${["B", "kB", "MB", "GB"][power]}`;
}

// Ratios differ by orders of magnitude, so the axis is logarithmic. It always includes 1, which means no change.
function logChart({ series, ...options }) {
  const logs = series.map((one) => ({ ...one, ys: one.ys.map((value) => (value > 0 ? Math.log10(value) : null)) }));
  const [low, high] = range([0, ...logs.flatMap((one) => one.ys)]);
  const y = high - low < 0.05 ? [low - 0.02, high + 0.02] : [low, high];
  let marks = [];
  for (const steps of [[1, 1.1, 1.2, 1.5, 2, 3, 5, 7], [1, 2, 5], [1]]) {
    marks = [];
    for (let power = Math.floor(y[0]); power <= y[1]; power += 1) marks.push(...steps.map((step) => power + Math.log10(step)));
    marks = marks.filter((mark) => mark >= y[0] - 1e-9 && mark <= y[1] + 1e-9);
    if (marks.length <= 5) break;
  }
  while (marks.length > 5) marks = marks.filter((_, i) => i % 2 === 0);
  return chart({ ...options, series: logs, y, marks, format: (value) => number(10 ** value) });
}

function uses({ trajectories, uses: counts }) {
  const most = Math.max(1, ...counts.map(([, count]) => count));
  return [h("h3", {}, `How often each of the ${number(trajectories)} stored trajectories was replayed`),
    h("div", { class: "uses" }, counts.map(([label, count]) => [
      h("span", { class: "num soft" }, label === "0" ? "never" : label === "1" ? "once" : `${label} times`),
      h("span", { class: "track" }, h("i", { style: `width:${(100 * count) / most}%` })),
      h("span", { class: "num" }, number(count))]))];
}

function mostUsed({ most }) {
  const heading = (text) => h("th", { class: "r" }, text);
  const cell = (value) => h("td", { class: "r num" }, value);
  return [h("h3", {}, "Replayed most often"),
    h("div", { class: "note" }, "Read one with ", h("code", {}, `gleanrl pool RUN show ID`), ", where RUN is the run's folder."),
    h("div", { class: "scroll" }, h("table", { class: "used" },
      h("thead", {}, h("tr", {}, heading("ID"), h("th", {}, "task"), heading("latest group"), heading("uses"), heading("age"), heading("entropy"), heading("reward"))),
      h("tbody", {}, most.map((one) => h("tr", {}, cell(one.key), h("td", { class: "mono task", title: one.task }, one.task),
        cell(one.retired ? `${one.solved}, retired` : one.solved), cell(one.uses), cell(one.age), cell(one.entropy === null ? "–" : one.entropy.toFixed(3)),
        cell(one.damaged ? "damaged" : number(one.reward)))))))];
}
