/** Draws lines with bands over steps or time; all charts of a group share one range of the axis. */

import uPlot from "/assets/uplot.js";
import { clock, h, short } from "/assets/dom.js";

/**
 * @typedef {{label: string, x: Float64Array, mean: ArrayLike<number>, low?: ArrayLike<number>, high?: ArrayLike<number>,
 *   color: string, dash?: number[]}} Line
 * @typedef {{at: number, color: string}} Mark
 */

/** Seconds between two ticks of an axis that counts from a start. */
const TICKS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 432000, 864000];

/** Charts so far, for their ids. */
let number = 0;

/** Charts that are zoomed and panned together. */
export class Group {
  /** @param {() => void} onRange called when the range has changed */
  constructor(onRange) {
    /** @type {Set<Chart>} */
    this.charts = new Set();
    /** @type {[number, number] | null} */
    this.range = null;
    this.isTime = false;
    /** Whether times count from the start of each run. */
    this.isElapsed = false;
    this.smoothing = 0;
    this.onRange = onRange;
    this.key = `group-${Math.random()}`;
    this.frame = 0;
    this.seen = new IntersectionObserver((found) => {
      for (const one of found) this.chartOf.get(one.target)?.show(one.isIntersecting);
    }, { rootMargin: "100px" });
    /** @type {WeakMap<Element, Chart>} */
    this.chartOf = new WeakMap();
    this.resized = new ResizeObserver(() => this.charts.forEach((chart) => chart.fit()));
  }

  /** @param {[number, number] | null} range null for all */
  setRange(range) {
    this.range = range;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.charts.forEach((chart) => chart.scale()));
    this.onRange();
  }

  /** Moves and widens the range. @param {number} shift in shares of it @param {number} factor of its width */
  move(shift, factor) {
    const [begin, end] = this.range ?? this.extent();
    const middle = (begin + end) / 2 + shift * (end - begin), half = ((end - begin) / 2) * factor;
    this.setRange([middle - half, middle + half]);
  }

  /** @returns {[number, number]} the least and greatest place of all lines */
  extent() {
    const ends = [...this.charts].flatMap((chart) => chart.lines.flatMap(({ x }) => (x.length ? [x[0], x[x.length - 1]] : [])));
    return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
  }

  close() {
    this.seen.disconnect();
    this.resized.disconnect();
    this.charts.forEach((chart) => chart.plot?.destroy());
  }
}

/** One chart with its title, its legend, and what a screen reader says of it. */
export class Chart {
  /** @param {Group} group @param {string} title @param {number} [height] */
  constructor(group, title, height = 190) {
    this.group = group;
    this.height = height;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {uPlot | null} */
    this.plot = null;
    this.isSeen = false;
    this.isStale = false;
    this.caption = h("figcaption", { id: `chart-${(number += 1)}` }, title);
    this.summary = h("p", { class: "unseen" });
    this.box = h("div", { class: "box" });
    this.element = h("figure", { class: "chart", "aria-labelledby": this.caption.id }, this.caption, this.summary, this.box);
    /** @type {any} */ (this.element).chart = this;
    group.charts.add(this);
    group.chartOf.set(this.element, this);
    group.seen.observe(this.element);
    group.resized.observe(this.box);
  }

  /** @param {Line[]} lines @param {Mark[]} [marks] */
  set(lines, marks = []) {
    const isNew = lines.map((line) => line.label).join("\0") !== this.lines.map((line) => line.label).join("\0");
    this.lines = lines;
    this.marks = marks;
    if (isNew) this.forget();
    this.summary.textContent = lines.map(describe).join("; ");
    this.isStale = true;
    if (this.isSeen) this.draw();
  }

  /** Draws anew from the start, as after a change of theme. */
  forget() {
    this.plot?.destroy();
    this.plot = null;
    this.isStale = true;
  }

  /** @param {boolean} isSeen */
  show(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && this.isStale) this.draw();
    else if (isSeen) this.scale();
  }

  draw() {
    if (!this.lines.length) return;
    const data = aligned(this.lines, this.group.smoothing);
    this.isStale = false;
    if (this.plot) this.plot.setData(data, false);
    else {
      this.plot = new uPlot(this.options(), data, this.box);
      this.plot.root.setAttribute("aria-hidden", "true"); // the summary says what it shows
      this.plot.over.addEventListener("dblclick", () => this.group.setRange(null));
      this.plot.over.addEventListener("mouseleave", () => this.showLast());
    }
    this.scale();
    this.showLast();
  }

  /** Shows the last values in the legend while no place is pointed at. */
  showLast() {
    // After uPlot's own update, which empties the legend.
    queueMicrotask(() => this.plot?.setLegend({ idxs: this.plot.data.map((values) => nearest(values, values.length - 1)) }, false));
  }

  scale() {
    if (!this.plot || !this.isSeen) return;
    const [min, max] = this.group.range ?? this.group.extent();
    this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
  }

  fit() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  /** @returns {any} */
  options() {
    const style = getComputedStyle(document.body), ink = style.getPropertyValue("--soft"), rule = style.getPropertyValue("--rule");
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "12px system-ui" };
    const { isTime, isElapsed } = this.group, isClock = isTime && !isElapsed;
    const place = (/** @type {number} */ value, /** @type {number} */ digits) => (isTime ? clock(value) : short(value, digits));
    const line = (/** @type {Line} */ one) => ({ label: one.label, stroke: one.color, width: 1.75, spanGaps: true, dash: one.dash, points: { show: one.x.length < 2 }, value: (/** @type {any} */ _, /** @type {any} */ v) => short(v, 4) });
    const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, label: "" };
    const banded = this.lines.map((one, at) => ({ one, at: 1 + 3 * at }));
    return {
      width: this.box.clientWidth || 300,
      height: this.height,
      scales: { x: { time: isClock, auto: false }, y: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => padded(low, high) } },
      series: [
        { label: isTime ? "time" : "step", value: isClock ? undefined : (/** @type {any} */ _, /** @type {any} */ v) => place(v, 6) },
        ...this.lines.flatMap((one) => [line(one), edge, edge]),
      ],
      bands: banded.map(({ one, at }) => ({ series: [at + 2, at + 1], fill: `${one.color}30` })),
      axes: [
        { ...axis, size: isClock ? 40 : 28, label: isTime ? (isElapsed ? "time since the start" : "time") : "steps", labelSize: 16, labelGap: 0, labelFont: axis.font,
          ...(isClock ? {} : { values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map((v) => place(v, 3)) }), ...(isTime && isElapsed ? { incrs: TICKS_S } : {}) },
        { ...axis, size: (/** @type {any} */ _, /** @type {string[] | null} */ texts) => 18 + 7 * Math.max(3, ...(texts ?? []).map((text) => text.length)), values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map((v) => short(v)) },
      ],
      legend: { live: true },
      cursor: { dataIdx: (/** @type {any} */ u, /** @type {number} */ at, /** @type {number} */ place) => nearest(u.data[at], place), sync: { key: this.group.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      hooks: {
        init: [(/** @type {any} */ u) => u.root.querySelectorAll(".u-legend .u-series").forEach((/** @type {Element} */ row, /** @type {number} */ at) => row.classList.toggle("edge", at > 0 && at % 3 !== 1))],
        setSelect: [(/** @type {any} */ u) => {
          if (u.select.width < 4) return;
          this.group.setRange([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        draw: [(/** @type {any} */ u) => this.mark(u)],
      },
    };
  }

  /** Draws the events of the run. @param {any} u */
  mark(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4, 4]);
    for (const { at, color } of this.marks) {
      const x = Math.round(u.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = `${color}b0`;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

/** Returns the place of the known value that is nearest to a place. @param {ArrayLike<number | null | undefined>} values @param {number} place */
function nearest(values, place) {
  for (let apart = 0; apart < values.length; apart += 1) {
    for (const at of [place - apart, place + apart]) if (values[at] !== null && values[at] !== undefined) return at;
  }
  return place;
}

/** @param {number | null} low @param {number | null} high @returns {[number, number]} */
function padded(low, high) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/** Returns lines as one table for uPlot, each as mean, low and high. @param {Line[]} lines @param {number} smoothing @returns {any} */
function aligned(lines, smoothing) {
  const tables = lines.map(({ x, mean, low, high }) => [Array.from(x), smoothed(mean, smoothing), known(low ?? mean), known(high ?? mean)]);
  return tables.every(([x]) => x.length === tables[0][0].length && x.every((v, at) => v === tables[0][0][at]))
    ? [tables[0][0], ...tables.flatMap((one) => one.slice(1))]
    : uPlot.join(/** @type {any} */ (tables), tables.map((one) => one.map(() => 2)));
}

/** @param {ArrayLike<number>} values @returns {(number | null)[]} */
function known(values) {
  return Array.from(values, (value) => (Number.isFinite(value) ? value : null));
}

/**
 * Returns exponential means, corrected for their beginning (Kingma and Ba, 2015, section 3).
 * @param {ArrayLike<number>} values
 * @param {number} smoothing from 0, which changes nothing, to below 1
 */
export function smoothed(values, smoothing) {
  if (!smoothing) return known(values);
  let sum = 0, weight = 0;
  return Array.from(values, (value) => {
    if (!Number.isFinite(value)) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + 1 - smoothing;
    return sum / weight;
  });
}

/** Says what a line shows. @param {Line} line */
function describe({ label, mean }) {
  const values = known(mean).filter((value) => value !== null);
  return values.length
    ? `${label}: ${values.length} points, first ${short(values[0])}, last ${short(values[values.length - 1])}, lowest ${short(values.reduce((a, b) => Math.min(a, b)))}, highest ${short(values.reduce((a, b) => Math.max(a, b)))}`
    : `${label}: no values`;
}
