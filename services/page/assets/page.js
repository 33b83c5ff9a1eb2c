/** Chooses the view by the address: #/ for all runs, #/run/ID/VIEW for one. */

import { h } from "/assets/dom.js";
import { follow } from "/assets/data.js";
import { Overview } from "/assets/overview.js";
import { Curves } from "/assets/curves.js";
import { Pipeline } from "/assets/pipeline.js";
import { League } from "/assets/league.js";
import { Watch } from "/assets/watch.js";

/**
 * @typedef {{element: Element, run?: string, onRuns?: (changed: any) => void, onStatus?: (status: any) => void,
 *   onTheme?: () => void, close?: () => void}} View
 */

/** @type {Object<string, [string, new (run: string) => View]>} */
const VIEWS = { curves: ["Curves", Curves], pipeline: ["Pipeline", Pipeline], league: ["League", League], watch: ["Watch", Watch] };

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const nav = /** @type {HTMLElement} */ (document.getElementById("views"));
const link = /** @type {HTMLElement} */ (document.getElementById("link"));
/** By the event that could not be shown. @type {Object<string, HTMLElement>} */
const problems = Object.fromEntries(["runs", "status"].map((event) => [event, h("p", { class: "bad", role: "alert" })]));
/** @type {View | null} */
let view = null;
/** @type {() => void} */
let stop = () => {};

function go() {
  const [place, encoded = "", kind = "curves"] = location.hash.replace(/^#\/?/, "").split("?")[0].split("/");
  const run = place === "run" ? decoded(encoded) : null;
  view?.close?.();
  stop();
  const [, View] = VIEWS[kind] ?? VIEWS.curves;
  const now = (view = run === null ? new Overview() : new View(run));
  main.replaceChildren(now.element);
  document.title = run === null ? "sparring" : `${run} - sparring`;
  nav.replaceChildren(
    ...(run === null ? [] : Object.entries(VIEWS).map(([name, [title]]) =>
      h("a", { href: `#/run/${encodeURIComponent(run)}/${name}`, "aria-current": name === (VIEWS[kind] ? kind : "curves") && "page" }, title))),
  );
  stop = follow(run, {
    runs: (changed) => shown("runs", () => now.onRuns?.(changed)),
    status: (status) => shown("status", () => now.onStatus?.(status)),
  }, (isOpen) => {
    link.textContent = isOpen ? "live" : "reconnecting";
    link.classList.toggle("bad", !isOpen);
  });
}

/** Shows what came, or why it cannot be shown. @param {string} event @param {() => void} show */
function shown(event, show) {
  try {
    show();
    problems[event].remove();
  } catch (error) {
    problems[event].textContent = `This cannot be shown: ${error}`;
    main.prepend(problems[event]);
  }
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const wanted = () => document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

document.documentElement.dataset.theme = localStorage.getItem("theme") ?? wanted();
document.getElementById("theme")?.addEventListener("click", () => {
  const theme = wanted() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  view?.onTheme?.();
});
addEventListener("hashchange", go);
go();
