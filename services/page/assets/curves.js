/** The numbers of one run over steps or time, with what happened meanwhile. */

import { duration, entries, h, list, panel, renew, share, short, table } from "/assets/dom.js";
import { address, json, series } from "/assets/data.js";
import { Chart, Group } from "/assets/chart.js";
import { controls, keys } from "/assets/controls.js";
import { byOpponent } from "/assets/league.js";

const EVERY_MS = 5000;
const MOST_CHARTS = 60;
const WIN_RATE = "Self-play/Win Rate";
const LESSONS = "Environment/Lesson Number/";
const PROBABLE = 1.96;
/** Columns that other charts or views show. */
const APART = ["reward_deviation", "episodes", "produced", "updates", "open_episodes", ...["Cumulative Reward", "Episode Length", "Group Cumulative Reward"].map((name) => `Environment/${name}`)];

export class Curves {
  /** @param {string} run */
  constructor(run) {
    this.run = run;
    this.group = new Group(() => this.later(200));
    this.heading = h("h1", {}, run);
    this.facts = h("p", { class: "facts" });
    this.charts = h("div", { class: "charts" }, h("p", { class: "quiet" }, "Reading the run"));
    this.bar = h("div", { class: "sticky" });
    this.below = h("div", { class: "panels" });
    this.element = h("div", { keydown: keys(this.group) }, this.heading, this.facts, this.bar, this.charts, this.below);
    this.behavior = "";
    this.isOver = false;
    this.timer = 0;
    this.shape = "";
    /** @type {Map<Chart, (found: import("/assets/data.js").Series) => any>} */
    this.makers = new Map();
    this.load();
  }

  /** @param {any} changed */
  onRuns(changed) {
    if (this.isOver && this.run in changed) this.load(); // it has been resumed
  }

  later(/** @type {number} */ ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), ms);
  }

  async load() {
    let isWhole = true;
    try {
      this.description = await json("run", { run: this.run });
      const behaviors = entries(this.description.columns).map(([name]) => name).sort();
      if (!behaviors.includes(this.behavior)) this.behavior = behaviors[0] ?? "";
      const columns = list(this.description.columns[this.behavior]);
      this.league = columns.includes(WIN_RATE) ? await json("league", { run: this.run }) : null;
      const shape = JSON.stringify([behaviors, this.behavior, columns]);
      if (shape !== this.shape) this.lay(behaviors, columns);
      this.shape = shape;
      this.facts.replaceChildren(...facts(this.description));
      if (columns.length) isWhole = await this.fetch();
      else this.charts.replaceChildren(h("p", { class: "quiet" }, "No interval has ended yet: the first point comes with summary_freq."));
      this.charts.setAttribute("aria-busy", String(!isWhole));
      renew(this.below, lags(this.description.lags?.[this.behavior]), happened(list(this.description.events)));
    } catch (error) {
      this.facts.replaceChildren(h("span", { class: "bad" }, String(error)));
    }
    this.isOver = isWhole && ["completed", "stopped", "failed", "stalled"].includes(this.description?.state);
    if (!this.isOver) this.later(isWhole ? EVERY_MS : 100);
  }

  /** Makes the charts for the columns that there are. @param {string[]} behaviors @param {string[]} columns */
  lay(behaviors, columns) {
    const choose = h("select", { id: "behavior", change: () => {
      this.behavior = choose.value;
      this.group.range = null;
      this.load();
    } }, ...behaviors.map((name) => h("option", { value: name, selected: name === this.behavior }, name)));
    const csv = h("a", { class: "button", href: address("csv", { run: this.run, behavior: this.behavior }), download: "" }, "CSV");
    this.bar.replaceChildren(controls(this.group, () => { this.onTheme(); this.load(); },
      ...(behaviors.length > 1 ? [h("label", { for: "behavior" }, "Behavior"), choose] : []), csv));
    this.group.charts.clear();
    this.makers.clear();
    const colors = list(this.description.colors), used = new Set(APART);
    const add = (/** @type {string} */ title, /** @type {[string, string][]} */ shown) => {
      const chart = new Chart(this.group, title);
      shown.forEach(([name]) => used.add(name));
      this.makers.set(chart, (found) => shown.flatMap(([name, label], at) => {
        const column = found.columns.get(name);
        return column ? [{ label, x: this.group.isTime ? found.time : found.step, ...banded(name, column, found, this.description.rating_intervals?.[this.behavior]), color: colors[at % colors.length], dash: at >= colors.length ? [8, 4] : undefined }] : [];
      }));
      return chart.element;
    };
    const first = entries(this.description.panels).flatMap(([title, keys]) => {
      const shown = entries(keys).flatMap(([key, label]) => columns.filter((name) => (key.endsWith("/") ? name.startsWith(key) : name === key))
        .map((name) => /** @type {[string, string]} */ ([name, `${label}${name.slice(key.length)}`.replace(/^: /, "") || title])));
      return [...(shown.length ? [add(title, shown)] : []), ...(shown.some(([name]) => name === WIN_RATE) ? [this.versus(colors)] : [])];
    });
    const lessons = columns.filter((name) => name.startsWith(LESSONS));
    if (lessons.length) first.push(add("Lessons of the curricula", lessons.map((name) => [name, name.slice(LESSONS.length)])));
    const single = (/** @type {string[]} */ names) => names.slice(0, MOST_CHARTS).map((name) => add(name.replace(/^simulators\//, ""), [[name, name.replace(/^simulators\//, "")]]));
    const own = columns.filter((name) => name.startsWith("simulators/"));
    const rest = columns.filter((name) => !used.has(name) && !own.includes(name) && !name.startsWith("step_counts/"));
    const group = (/** @type {string} */ title, /** @type {Element[]} */ made, isOpen = false) =>
      made.length ? [h("details", { class: "group", open: isOpen }, h("summary", {}, `${title} (${made.length})`), h("div", { class: "charts" }, ...made))] : [];
    this.charts.replaceChildren(...first, ...group("Statistics of the simulators", single(own), true), ...group("More", single(rest)));
  }

  /** Returns a chart of the results against each opponent. @param {string[]} colors */
  versus(colors) {
    const chart = new Chart(this.group, "Win rate by opponent");
    this.makers.set(chart, (found) => byOpponent(this.behavior, this.league?.learners?.[this.behavior]).map((line, at) => (
      { ...line, x: this.group.isTime ? line.x.map((step) => beside(found.step, found.time, step)) : line.x, color: colors[at] })));
    return chart.element;
  }

  /** Returns whether these are all points, and not samples of a long run that is still being read. */
  async fetch() {
    const [begin, end] = this.group.range ?? [null, null];
    const axis = this.group.isTime ? "time" : "step";
    const found = await series({ run: this.run, behavior: this.behavior, axis, begin, end, points: 700, whole: 1 });
    const marks = this.marks(found);
    for (const [chart, make] of this.makers) chart.set(make(found), marks);
    return found.isWhole;
  }

  /** @param {import("/assets/data.js").Series} found @returns {import("/assets/chart.js").Mark[]} */
  marks(found) {
    return list(this.description.events).filter((one) => one.kind !== "run started").slice(-200).map((one) => ({
      at: this.group.isTime ? one.time_s : one.step ?? beside(found.time, found.step, one.time_s), color: COLORS_OF[one.kind] ?? "#717581",
    }));
  }

  onTheme() {
    this.makers.forEach((_, chart) => {
      chart.forget();
      if (chart.isSeen) chart.draw();
    });
  }

  close() {
    clearTimeout(this.timer);
    this.description = { state: "stopped" };
    this.group.close();
  }
}

/** @type {any} */
Curves.prototype.description = undefined;
/** @type {any} */
Curves.prototype.league = null;

const COLORS_OF = /** @type {Object<string, string>} */ ({ failure: "#bd1f01", restart: "#bd1f01", lesson: "#832db6", "learning team": "#e76300", checkpoint: "#94a4a2" });

/** Returns a column with the interval that is known of it: 95 % of a mean, or of a rating. */
function banded(/** @type {string} */ name, /** @type {any} */ column, /** @type {import("/assets/data.js").Series} */ found, /** @type {number | undefined} */ rating) {
  const deviation = found.columns.get("reward_deviation")?.mean, episodes = found.columns.get("episodes")?.mean;
  const sigma = found.columns.get("Self-play/Sigma")?.mean;
  const half = name === "reward" && deviation && episodes ? column.mean.map((/** @type {number} */ _, /** @type {number} */ at) => (PROBABLE * deviation[at]) / Math.sqrt(episodes[at]))
    : name === "Self-play/Mu" && sigma ? sigma.map((one) => PROBABLE * one)
    : name === "Self-play/ELO" && rating ? column.mean.map(() => rating) : null;
  return half ? { ...column, low: column.mean.map((/** @type {number} */ v, /** @type {number} */ at) => v - half[at]), high: column.mean.map((/** @type {number} */ v, /** @type {number} */ at) => v + half[at]) } : column;
}

/** Returns the value beside a place of a rising axis. @param {Float64Array} axis @param {Float64Array} values @param {number} place */
function beside(axis, values, place) {
  let low = 0, high = axis.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (axis[middle] < place) low = middle + 1;
    else high = middle;
  }
  return values[Math.min(low, values.length - 1)];
}

/** @param {any} description */
function facts(description) {
  const behaviors = entries(description.status?.behaviors), ended = entries(description.summary?.behaviors);
  const words = behaviors.length ? behaviors.map(([name, one]) => `${name}: ${short(one?.step)} of ${short(one?.max_steps)} steps (${Math.round(100 * share(one?.step, one?.max_steps))} %)${description.state === "running" ? `, ${short(one?.steps_per_s)} steps/s, ${duration((one?.max_steps - one?.step) / one?.steps_per_s)} left` : ""}`)
    : ended.map(([name, one]) => `${name}: ${short(one?.steps)} steps`);
  const state = String(description.state);
  return [h("span", { class: `state ${/^[a-z]+$/.test(state) ? state : ""}` }, state), ...words.map((text) => h("span", {}, text)),
    ...(description.summary?.error ? [h("span", { class: "bad" }, String(description.summary.error).slice(0, 500))] : [])];
}

/** @param {any} lag a histogram */
function lags(lag) {
  const counts = list(lag?.counts), sum = counts.reduce((a, b) => a + b, 0);
  if (!sum) return null;
  const last = counts.findLastIndex((count) => count > 0);
  const rows = counts.slice(0, last + 1).map((count, at) => [at < lag.bounds.length ? `${short(lag.bounds[at])}` : "more", count]);
  return panel("Policy lag of the trained steps (versions)", () => bars("Policy lag", rows, sum));
}

/** Returns horizontal bars in a table. @param {string} caption @param {any[][]} rows @param {number} sum */
export function bars(caption, rows, sum) {
  return table(caption, ["at most", "share", "steps"], rows.map(([name, count]) => [name, h("meter", { min: 0, max: 1, value: share(count, sum), title: `${(100 * share(count, sum)).toFixed(1)} %` }), short(count)]));
}

/** @param {any[]} events */
function happened(events) {
  if (!events.length) return null;
  const rows = events.slice(-100).reverse().map((one) => [new Date(one.time_s * 1000).toLocaleTimeString(), h("span", {}, h("i", { class: `mark ${String(one.kind).replace(" ", "-")}` }), String(one.kind)), one.step === null ? "" : short(one.step, 6), one.text]);
  return panel("What happened", () => {
    const shown = table("Events of the run", ["time", "what", "step", "more"], rows);
    shown.classList.add("events");
    return shown;
  });
}
