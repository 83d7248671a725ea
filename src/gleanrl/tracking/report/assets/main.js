// --- configuration, and the page itself --------------------------------------------------------------
function configuration() {
  const sections = Object.entries(DATA.config);
  if (!sections.length) return null;
  const value = (v) => (typeof v === "object" ? JSON.stringify(v) : String(v));
  const group = (name, values) => h("div", { class: "group" }, h("b", {}, name), Object.entries(values).map(([key, v]) =>
    h("div", { class: "row" }, h("span", { class: "soft" }, key), h("span", { class: "mono" }, value(v)))));
  const tables = sections.filter(([, v]) => typeof v === "object" && !Array.isArray(v));
  const loose = Object.fromEntries(sections.filter(([, v]) => typeof v !== "object" || Array.isArray(v)));
  return section("Configuration", `As resolved when the ${DATA.evaluation ? "evaluation" : "run"} started.`, null,
    h("div", { class: "config" }, Object.keys(loose).length ? group("top level", loose) : null, tables.map(([name, values]) => group(name, values))));
}

window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
const parts = DATA.comparison ? [comparedHeadline, comparedLearning, comparedResults, comparedSettings, comparedMetrics]
  : DATA.evaluation ? [headline, tiles, evaluation, taskTable, rollouts, configuration]
    : [headline, tiles, learning, turnRewards, evaluation, timeSection, staleness, experience, metrics, gantt, rollouts, configuration];
document.getElementById("page").append(...parts.map((part) => part()).flat(Infinity).filter(Boolean),
  h("footer", {}, `Made by Glean RL ${DATA.version} from the files of the ${DATA.comparison ? "run folders" : "run folder"} alone.`));
document.body.append(tip);
document.documentElement.dataset.ready = "true";
