// --- the tasks of an evaluation, each with the results of its attempts ------------------------------
const MOST_TASKS = 200;

function taskRows() {
  return DATA.evaluation.tasks.map((task) => {
    const sampled = task.attempts.filter((one) => !one.greedy), scored = sampled.filter((one) => one.score !== null);
    const mean = scored.length ? scored.reduce((sum, one) => sum + one.score, 0) / scored.length : null;
    return { ...task, sampled, mean, solved: sampled.filter((one) => one.solved).length, best: task.attempts.find((one) => one.greedy) };
  });
}

function attemptTiles() {
  const rows = taskRows(), attempts = DATA.evaluation.tasks.flatMap((task) => task.attempts);
  if (!rows.length) return null;
  const mean = (key) => { const known = attempts.map((one) => one[key]).filter((value) => value !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
  const invalid = attempts.filter((one) => one.score === null).length;
  return [tile("Tasks", number(rows.length), `${rows.filter((row) => row.solved === row.sampled.length).length} always solved, ${rows.filter((row) => !row.solved).length} never`),
    tile("Attempts", number(attempts.length), invalid ? `${invalid} without a score` : `${number(mean("turns"))} turns, ${number(mean("sampled_tokens"))} tokens, mean`)];
}

// The tasks with the lowest scores come first. A click on a task shows its attempts in the browser below.
function taskTable() {
  const rows = taskRows().sort((a, b) => (a.mean ?? -Infinity) - (b.mean ?? -Infinity));
  if (!rows.length) return null;
  const kinds = new Set(rows.map((row) => row.kind)).size > 1;
  const ends = (row) => [...new Set(row.attempts.map((one) => one.stop))].map((stop) => stop.replace("_", " ")).join(", ");
  const payload = (row) => Object.entries(row.payload).map(([name, text]) => `${name}: ${text}`).join("\n");
  const heading = (text) => h("th", { class: "r" }, text);
  const more = rows.length > MOST_TASKS ? ` The ${MOST_TASKS} with the lowest scores; evaluation.json has all.` : "";
  return section("Tasks", `Lowest mean score first. Click on a task to read its attempts.${more}`, null,
    h("div", { class: "scroll tall" }, h("table", { class: "used" },
      h("thead", {}, h("tr", {}, h("th", {}, "task"), kinds ? h("th", {}, "kind") : null, heading("solved"), heading("mean score"), heading("greedy"), h("th", { class: "gap" }, "ended"))),
      h("tbody", {}, rows.slice(0, MOST_TASKS).map((row) => h("tr", payload(row) ? tipped(payload(row)) : {},
        h("td", { class: "mono task" }, h("a", { href: "#", onclick: (event) => { event.preventDefault(); showTask(row.id); } }, row.id)), kinds ? h("td", {}, row.kind) : null,
        h("td", { class: "r num" }, `${row.solved} of ${row.sampled.length}`), h("td", { class: "r num" }, row.mean === null ? "invalid" : number(row.mean)),
        h("td", { class: "r num" }, row.best ? (row.best.score === null ? "invalid" : number(row.best.score)) : "–"), h("td", { class: "gap" }, ends(row))))))));
}
