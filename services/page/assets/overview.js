/** All runs as cards, and a comparison of those that are chosen. */

import { duration, entries, h, list, panel, share, short } from "/assets/dom.js";
import { json, series } from "/assets/data.js";
import { Chart, Group } from "/assets/chart.js";
import { controls, keys } from "/assets/controls.js";

/** What each state of a run is called. */
const STATES = /** @type {Object<string, string>} */ ({ silent: "not written any more" });

export class Overview {
  constructor() {
    /** @type {Map<string, any>} */
    this.runs = new Map();
    /** @type {Map<string, Element>} */
    this.cards = new Map();
    this.chosen = new Set(new URLSearchParams(location.hash.split("?")[1] ?? "").getAll("run"));
    this.name = new URLSearchParams(location.hash.split("?")[1] ?? "").get("name") ?? "";
    this.group = new Group(() => this.later(200));
    this.group.isElapsed = true;
    this.list = h("ul", { class: "cards" }, h("li", { class: "quiet" }, "Looking for runs"));
    this.compared = h("div", { keydown: keys(this.group) });
    this.element = h("div", {}, h("h1", {}, "Runs"), this.compared, this.list);
    this.timer = 0;
    /** @type {Object<string, any>} */
    this.described = {};
    if (this.chosen.size) this.compare();
  }

  /** @param {any} changed */
  onRuns(changed) {
    for (const [run, entry] of entries(changed)) {
      if (entry === null) this.runs.delete(run), this.cards.get(run)?.remove(), this.cards.delete(run);
      else this.runs.set(run, entry);
    }
    const sorted = [...this.runs].sort((a, b) => Number(b[1].state === "running") - Number(a[1].state === "running") || b[1].time_s - a[1].time_s);
    for (const [run, entry] of sorted) {
      if (!(run in changed) && this.cards.has(run)) continue;
      const old = this.cards.get(run), fresh = this.card(run, entry);
      this.cards.set(run, fresh);
      if (old?.contains(document.activeElement)) /** @type {any} */ (fresh.querySelector(`[data-key="${/** @type {any} */ (document.activeElement).dataset.key}"]`))?.focus();
      old?.replaceWith(fresh);
    }
    const wanted = sorted.map(([run]) => /** @type {Element} */ (this.cards.get(run)));
    if (wanted.some((card, at) => this.list.children[at] !== card) || this.list.children.length !== wanted.length) {
      this.list.replaceChildren(...(wanted.length ? wanted : [h("li", { class: "quiet" }, "There is no run yet. Start one with: sparring train CONFIG")]));
    }
  }

  /** @param {string} run @param {any} entry @returns {Element} */
  card(run, entry) {
    const state = String(entry.state ?? "unknown");
    const choose = h("input", { type: "checkbox", "data-key": "choose", "aria-label": `compare ${run}`, checked: this.chosen.has(run), change: () => {
      this.chosen[choose.checked ? "add" : "delete"](run);
      this.compare();
    } });
    choose.checked = this.chosen.has(run);
    return h("li", { class: "card" },
      h("div", { class: "head" }, choose, h("a", { "data-key": "open", href: `#/run/${encodeURIComponent(run)}` }, run),
        h("span", { class: `state ${/^[a-z]+$/.test(state) ? state : ""}` }, STATES[state] ?? state)),
      ...list(entry.behaviors).map((one) => behavior(one ?? {}, entry)),
      ...list(entry.stalls).map((text) => h("p", { class: "bad" }, `stalled: ${text}`)),
      entry.error ? h("p", { class: "bad" }, String(entry.error).slice(0, 300)) : null,
      h("p", { class: "quiet" }, [entry.wall_s ? `took ${duration(entry.wall_s)}` : "", typeof entry.time_s === "number" ? new Date(entry.time_s * 1000).toLocaleString() : ""].filter(Boolean).join(", ")));
  }

  later(/** @type {number} */ ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fetch(), ms);
  }

  async compare() {
    const runs = [...this.chosen];
    history.replaceState(null, "", runs.length ? `#/?${new URLSearchParams([...runs.map((run) => ["run", run]), ["name", this.name]])}` : "#/");
    if (!runs.length) return this.compared.replaceChildren();
    await Promise.all(runs.map(async (run) => (this.described[run] ??= await json("run", { run }).catch(() => ({})))));
    const names = [...new Set(runs.flatMap((run) => entries(this.described[run].columns).flatMap(([, columns]) => list(columns))))].sort();
    if (!names.includes(this.name)) this.name = ["Self-play/ELO", "reward"].find((name) => names.includes(name)) ?? names[0] ?? "";
    const select = h("select", { id: "shown", change: () => {
      this.name = select.value;
      this.compare();
    } }, ...names.map((name) => h("option", { value: name, selected: name === this.name }, name)));
    this.group.charts.clear();
    this.chart = new Chart(this.group, this.name, 320);
    const bar = controls(this.group, () => { this.chart?.forget(); this.fetch(); }, h("label", { for: "shown" }, "Show"), select);
    this.compared.replaceChildren(panel("Comparison", () => [bar, this.chart?.element]));
    this.fetch();
  }

  async fetch() {
    const chart = this.chart, [begin, end] = this.group.range ?? [null, null], { isTime } = this.group;
    if (!chart) return;
    /** @type {import("/assets/chart.js").Line[]} */
    const lines = [];
    const asked = [...this.chosen].flatMap((run) => entries(this.described[run]?.columns).filter(([, columns]) => list(columns).includes(this.name)).map(([behavior]) => ({ run, behavior })));
    await Promise.all(asked.map(async ({ run, behavior }, at) => {
      const first = this.starts?.[`${run}\0${behavior}`] ?? 0;
      const shift = isTime && begin !== null ? first : 0;
      const found = await series({ run, behavior, name: this.name, axis: isTime ? "time" : "step", points: 800, begin: begin === null ? null : begin + shift, end: end === null ? null : end + shift }).catch(() => null);
      const column = found?.columns.get(this.name);
      if (!found || !column) return;
      if (begin === null) (this.starts ??= {})[`${run}\0${behavior}`] = found.time[0];
      const colors = this.described[run].colors;
      const several = entries(this.described[run].columns).length > 1;
      lines[at] = { label: several ? `${run}: ${behavior}` : run, x: isTime ? found.time.map((t) => t - (this.starts?.[`${run}\0${behavior}`] ?? 0)) : found.step, ...column, color: colors[at % colors.length], dash: at >= colors.length ? [8, 4] : undefined };
    }));
    chart.set(lines.filter(Boolean));
  }

  onTheme() {
    this.chart?.forget();
    this.chart?.draw();
  }

  close() {
    clearTimeout(this.timer);
    this.group.close();
  }
}

/** @type {Object<string, number> | undefined} */
Overview.prototype.starts = undefined;
/** @type {Chart | undefined} */
Overview.prototype.chart = undefined;

/** @param {any} one @param {any} entry */
function behavior(one, entry) {
  const done = share(one.step, one.max_steps), what = one.what || "reward";
  const value = one.value ?? one.reward;
  const hasSteps = one.step > 0 || one.max_steps > 0; // not in a tournament
  return h("div", { class: "behavior" },
    h("div", {}, h("strong", {}, String(one.name)), hasSteps ? h("div", { class: "value" }, short(value), h("small", {}, ` ${what}`)) : null),
    spark(list(one.spark), `${what} over steps`),
    hasSteps ? h("div", { class: "wide" },
      one.max_steps > 0 ? h("progress", { value: done, max: 1, "aria-label": `progress of ${one.name}` }) : null,
      h("small", {}, `${short(one.step)}${one.max_steps ? ` of ${short(one.max_steps)}` : ""} steps`,
        typeof one.steps_per_s === "number" ? `, ${short(one.steps_per_s)}/s` : "",
        entry.state === "running" && one.eta_s ? `, ${duration(one.eta_s)} left` : "")) : null);
}

/** @param {any[]} points @param {string} name */
function spark(points, name) {
  const known = points.filter((one) => Array.isArray(one) && one.length > 1 && one.every(Number.isFinite));
  if (known.length < 2) return h("span", { class: "spark" });
  const xs = known.map(([x]) => x), ys = known.map(([, y]) => y);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = known.map(([x, y]) => `${(((x - left) / (right - left || 1)) * 118 + 1).toFixed(1)},${(35 - ((y - low) / (high - low || 1)) * 34).toFixed(1)}`);
  return h("svg:svg", { class: "spark", viewBox: "0 0 120 36", role: "img", "aria-label": `${name}, from ${short(low)} to ${short(high)}`, preserveAspectRatio: "none" },
    h("svg:polyline", { points: at.join(" "), "vector-effect": "non-scaling-stroke" }));
}
