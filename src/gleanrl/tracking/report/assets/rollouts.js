// --- a browser of trajectories ---------------------------------------------------------------------
const HEAT_FULL = 4;  // a log-prob of -4 (p = 0.018) has the full colour
let showTask = () => {};  // shows the first attempt at a task; replaced once the browser is drawn

function rollouts() {
  const { trajectories, tokens, steps } = DATA.rollouts;
  if (!trajectories.length) return null;
  // Of a run, the last success shows what was learned; of an evaluation, the first failure shows what is missing.
  const chosen = DATA.evaluation ? trajectories.findIndex((t) => t.outcome !== "solved") : trajectories.findLastIndex((t) => t.outcome === "solved" && !t.replayed);
  const state = { step: "", outcome: "", text: "", chosen, byToken: Object.keys(tokens).length > 0 };
  const list = h("div", { class: "list" }), viewer = h("div", { class: "viewer" });
  const matches = (t) => (state.step === "" || t.step === Number(state.step)) && (state.outcome === "" || t.outcome === state.outcome || (state.outcome === "replayed" && t.replayed))
    && (!state.text || t.task.toLowerCase().includes(state.text) || t.segments.some((segment) => segment.some((turn) => turn.text.toLowerCase().includes(state.text))));
  const choose = (index) => { state.chosen = index; refresh(); };
  showTask = (id) => {
    Object.assign(state, { step: "", outcome: "", text: "" });
    for (const filter of filters.children) filter.value = "";
    choose(trajectories.findIndex((t) => t.task === id));
    viewer.scrollIntoView({ block: "center" });
  };
  const refresh = () => {
    const found = trajectories.map((_, i) => i).filter((i) => matches(trajectories[i]));
    if (!found.includes(state.chosen)) state.chosen = found.length ? found[found.length - 1] : -1;
    list.replaceChildren(...(found.length ? found.map((i) => listItem(trajectories[i], i === state.chosen, () => choose(i)))
      : [h("p", { class: "empty", style: "padding:14px" }, "No trajectory matches these filters.")]));
    viewer.replaceChildren(...(state.chosen < 0 ? [] : [view(trajectories, state, choose)]));
    viewer.scrollTop = 0;
    requestAnimationFrame(() => {  // on the first call the list is not in the page yet
      const current = list.querySelector('[aria-current="true"]');
      if (current) list.scrollTop = current.offsetTop - list.clientHeight / 2;
    });
  };
  const picker = (label, options, key) => h("select", { "aria-label": label, onchange: (event) => { state[key] = event.target.value; refresh(); } },
    h("option", { value: "" }, label), options.map((value) => h("option", { value }, key === "step" ? `step ${value}` : value)));
  const shownSteps = [...new Set(trajectories.map((t) => t.step))];
  const filters = h("div", { class: "filters" }, DATA.evaluation ? null : picker("all steps", shownSteps, "step"),
    picker("any outcome", ["solved", "failed", "invalid", "replayed"], "outcome"),
    h("input", { type: "search", placeholder: "task or text", oninput: (event) => { state.text = event.target.value.toLowerCase(); refresh(); } }));
  const scale = h("div", { class: "small soft" }, "sampled token, p = 1", h("i", { class: "scale" }), "unlikely");
  refresh();
  const all = DATA.evaluation && DATA.evaluation.tasks.reduce((sum, task) => sum + task.attempts.length, 0);
  const note = DATA.evaluation ? `${trajectories.length} of ${all} attempts.`
    : `${trajectories.length} of them, from ${shownSteps.length} of ${steps} recorded steps: whole groups, the first of each step.`;
  return section("Trajectories", note, scale, filters, h("div", { class: "browser" }, list, viewer));
}

const attemptName = (t) => (t.id.endsWith(".greedy") ? "greedy" : `sampled ${Number(t.id.split(".").at(-1)) + 1}`);

function listItem(t, current, onclick) {
  const first = t.segments.flat().find((turn) => turn.role === "user");
  return h("button", { class: "item", "aria-current": current, onclick },
    h("div", { class: "top" }, h("span", {}, h("i", { class: `dot ${t.outcome}` }), DATA.evaluation ? attemptName(t) : `step ${t.step}`, t.replayed ? " · replayed" : ""),
      h("span", { class: "num soft" }, DATA.evaluation ? (t.score === null ? "invalid" : number(t.score))
        : t.advantage === null || t.advantage === undefined ? "" : `A ${t.advantage > 0 ? "+" : ""}${number(t.advantage)}`)),
    h("div", { class: "sub" }, first ? first.text.replace(/\s+/g, " ").slice(-140).replace(/^.*(your task is)/i, "$1") : t.task));
}

function view(trajectories, state, choose) {
  const t = trajectories[state.chosen];
  const group = trajectories.map((_, i) => i).filter((i) => trajectories[i].step === t.step && trajectories[i].ticket === t.ticket && trajectories[i].task === t.task);
  const fact = (label, value) => (value === null || value === undefined || value === "" ? null : h("span", {}, `${label} `, h("b", { class: "num" }, value)));
  const task = DATA.evaluation && DATA.evaluation.tasks.find((one) => one.id === t.task);
  return h("div", {},
    h("div", { class: "facts" }, fact("task", t.task), fact("score", t.score === null ? "invalid" : number(t.score)),
      Object.entries(t.parts).map(([name, value]) => fact(name, number(value))), DATA.evaluation ? null : fact("advantage", number(t.advantage)),
      fact("ended", t.stop.replace("_", " ")), fact("sampled tokens", t.sampled), fact("version", t.version), t.explanation ? fact("because", t.explanation) : null),
    task ? h("div", { class: "facts payload" }, Object.entries(task.payload).map(([name, value]) => fact(name, value))) : null,
    group.length > 1 ? h("div", { class: "siblings" }, h("span", { class: "small soft" }, "group"), group.map((i, position) =>
      h("button", { "aria-current": i === state.chosen, onclick: () => choose(i) }, h("i", { class: `dot ${trajectories[i].outcome}` }), position + 1))) : null,
    t.segments.map((segment, i) => [
      i > 0 ? h("div", { class: "rewrite" }, `Segment ${i + 1}: the context was rewritten here.`) : null,
      segment.map((turn) => message(turn, state.byToken)),
    ]),
    t.last ? [h("div", { class: "rewrite" }, "Last observation, which the model did not see."), h("div", { class: "message" }, h("div", { class: "body" }, t.last))] : null);
}

function message(turn, byToken) {
  const sampled = turn.logprobs !== null;
  const mean = sampled && turn.logprobs.length ? turn.logprobs.reduce((a, b) => a + b, 0) / turn.logprobs.length : null;
  return h("div", { class: sampled ? "message sampled" : "message" },
    h("div", { class: "role" }, h("span", {}, turn.role), h("span", { class: "num" }, `${turn.ids.length} tokens`),
      mean === null ? null : h("span", { class: "num" }, `mean log-prob ${mean.toFixed(2)}`),
      turn.reward === null ? null : h("span", { class: "num" }, `reward ${number(turn.reward)}`)),
    h("div", { class: "body" }, byToken || sampled ? turn.ids.map((_, i) => token(turn, i, byToken)) : turn.text));
}

function token(turn, i, byToken) {
  const id = turn.ids[i], logprob = turn.logprobs ? turn.logprobs[i] : null;
  const text = byToken ? DATA.rollouts.tokens[id] ?? "" : i === 0 ? turn.text : "";
  const lines = [`${JSON.stringify(text)}   id ${id}`];
  if (turn.logprobs) lines.push(`log-prob ${logprob ?? "–"}   p ${logprob === null ? "–" : percent(Math.exp(logprob))}`, `trained, sampled by version ${turn.version}`);
  else lines.push("context, not trained");
  const heat = logprob === null ? 0 : Math.min(1, -logprob / HEAT_FULL) * 0.75;
  return h("span", { class: "token", style: heat > 0.01 ? `background:rgba(var(--heat),${heat.toFixed(3)})` : null, ...tipped(lines.join("\n")) },
    /^<.*>$/.test(text) ? h("span", { class: "mark" }, text) : text);
}
