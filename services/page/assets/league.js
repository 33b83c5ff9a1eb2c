/** Who beats whom: points against each opponent, ratings over the training, the last matches, and the lineage. */

import { duration, entries, h, list, panel, renew, short, table } from "/assets/dom.js";
import { json } from "/assets/data.js";
import { Chart, Group } from "/assets/chart.js";

const EVERY_MS = 5000;
const COLOR = "#3f90da";
const MOST_LINES = 4;
const PROBABLE = 1.96;

export class League {
  /** @param {string} run */
  constructor(run) {
    this.run = run;
    this.group = new Group(() => {});
    this.chart = new Chart(this.group, "Rating over the training, with its 95 % interval", 260);
    this.content = h("div", {}, h("p", { class: "quiet" }, "Reading the matches"));
    this.element = h("div", {}, h("h1", {}, run), this.content);
    this.timer = 0;
    this.isClosed = false;
    this.seen = "";
    this.load();
  }

  async load() {
    try {
      const found = await json("league", { run: this.run }), seen = JSON.stringify(found);
      if (seen !== this.seen) this.show(found);
      this.seen = seen;
    } catch (error) {
      this.content.replaceChildren(h("p", { class: "bad" }, String(error)));
    }
    if (!this.isClosed) this.timer = setTimeout(() => this.load(), EVERY_MS);
  }

  /** @param {any} found */
  show(found) {
    const learners = entries(found.learners).filter(([, one]) => one);
    const lines = learners.map(([name, one], at) => {
      const phases = list(one.phases), [mean, margins] = [one.ratings, one.margins].map((values) => phases.map((_, at) => list(values)[at]));
      return { label: name, x: Float64Array.from(phases, (phase) => phase?.end), mean, low: mean.map((v, at) => v - margins[at]), high: mean.map((v, at) => v + margins[at]), color: [COLOR, "#ffa90e", "#bd1f01", "#832db6"][at % 4] };
    });
    const hasSteps = lines.every(({ x }) => x.some((step) => step > 0));
    if (!hasSteps) lines.forEach((line) => { line.x = line.x.map((_, at) => at + 1); });
    this.chart.set(lines.filter(({ x }) => x.length));
    renew(this.content,
      learners.length ? panel("Strength", () => [this.chart.element, h("p", { class: "quiet" }, "Points of Elo's scale, relative to all opponents. The interval is that of the results of a phase.")])
        : h("p", { class: "quiet" }, "There are no matches: this run has no self_play, or none has ended yet."),
      ...learners.map(([name, one]) => panel(`Points per match of ${name}, by phase of its training`, () => payoff(name, one, hasSteps))),
      ...list(found.tournaments).filter(Boolean).map((one) => panel(`Tournament ${one.name}`, () => tournament(one))),
      list(found.lineage).length ? panel("Lineage", () => lineage(found.lineage)) : null,
      list(found.recent).length ? panel("Last matches", () => matches(found.recent)) : null);
  }

  onTheme() {
    this.chart.forget();
    this.chart.draw();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.group.close();
  }
}

/**
 * Returns a cell whose color goes from orange (no points) over white to violet (all), as ColorBrewer's PuOr.
 * @param {number | null} share @param {string} title
 */
function heat(share, title) {
  if (share === null || !Number.isFinite(share)) return h("td", { class: "none" }, "");
  const [r, g, b] = share < 0.5 ? mixed([230, 97, 1], [247, 247, 247], share * 2) : mixed([247, 247, 247], [94, 60, 153], share * 2 - 1);
  const cell = h("td", { class: "heat", title }, share.toFixed(2));
  cell.style.background = `rgb(${r} ${g} ${b})`;
  cell.style.color = share > 0.87 ? "#fff" : "#000";
  return cell;
}

/** @param {number[]} a @param {number[]} b @param {number} t */
function mixed(a, b, t) {
  return a.map((one, at) => Math.round(one + (b[at] - one) * t));
}

/** @param {string} caption @param {string} corner what the rows are @param {string[]} columns @param {[string, any[]][]} rows */
function map(caption, corner, columns, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", { class: "map" }, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, corner), ...columns.map((name) => h("th", { scope: "col" }, h("span", {}, name))))),
      h("tbody", {}, ...rows.map(([name, cells]) => h("tr", {}, h("th", { scope: "row" }, name), ...cells)))));
}

/**
 * Returns the points per match of a learner over its training, with Wilson's interval, against some groups of opponents.
 * @param {string} name @param {any} one
 */
export function byOpponent(name, one) {
  const opponents = list(one?.opponents), every = Math.ceil(opponents.length / MOST_LINES) || 1;
  return Array.from({ length: Math.ceil(opponents.length / every) }, (_, group) => {
    const begin = group * every, end = Math.min(opponents.length, begin + every);
    const sum = (/** @type {number[]} */ row) => row.slice(begin, end).reduce((a, b) => a + b, 0);
    const played = list(one.phases).map(({ end: step }, row) => ({ step, matches: sum(one.matches[row]), points: sum(one.points[row]) })).filter(({ matches }) => matches);
    const spans = played.map(({ points, matches }) => wilson(points, matches));
    const ends = [opponents[begin].split(" to ")[0], opponents[end - 1].split(" to ").at(-1)];
    return { label: brief(name, [...new Set(ends)].join(" to ")), x: Float64Array.from(played, ({ step }) => step),
      mean: played.map(({ points, matches }) => points / matches), low: spans.map(([low]) => low), high: spans.map(([, high]) => high) };
  }).filter(({ x }) => x.length);
}

/** Returns the name of snapshots of a learner without its own. @param {string} name @param {any} text */
function brief(name, text) {
  return String(text).replaceAll(`${name}@`, "@");
}

/** @param {number} points @param {number} matches @returns {[number, number]} the 95 % interval of a share (Wilson, 1927) */
function wilson(points, matches) {
  const share = points / matches, more = PROBABLE ** 2 / matches, middle = (share + more / 2) / (1 + more);
  const half = (PROBABLE / (1 + more)) * Math.sqrt((share * (1 - share)) / matches + more / (4 * matches));
  return [middle - half, middle + half];
}

/** @param {string} name @param {any} one @param {boolean} hasSteps */
function payoff(name, one, hasSteps) {
  const label = (/** @type {any} */ phase, /** @type {number} */ at) => (hasSteps ? `to\u00a0${short(phase.end)}` : `part ${at + 1}`);
  const rows = list(one.phases).map((phase, row) => /** @type {[string, any[]]} */ ([label(phase, row), list(one.opponents).map((opponent, column) => {
    const matches = one.matches[row][column];
    return heat(matches ? one.points[row][column] / matches : null, `${short(one.points[row][column])} points in ${matches} matches against ${opponent}`);
  })]));
  return [map(`Points per match of ${name}`, hasSteps ? "steps" : "", list(one.opponents).map((text) => brief(name, text)), rows),
    h("p", { class: "quiet" }, "Rows are phases of the learner, by its trained steps; columns are its opponents, older snapshots first. 1 is a won match, 0.5 a tied one.")];
}

/** @param {any} one */
function tournament(one) {
  const players = list(one.players);
  return map(`Points per match of ${one.name}`, "points against", players.map((_, at) => String(at + 1)), players.map((player, at) => [
    `${at + 1}. ${player.player} (${player.rating >= 0 ? "+" : ""}${short(player.rating)} \u00b1 ${short((player.interval[1] - player.interval[0]) / 2)})`,
    players.map((other) => heat(player.against?.[other.player]?.share ?? null, `${player.against?.[other.player]?.matches ?? 0} matches against ${other.player}`)),
  ]));
}

/** @param {any[]} made */
function lineage(made) {
  const begun = made[0]?.time_s ?? 0;
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Lineage" }, h("ol", { class: "lineage" }, ...made.map((one) => h("li", { class: one.kind }, h("strong", {}, one.name),
    h("small", {}, [one.kind, one.step ? `${short(one.step)} steps` : "", one.rating ? `rating ${short(one.rating)}` : "", `after ${duration(one.time_s - begun)}`].filter(Boolean).join(", "))))));
}

/** @param {any[]} recent */
function matches(recent) {
  const text = (/** @type {any} */ value) => entries(value).map(([name, one]) => `${name.replace(/^.*\?team=/, "team ")}: ${typeof one === "number" ? short(one) : one}`).join(", ");
  return table("Last matches", ["match", "players", "points"], recent.map((one) => [String(one.match), text(one.players), text(one.scores)]));
}
