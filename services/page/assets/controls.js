/** The controls of charts: axis, smoothing, zoom. They are buttons, so that all works by keyboard and by touch. */

import { h } from "/assets/dom.js";

/**
 * @param {import("/assets/chart.js").Group} group
 * @param {() => void} redraw called when the axis or the smoothing has changed
 * @param {...Node} more
 */
export function controls(group, redraw, ...more) {
  const button = (/** @type {string} */ sign, /** @type {string} */ name, /** @type {() => void} */ act) =>
    h("button", { type: "button", title: name, "aria-label": name, click: act }, sign);
  const axis = h("select", { id: "axis", change: () => {
    group.isTime = axis.value === "time";
    group.range = null;
    redraw();
  } }, h("option", { value: "step" }, "steps"), h("option", { value: "time", selected: group.isTime }, "wall time"));
  const smoothing = h("input", { id: "smoothing", type: "range", min: 0, max: 0.98, step: 0.02, value: group.smoothing, input: () => {
    group.smoothing = Number(smoothing.value);
    redraw();
  } });
  const zoom = h("div", { role: "group", "aria-label": "Zoom", class: "zoom" },
    button("\u2190", "earlier", () => group.move(-0.25, 1)), button("\u2192", "later", () => group.move(0.25, 1)),
    button("+", "zoom in", () => group.move(0, 0.5)), button("\u2212", "zoom out", () => group.move(0, 2)),
    button("all", "show all", () => group.setRange(null)));
  const bar = h("form", { class: "controls", submit: (/** @type {Event} */ event) => event.preventDefault() },
    ...more, h("label", { for: "axis" }, "Axis"), axis, h("label", { for: "smoothing" }, "Smoothing"), smoothing, zoom);
  return bar;
}

/** Moves the charts by keys, unless they are for an element that has keys of its own. @param {import("/assets/chart.js").Group} group */
export function keys(group) {
  return (/** @type {KeyboardEvent} */ event) => {
    if (/** @type {Element} */ (event.target).closest("input, select, .scroll") || event.ctrlKey || event.metaKey || event.altKey) return;
    const [shift, factor] = /** @type {Object<string, [number, number]>} */ ({ ArrowLeft: [-0.1, 1], ArrowRight: [0.1, 1], "+": [0, 0.7], "-": [0, 1.4] })[event.key] ?? [0, 0];
    if (event.key === "0") group.setRange(null);
    else if (factor) group.move(shift, factor);
    else return;
    event.preventDefault();
  };
}
