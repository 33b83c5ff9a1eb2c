/** Plays recorded matches, two side by side, on canvases; `docs/page.md` describes the format. */

import { duration, entries, h, list, short } from "/assets/dom.js";
import { address, json } from "/assets/data.js";

const TEAMS = ["#3f90da", "#e76300", "#832db6", "#ffa90e", "#94a4a2", "#bd1f01"];
const FILLS = /** @type {Object<string, string>} */ ({ ground: "#2f6b4f", wall: "#5b6570", ball: "#ffffff", goal: "#ffa90e" });
const EVERY_MS = 10000;
const MOST_FRAMES = 20000;
/** Height of a field as a share of its width, beyond which it is drawn smaller. */
const MOST_TALL = 1.5;

export class Watch {
  /** @param {string} run */
  constructor(run) {
    this.run = run;
    this.screens = ["First", "Second"].map((name) => new Screen(run, name, () => this.arrange()));
    this.time = 0;
    this.last = 0;
    this.isPlaying = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.button = h("button", { type: "button", click: () => this.play(!this.isPlaying) }, "");
    this.scrub = h("input", { id: "scrub", type: "range", min: 0, max: 1000, value: 0, "aria-label": "place in the match", input: () => {
      this.play(false);
      this.time = (Number(this.scrub.value) / 1000) * this.length();
      this.screens.forEach((one) => one.draw(this.time));
      this.tell();
    } });
    this.speed = h("select", { id: "speed" }, ...[0.5, 1, 2, 4].map((one) => h("option", { value: one, selected: one === 2 }, `${one}\u00d7`)));
    this.clock = h("span", {}); // no output, which would be read out at every change
    this.note = h("p", { class: "quiet" }, "Looking for recorded matches");
    this.timing = h("div", { class: "controls timing" }, this.scrub, this.clock, h("label", { for: "speed" }, "Speed"), this.speed);
    this.stage = h("div", { hidden: true },
      h("form", { class: "controls", submit: (/** @type {Event} */ event) => event.preventDefault() }, this.button, this.timing),
      h("div", { class: "screens" }, ...this.screens.map((one) => one.element)));
    this.element = h("div", {}, h("h1", {}, run), this.note, this.stage);
    this.known = "";
    this.timer = 0;
    this.frame = requestAnimationFrame((now) => this.tick(now));
    this.play(this.isPlaying);
    this.load();
  }

  async load() {
    try {
      const found = list(await json("replays", { run: this.run })), known = found.map((one) => one.name).join("\0");
      if (known !== this.known) this.screens.forEach((one, at) => one.offer(found, at));
      this.known = known;
      this.stage.hidden = !found.length;
      this.note.textContent = found.length ? "" : "No match is recorded yet: docs/page.md says which games record some, and how others can.";
    } catch (error) {
      this.note.textContent = String(error);
    }
    this.timer = setTimeout(() => this.load(), EVERY_MS);
  }

  /** @param {boolean} isPlaying */
  play(isPlaying) {
    this.isPlaying = isPlaying;
    this.button.textContent = isPlaying ? "Pause" : "Play";
    this.screens.forEach((one) => one.still(!isPlaying));
  }

  /** Adapts the controls to what is shown: a video has no time of its own. */
  arrange() {
    this.timing.hidden = !this.screens.some((one) => one.length);
    this.screens.forEach((one) => one.still(!this.isPlaying));
  }

  length() {
    return Math.max(0.001, ...this.screens.map((one) => one.length));
  }

  /** @param {number} now */
  tick(now) {
    const passed = Math.min(0.1, (now - this.last) / 1000);
    this.last = now;
    if (this.isPlaying && this.screens.some((one) => one.length)) {
      this.time += passed * Number(this.speed.value);
      if (this.time > this.length() + 1) this.time = 0;
      this.scrub.value = String((1000 * Math.min(this.time, this.length())) / this.length());
      this.screens.forEach((one) => one.draw(this.time));
      this.tell();
    }
    this.frame = requestAnimationFrame((next) => this.tick(next));
  }

  tell() {
    this.clock.textContent = `${Math.min(this.time, this.length()).toFixed(1)} of ${this.length().toFixed(1)} s`;
    this.scrub.setAttribute("aria-valuetext", this.clock.textContent);
  }

  close() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
  }
}

/** One match, with the choice which. */
class Screen {
  /** @param {string} run @param {string} name @param {() => void} onLoad */
  constructor(run, name, onLoad) {
    this.run = run;
    this.onLoad = onLoad;
    this.length = 0;
    this.scene = /** @type {any} */ ({});
    this.frames = /** @type {{places: number[][], score: any[]}[]} */ ([]);
    this.select = h("select", { "aria-label": `${name} match`, change: () => this.load() });
    this.canvas = h("canvas", { role: "img", "aria-label": "no match" });
    this.video = h("img", { alt: "", hidden: true, load: onLoad });
    this.score = h("strong", {});
    this.note = h("span", { class: "quiet" });
    this.board = h("p", { class: "score" });
    this.element = h("figure", { class: "chart", "aria-label": `${name} screen` }, this.select, this.canvas, this.video, this.board);
    this.wasChosen = false;
  }

  /** Offers matches; by default the first screen shows the oldest, the second the newest. @param {any[]} found @param {number} at */
  offer(found, at) {
    const before = this.select.value, own = found.filter((one) => !one.of);
    const title = (/** @type {any} */ one) => [one.of || "training", typeof one.step === "number" ? `${short(one.step)} steps` : "", new Date(one.time_s * 1000).toLocaleTimeString(), one.name.endsWith(".gif") ? "video" : ""].filter(Boolean).join(", ");
    this.select.replaceChildren(...found.map((one) => h("option", { value: one.name }, title(one))));
    const wanted = (own.length ? own : found)[at ? (own.length ? own : found).length - 1 : 0];
    this.select.value = found.some((one) => one.name === before) ? before : wanted?.name ?? "";
    if (this.select.value !== before) this.load();
  }

  async load() {
    const name = this.select.value, isVideo = name.endsWith(".gif"), place = address("replay", { run: this.run, name });
    this.length = 0;
    this.video.hidden = !isVideo;
    this.canvas.hidden = isVideo;
    if (isVideo) {
      this.video.src = place;
      this.video.alt = `video ${name}`;
      this.board.replaceChildren();
      return;
    }
    try {
      const text = await (await fetch(place)).text();
      if (name !== this.select.value) return;
      const lines = text.split("\n").filter(Boolean).slice(0, MOST_FRAMES);
      this.scene = JSON.parse(lines[0]);
      this.frames = lines.slice(1).map((line) => {
        const frame = list(JSON.parse(line));
        return { places: frame.filter(Array.isArray), score: list(frame[frame.length - 1]?.score) };
      });
      if (this.scene.format !== "sparring-replay" || !(this.scene.frame_s > 0) || list(this.scene.field).length !== 4) throw new Error("it is no replay");
      this.length = this.frames.length * this.scene.frame_s;
      const result = entries(this.scene.result).map(([team, points]) => `team ${Number(team) + 1} ${points === 1 ? "won" : points === 0.5 ? "drew" : points === 0 ? "lost" : short(points)}`).join(", ");
      this.result = result || "no result";
      const teams = [...new Set(list(this.scene.moving).map((one) => one?.team).filter(Number.isInteger))].sort((a, b) => a - b).slice(0, TEAMS.length);
      const names = teams.map((team) => h("span", {}, chip(team), `Team ${team + 1}`)), half = Math.ceil(names.length / 2);
      this.board.replaceChildren(...names.slice(0, half), this.score, ...names.slice(half), this.note);
      this.canvas.setAttribute("aria-label", `${this.scene.game ?? "match"} of ${duration(this.length)}: ${this.result}`);
      this.draw(0);
      this.onLoad();
    } catch (error) {
      this.board.replaceChildren(h("span", { class: "bad" }, `This match cannot be shown: ${error}`));
    }
  }

  /** Stops a video at its present picture, or lets it go on. @param {boolean} isStill */
  still(isStill) {
    if (!this.select.value.endsWith(".gif") || !this.video.naturalWidth) return;
    [this.canvas.width, this.canvas.height] = [this.video.naturalWidth, this.video.naturalHeight];
    this.canvas.style.height = "";
    this.canvas.setAttribute("aria-label", this.video.alt);
    this.canvas.getContext("2d").drawImage(this.video, 0, 0);
    this.canvas.hidden = !isStill;
    this.video.hidden = isStill;
  }

  /** @param {number} time seconds since the beginning */
  draw(time) {
    if (!this.length) return;
    const [left, bottom, right, top] = this.scene.field, width = this.canvas.clientWidth;
    const zoom = Math.min(width / (right - left), MOST_TALL * width / (top - bottom)), height = zoom * (top - bottom), pixels = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * pixels) || this.canvas.height !== Math.round(height * pixels)) {
      this.canvas.width = Math.round(width * pixels);
      this.canvas.height = Math.round(height * pixels);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(pixels * zoom, 0, 0, -pixels * zoom, -left * pixels * zoom, top * pixels * zoom);
    context.clearRect(left, bottom, right - left, top - bottom);
    for (const one of list(this.scene.fixed)) shape(context, one, [0, 0, 0], zoom);
    const at = Math.min(this.frames.length - 1, time / this.scene.frame_s), before = Math.floor(at), share = at - before;
    const { places: frame, score } = this.frames[before], next = this.frames[before + 1]?.places ?? frame;
    list(this.scene.moving).forEach((one, number) => {
      const [a, b] = [frame[number], next[number] ?? frame[number]];
      if (a) shape(context, one, [a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + turn(b[2] - a[2]) * share], zoom);
    });
    const isOver = before >= this.frames.length - 1;
    this.score.textContent = score.map((points) => short(points)).join(" : ");
    this.note.textContent = isOver ? `${this.result}, after ${this.length.toFixed(1)} s` : `${Math.min(time, this.length).toFixed(1)} s`;
  }
}

/** @type {string} */
Screen.prototype.result = "";

/** Returns a square in the color of a team. @param {number} team */
function chip(team) {
  const found = h("i", { class: "mark" });
  found.style.background = TEAMS[team % TEAMS.length];
  return found;
}

/** Returns an angle from -pi to pi. @param {number} angle */
function turn(angle) {
  return angle - 2 * Math.PI * Math.round(angle / (2 * Math.PI)) || 0;
}

/** Draws one shape. @param {CanvasRenderingContext2D} context @param {any} one @param {number[]} place @param {number} zoom pixels of a unit */
function shape(context, one, [x, y, angle], zoom) {
  const team = Number.isInteger(one?.team) ? one.team : /^team \d$/.test(one?.fill) ? Number(one.fill.slice(5)) : null;
  const fill = team !== null ? TEAMS[team % TEAMS.length] : FILLS[one?.fill] ?? (/^#[0-9a-f]{6}$/i.test(one?.fill) ? one.fill : null);
  context.save();
  context.translate(x, y);
  context.rotate(angle || 0);
  context.beginPath();
  const [rect, circle, line, { radius }] = [list(one?.rect), list(one?.circle), list(one?.line), one ?? {}];
  if (rect.length === 4) context.rect(rect[0], rect[1], rect[2] - rect[0], rect[3] - rect[1]);
  else if (circle.length === 3) context.arc(circle[0], circle[1], Math.max(0, circle[2]), 0, 2 * Math.PI);
  else if (line.length === 4) context.moveTo(line[0], line[1]), context.lineTo(line[2], line[3]);
  else if (radius > 0) context.arc(0, 0, radius, 0, 2 * Math.PI);
  if (fill) {
    context.fillStyle = fill;
    context.fill();
  }
  context.lineWidth = 1.5 / zoom;
  context.strokeStyle = radius > 0 ? "#10151b" : "#ffffffb0";
  context.stroke();
  if (radius > 0 && team !== null) {
    context.beginPath();
    context.moveTo(radius * 0.35, 0);
    context.lineTo(radius * 1.25, 0);
    context.lineWidth = 3 / zoom;
    context.stroke();
  }
  if (one?.label && radius > 0) {
    context.rotate(-(angle || 0));
    context.scale(1, -1);
    context.fillStyle = "#fff";
    context.font = `700 ${radius * 0.95}px system-ui`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(String(one.label).slice(0, 8), 0, 0);
  }
  context.restore();
}
