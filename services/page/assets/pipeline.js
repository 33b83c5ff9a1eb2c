/** The stages of a run as they are now: rates, queues, waits, CPU, and where every step is. */

import { duration, entries, h, list, panel, renew, share, short, table } from "/assets/dom.js";

/** The terms of the step accounting, with colors that the color-blind can tell apart. */
const TERMS = [["trained", "#3f90da"], ["ghost", "#ffa90e"], ["stale", "#832db6"], ["lost", "#bd1f01"], ["open", "#94a4a2"]];
/** What the kinds of lines in the graph mean. */
const LINES = [["flow", "data, thicker for a fuller queue"], ["weights", "weights"], ["wait", "waits for"]];
const STAGES = ["simulators", "stepping", "assembly", "learning"];
const MOST_PROCESSES = 16;

export class Pipeline {
  /** @param {string} run */
  constructor(run) {
    this.run = run;
    this.told = "";
    this.heading = h("h1", {}, run);
    this.stalls = h("div", { role: "status" }, "The run has not reported yet.");
    this.state = "";
    this.graph = h("div", { class: "graph" });
    this.below = h("div", { class: "panels" });
    const legend = h("p", { class: "legend" }, ...LINES.map(([kind, text]) => h("span", {}, h("svg:svg", { class: "links", viewBox: "0 0 28 8", "aria-hidden": "true" }, h("svg:path", { class: kind, d: "M0 4 H28", "stroke-width": 2 })), text)));
    this.element = h("div", {}, this.heading, this.stalls, this.graph, legend, this.below);
    this.last = /** @type {any} */ (null);
    this.resized = new ResizeObserver(() => this.link());
    this.resized.observe(this.graph);
  }

  /** @param {any} changed */
  onRuns(changed) {
    if (this.run in changed) this.state = changed[this.run]?.state ?? "removed";
    this.tell();
  }

  /** Says what is not as usual; only a change of that is read out. */
  tell() {
    const status = this.last ?? {}, services = entries(status.services);
    const note = this.state === "removed" ? "The run has been removed; this is its last state." : status.ended ? "The run has ended; this is its last state."
      : this.state === "silent" ? "The run does not write any more; this is its last state." : services.length ? "" : "The run has not reported yet.";
    const found = [...(note ? [h("p", { class: "quiet" }, note)] : []), ...list(status.stalls).map((text) => h("ol", { class: "bad" }, ...String(text).split("; ").map((part) => h("li", {}, part))))];
    if (found.map((one) => one.outerText).join() !== this.told) this.stalls.replaceChildren(...found);
    this.told = found.map((one) => one.outerText).join();
  }

  /** @param {any} status */
  onStatus(status) {
    if (this.state === "removed") return;
    const before = this.last ?? {}, seconds = (status.time_s ?? 0) - (before.time_s ?? 0);
    this.last = status;
    this.tell();
    const services = entries(status.services);
    const cards = (/** @type {string} */ stage) => services.filter(([name]) => name.split("-")[0] === stage)
      .map(([name, one]) => service(name, one, before.services?.[name], seconds));
    const count = services.reduce((sum, [, one]) => sum + (one?.simulators ?? 0), 0);
    const processes = status.ended ? [] : entries(status.processes);
    const agents = entries(status.behaviors).reduce((sum, [, one]) => sum + (one?.agents ?? 0), 0);
    const simulators = h("article", { class: "service", "data-name": "simulators", "aria-label": "simulators" }, h("h3", {}, "simulators"), h("div", {}, h("strong", {}, short(count)), h("small", {}, ` with ${short(agents)} agents`)),
      ...loads(processes.filter(([name]) => name.startsWith("simulator-"))));
    this.lines = h("svg:svg", { class: "links", "aria-hidden": "true" });
    this.graph.replaceChildren(this.lines,
      ...STAGES.map((stage) => h("div", { class: "stage" }, ...(stage === "simulators" ? [simulators] : cards(stage)))),
      h("div", { class: "beside" }, ...cards("coordination")));
    this.link();
    renew(this.below, ...entries(status.behaviors).map(([name, one]) => panel(`Steps of ${name}`, () => steps(name, one))),
      latencies(services), others(processes.filter(([name]) => !name.startsWith("simulator-"))), writers(status.writers));
  }

  /** Draws a line between each sender and receiver; a thicker one for a fuller queue, a dashed one for who waits for whom. */
  link() {
    if (!this.lines || !this.last) return;
    const frame = this.graph.getBoundingClientRect();
    /** @type {Map<string, DOMRect>} */
    const places = new Map([...this.graph.querySelectorAll(".service")].map((one) => [/** @type {any} */ (one).dataset.name, one.getBoundingClientRect()]));
    const services = entries(this.last.services);
    /** @type {Map<string, string>} */
    const receivers = new Map(services.flatMap(([name, one]) => entries(one?.queues).filter(([queue]) => !queue.endsWith(".out")).map(([queue]) => /** @type {[string, string]} */ ([queue, name]))));
    const found = [];
    for (const [name, one] of services) {
      if (name.startsWith("stepping")) found.push(line(places.get("simulators"), places.get(name), frame, 0, "flow"));
      for (const [queue, end] of entries(one?.queues)) {
        const to = queue.endsWith(".out") ? receivers.get(queue.slice(0, -4)) : undefined;
        if (to) found.push(line(places.get(name), places.get(to), frame, share(end?.messages, end?.capacity), "flow"));
      }
      for (const wait of list(one?.waits)) {
        for (const source of list(wait?.sources)) found.push(line(places.get(name), places.get(source), frame, 0, "wait"));
      }
      if (name.startsWith("learning")) for (const [other] of services) if (other.startsWith("stepping")) found.push(line(places.get(name), places.get(other), frame, 0, "weights"));
    }
    this.lines.replaceChildren(...found.filter(Boolean));
  }

  close() {
    this.resized.disconnect();
  }
}

/** @type {any} */
Pipeline.prototype.lines = undefined;

/** @param {DOMRect | undefined} a @param {DOMRect | undefined} b @param {DOMRect} frame @param {number} fill @param {string} kind */
function line(a, b, frame, fill, kind) {
  if (!a || !b || a === b) return null;
  const isDown = Math.abs(b.left - a.left) < 20, isBack = b.left < a.left;
  const lift = kind === "wait" ? 0.7 : kind === "weights" ? 0.3 : 0.5;
  const x1 = isDown ? a.left + a.width * lift : isBack ? a.left : a.right, x2 = isDown ? b.left + b.width * lift : isBack ? b.right : b.left;
  const y1 = isDown ? (b.top > a.top ? a.bottom : a.top) : a.top + a.height * lift, y2 = isDown ? (b.top > a.top ? b.top : b.bottom) : b.top + b.height * lift;
  const bend = isDown ? 0 : Math.max(20, Math.abs(x2 - x1) / 2) * (isBack ? -1 : 1);
  const at = (/** @type {number} */ x, /** @type {number} */ y) => `${(x - frame.left).toFixed(1)} ${(y - frame.top).toFixed(1)}`;
  return h("svg:path", { class: kind, d: `M${at(x1, y1)} C${at(x1 + bend, y1)}, ${at(x2 - bend, y2)}, ${at(x2, y2)}`, "stroke-width": 1.5 + 6 * fill });
}

/** @param {string} name @param {any} one @param {any} before @param {number} seconds */
function service(name, one, before, seconds) {
  const rates = entries(one?.passed).map(([product, passed]) => {
    const count = passed?.count, former = before?.passed?.[product]?.count;
    const rate = seconds > 0 && typeof former === "number" ? Math.max(0, count - former) / seconds : null;
    return h("div", {}, h("strong", {}, rate === null ? short(count) : `${short(rate)}/s`), h("small", {}, ` ${product.replace("/", " of ")}`));
  });
  const cpu = seconds > 0 && typeof before?.cpu_s === "number" && before.start === one?.start ? Math.max(0, one.cpu_s - before.cpu_s) / seconds : null;
  const queues = entries(one?.queues).map(([queue, end]) => {
    const text = `${queue.replace(/\.out$/, " (sending)")}: ${short(end?.messages)} of ${short(end?.capacity)}`;
    return h("div", {}, h("small", {}, text), h("meter", { min: 0, max: 1, value: share(end?.messages, end?.capacity), "aria-label": text }));
  });
  const isSilent = !(one?.heartbeat_age_s < 10);
  return h("article", { class: `service${isSilent ? " silent" : ""}`, "data-name": name, "aria-label": name },
    h("h3", {}, name), ...rates,
    load(cpu === null ? `CPU ${duration(one?.cpu_s)}` : `CPU ${percent(cpu)}`, cpu, `share of a core of ${name}`, `${short((one?.rss_bytes ?? 0) / 2 ** 20)} MiB${one?.starts > 1 ? `, start ${one.starts}` : ""}`),
    ...queues,
    h("small", { class: `waits${isSilent || one?.waiting_for ? " late" : ""}` }, isSilent ? "does not answer" : one?.waiting_for ? `waits for ${one.waiting_for}` : "works"));
}

/** @param {string} before @param {any} cpu share of a core @param {string} name @param {string} after */
function load(before, cpu, name, after) {
  return h("div", { class: "load" }, h("small", {}, before), h("meter", { min: 0, max: 1, value: share(cpu, 1), "aria-label": name }), h("small", {}, after));
}

/** Shows the CPU of processes that are no services. @param {[string, any][]} processes */
function loads(processes) {
  const more = processes.length - MOST_PROCESSES;
  return [...processes.slice(0, MOST_PROCESSES).map(([name, cpu]) => load(name, cpu, `share of a core of ${name}`, percent(cpu))),
    ...(more > 0 ? [h("small", {}, `and ${more} more`)] : [])];
}

/** Shows the processes beside the stages. @param {[string, any][]} processes */
function others(processes) {
  return processes.length ? panel("CPU of other processes", () => loads(processes)) : null;
}

/** @param {any} part */
function percent(part) {
  return typeof part === "number" ? `${Math.round(part * 100)} %` : "-";
}

/** Shows where the steps of a behavior are, as a flow. @param {string} name @param {any} one */
function steps(name, one) {
  const counts = Object.fromEntries(entries(one?.figures?.step_counts).filter(([, count]) => Number.isFinite(count))), produced = counts.produced || 0;
  const room = 140, gap = 8, parts = TERMS.map(([name, color]) => ({ name, color, count: counts[name] || 0 })).filter(({ count }) => count > 0);
  let from = 20, to = 4;
  const scale = room / Math.max(1, produced, ...parts.map(({ count }) => count));
  const shapes = parts.flatMap(({ name, color, count }) => {
    const tall = Math.max(1.5, count * scale), thick = count * scale;
    const d = `M30 ${from} C180 ${from}, 180 ${to}, 330 ${to} L330 ${to + tall} C180 ${to + tall}, 180 ${from + thick}, 30 ${from + thick} Z`;
    const made = [h("svg:path", { d, fill: color, "fill-opacity": 0.55 }), h("svg:rect", { x: 330, y: to, width: 14, height: tall, fill: color }),
      h("svg:text", { x: 350, y: to + Math.max(tall / 2, 4) + 4 }, `${name} ${(100 * share(count, produced)).toFixed(1)} %`)];
    from += thick;
    to += Math.max(tall, 14) + gap;
    return made;
  });
  const height = Math.max(room + 40, to + 10);
  return [
    h("svg:svg", { class: "flow", viewBox: `0 0 460 ${height}`, role: "img", "aria-label": `of ${short(produced)} steps produced: ${parts.map(({ name, count }) => `${name} ${short(count)}`).join(", ")}` },
      h("svg:rect", { x: 16, y: 20, width: 14, height: room, fill: "currentColor", "fill-opacity": 0.5 }), h("svg:text", { x: 16, y: 14 }, `produced ${short(produced)}`), ...shapes),
    table(`Step accounting of ${name}`, ["term", "steps"], ["produced", ...TERMS.map(([name]) => name)].map((name) => [name, Number(counts[name] ?? 0).toLocaleString()])),
    h("p", {}, h("small", {}, `in flight: ${short(one?.in_flight)} of a budget of ${short(one?.budget)}`), h("meter", { min: 0, max: 1, value: share(one?.in_flight, one?.budget), "aria-label": `steps of ${name} in flight, as a share of the budget` })),
  ];
}

/** @param {[string, any][]} services */
function latencies(services) {
  const rows = services.flatMap(([name, one]) => entries(one?.histograms).filter(([what, spread]) => what.endsWith("_s") && spread?.count)
    .map(([what, spread]) => [name, what.slice(0, -2).replaceAll("_", " "), `${short(spread.p50 * 1e3)} ms`, `${short(spread.p99 * 1e3)} ms`]));
  return rows.length ? panel("Latencies", () => table("Latencies", ["service", "what", "median", "99 %"], rows)) : null;
}

/** @param {any} writers */
function writers(writers) {
  const rows = entries(writers).map(([name, one]) => [name, ...["delivered", "starts"].map((key) => short(one?.[key])), entries(one).filter(([key, count]) => !["delivered", "starts"].includes(key) && count).map(([key, count]) => `${key} ${count}`).join(", ")]);
  return rows.length ? panel("Writers", () => table("Writers", ["writer", "events", "starts", "not written"], rows)) : null;
}
