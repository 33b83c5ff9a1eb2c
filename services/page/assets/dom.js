/** Makes elements and words; whatever a run is called, it is shown as text. */

/**
 * Returns an element. Functions become listeners, true an empty attribute; null and false are left out.
 * @param {string} tag name, of SVG where it begins with "svg:"
 * @param {Object<string, any>} [properties]
 * @param {...(Node | string | number | null | undefined)} children texts are never read as HTML
 * @returns {any}
 */
export function h(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/**
 * Returns a table that a screen reader can read.
 * @param {string} caption
 * @param {string[]} heads names of the columns
 * @param {any[][]} rows cells: texts or elements, the first of each is the row's name
 */
export function table(caption, heads, rows) {
  const cell = (/** @type {any} */ value, /** @type {number} */ at) =>
    h(at ? "td" : "th", at ? {} : { scope: "row" }, value instanceof Node ? value : String(value ?? "-"));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell))))));
}

/**
 * Replaces what an element holds; the tables in it stay where they were scrolled to, and keep the focus.
 * @param {Element} parent
 * @param {...(Element | null)} children
 */
export function renew(parent, ...children) {
  const label = (/** @type {Element | null} */ one) => one?.getAttribute("aria-label");
  const places = new Map([...parent.querySelectorAll(".scroll")].map((one) => [label(one), [one.scrollLeft, one.scrollTop]]));
  const focused = parent.contains(document.activeElement) ? label(document.activeElement) : undefined;
  parent.replaceChildren(...children.filter((child) => child !== null));
  for (const one of /** @type {NodeListOf<HTMLElement>} */ (parent.querySelectorAll(".scroll"))) {
    [one.scrollLeft, one.scrollTop] = places.get(label(one)) ?? [0, 0];
    if (focused && label(one) === focused) one.focus({ preventScroll: true });
  }
}

/**
 * Returns a section with a heading, or what went wrong in making it: one damaged file hides one section.
 * @param {string} title
 * @param {() => any} make returns a node, several, or null
 */
export function panel(title, make) {
  let inner;
  try {
    inner = make();
  } catch (error) {
    inner = h("p", { class: "bad" }, `This cannot be shown: ${error}`);
  }
  if (inner === null) return null;
  return h("section", { class: "panel" }, h("h2", {}, title), ...(Array.isArray(inner) ? inner : [inner]));
}

/** @param {any} value @param {number} [digits] @returns {string} a number for readers, "-" for none */
export function short(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  for (const [limit, unit] of /** @type {[number, string][]} */ ([[1e9, "G"], [1e6, "M"], [1e4, "k"]])) {
    if (size >= limit) return `${trim((value / (limit === 1e4 ? 1e3 : limit)).toPrecision(digits))}${unit}`;
  }
  return size >= 100 || value === Math.round(value) ? value.toFixed(0) : size < 1e-3 ? value.toExponential(1) : trim(value.toPrecision(digits));
}

/** @param {string} text */
function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** @param {any} seconds @returns {string} a duration for readers */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "-";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${trim((seconds / 3600).toFixed(1))} h` : `${trim((seconds / 86400).toFixed(1))} days`;
}

/** @param {number} seconds @returns {string} hours, minutes and seconds */
export function clock(seconds) {
  const sign = seconds < 0 ? "\u2212" : "", whole = Math.round(Math.abs(seconds)), two = (/** @type {number} */ part) => String(part).padStart(2, "0");
  return `${sign}${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/** @param {any} part @param {any} whole @returns {number} a share from 0 to 1 */
export function share(part, whole) {
  return typeof part === "number" && typeof whole === "number" && whole > 0 ? Math.min(1, Math.max(0, part / whole)) : 0;
}

/** @param {any} value @returns {[string, any][]} the entries of an object; none of anything else */
export function entries(value) {
  return value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [];
}

/** @param {any} value @returns {any[]} a list; an empty one for anything else */
export function list(value) {
  return Array.isArray(value) ? value : [];
}
