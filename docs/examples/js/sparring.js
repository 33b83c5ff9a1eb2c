// sparring.js: connects a simulator in JavaScript to the trainer.
//
// One ES module without dependencies, for Node 18 or later and for browsers; types are in sparring.d.ts. It speaks
// version 1 of the protocol (docs/protocol.md) over tcp://HOST:PORT and unix:///PATH (Node), ws:// and wss:// (browsers,
// and Node where it has a WebSocket).
//
//     import { run } from "./sparring.js";
//     await run(game, { address: "ws://127.0.0.1:5010" });    // Node: by default $SPARRING_ADDRESS
//
// Data are columns: one array for a quantity of all agents, row by row. A column that is left out is not sent, which
// means 0 for rewards, and what docs/protocol.md says for the others.
//
// License: Apache-2.0.

const VERSION = 1;
const MOST = { bytes: 67108864, header: 262144, hello: 262144, arrays: 1024, dimensions: 8, items: 65536, depth: 32 };
const PAUSE = { first: 0.05, longest: 2 };
const LONGEST_TRY_S = 5;
const SHORTEST_S = 0.001;
const PARTING_S = 1;
/** Codes with which a WebSocket is closed for a mistake of this side: trying again does not help. */
const FINAL_CLOSE = { 1002: "malformed", 1003: "malformed", 1007: "malformed", 1009: "too_large" };

/** What was found, what was expected, and what to do; `code` is one of docs/protocol.md, or "settings", or "lost". */
export class SparringError extends Error {
  constructor(code, got, expected, remedy) {
    super(`${code}: got ${got}; expected ${expected}; ${remedy}`);
    Object.assign(this, { name: "SparringError", code, got, expected, remedy });
  }
}

/** The connection broke, or was silent for too long. */
export class LinkLost extends SparringError {
  constructor(got, expected = "a trainer that answers", remedy = "see the trainer's log for the cause") {
    super("lost", got, expected, remedy);
    this.name = "LinkLost";
  }
}

class StopRequested extends Error {}

const malformed = (got, expected) =>
  new SparringError("malformed", got, expected, "send messages in the format of docs/protocol.md");
const refused = (code, got, expected) =>
  new SparringError(code, got, expected, "correct the game; see docs/protocol.md");
const now = () => performance.now() / 1000;
const map = () => Object.create(null); // a trainer may send any key

// ---------------------------------------------------------------- MessagePack, as much of it as the protocol needs

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true });

/** Appends a value to a list of bytes. */
function pack(value, bytes) {
  if (value === null || value === undefined) bytes.push(0xc0);
  else if (value === true || value === false) bytes.push(value ? 0xc3 : 0xc2);
  else if (typeof value === "number" && Number.isSafeInteger(value)) packInteger(value, bytes);
  else if (typeof value === "number") packView(0xcb, 8, (view) => view.setFloat64(0, value), bytes);
  else if (typeof value === "string") packText(value, bytes);
  else if (Array.isArray(value)) {
    packSize(value.length, 0x90, 0xdc, bytes);
    for (const one of value) pack(one, bytes);
  } else {
    const entries = Object.entries(value);
    packSize(entries.length, 0x80, 0xde, bytes);
    for (const [key, one] of entries) {
      packText(key, bytes);
      pack(one, bytes);
    }
  }
}

function packView(first, size, set, bytes) {
  const view = new DataView(new ArrayBuffer(size));
  set(view);
  bytes.push(first, ...new Uint8Array(view.buffer));
}

function packInteger(value, bytes) {
  if (value >= 0 && value < 128) bytes.push(value);
  else packView(0xd3, 8, (view) => view.setBigInt64(0, BigInt(value)), bytes);
}

function packText(value, bytes) {
  const text = encoder.encode(value);
  if (text.length < 32) bytes.push(0xa0 | text.length);
  else packView(0xdb, 4, (view) => view.setUint32(0, text.length), bytes);
  for (const byte of text) bytes.push(byte);
}

function packSize(size, small, large, bytes) {
  if (size > MOST.items) throw refused("too_large", `${size} entries`, `at most ${MOST.items}`);
  if (size < 16) bytes.push(small | size);
  else packView(large + 1, 4, (view) => view.setUint32(0, size), bytes);
}

/** Returns the one value that bytes hold. */
function unpack(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  let at = 0;
  const take = (size) => {
    if (size > bytes.length - at) throw malformed("a header that ends within a value", "one MessagePack value");
    at += size;
    return at - size;
  };
  const unsigned = (size) => {
    const begin = take(size);
    if (size === 8) return whole(view.getBigUint64(begin));
    return size === 1 ? view.getUint8(begin) : size === 2 ? view.getUint16(begin) : view.getUint32(begin);
  };
  const signed = (size) => {
    const begin = take(size);
    if (size === 8) return whole(view.getBigInt64(begin));
    return size === 1 ? view.getInt8(begin) : size === 2 ? view.getInt16(begin) : view.getInt32(begin);
  };
  const count = (claimed) => {
    if (claimed > MOST.items || claimed > bytes.length - at)
      throw malformed(`${claimed} entries in a header`, `at most ${MOST.items}, and all of them`);
    return claimed;
  };
  const text = (size) => {
    const begin = take(count(size));
    try {
      return decoder.decode(bytes.subarray(begin, begin + size));
    } catch {
      throw malformed("a text that is not UTF-8", "UTF-8");
    }
  };
  const list = (size, depth) => {
    const values = [];
    for (let left = count(size); left > 0; left -= 1) values.push(next(depth + 1));
    return values;
  };
  const record = (size, depth) => {
    const fields = map();
    for (let left = count(size); left > 0; left -= 1) {
      const key = next(depth + 1);
      if (typeof key !== "string" || key in fields) throw malformed("a map with such keys", "texts, each once");
      fields[key] = next(depth + 1);
    }
    return fields;
  };
  const next = (depth) => {
    if (depth > MOST.depth) throw malformed("a header nested too deep", `at most ${MOST.depth} levels`);
    const first = unsigned(1);
    if (first < 0x80) return first;
    if (first < 0x90) return record(first & 0x0f, depth);
    if (first < 0xa0) return list(first & 0x0f, depth);
    if (first < 0xc0) return text(first & 0x1f);
    if (first >= 0xe0) return first - 256;
    if (first === 0xc0) return null;
    if (first === 0xc2 || first === 0xc3) return first === 0xc3;
    if (first === 0xca) return view.getFloat32(take(4));
    if (first === 0xcb) return view.getFloat64(take(8));
    if (first >= 0xcc && first <= 0xcf) return unsigned(1 << (first - 0xcc));
    if (first >= 0xd0 && first <= 0xd3) return signed(1 << (first - 0xd0));
    if (first >= 0xd9 && first <= 0xdb) return text(unsigned(1 << (first - 0xd9)));
    if (first === 0xdc || first === 0xdd) return list(unsigned(2 << (first - 0xdc)), depth);
    if (first === 0xde || first === 0xdf) return record(unsigned(2 << (first - 0xde)), depth);
    throw malformed("MessagePack of a type that the protocol has not", "nil, numbers, texts, lists, maps");
  };
  const value = next(0);
  if (at !== bytes.length) throw malformed(`${bytes.length - at} bytes after the header`, "one MessagePack value");
  return value;
}

function whole(value) {
  const number = Number(value);
  if (!Number.isSafeInteger(number)) throw malformed("a whole number beyond 2^53", "one that JavaScript can hold");
  return number;
}

// ---------------------------------------------------------------- messages

const TYPES = { "<f4": Float32Array, "|u1": Uint8Array, "|b1": Uint8Array, "<i4": Int32Array, "<i8": BigInt64Array };
const padding = (size) => (8 - (size % 8)) % 8;
const product = (shape) => shape.reduce((all, length) => all * length, 1);

/** Returns numbers as a typed array of the dtype; one that has this type already is not copied. */
function typed(values, dtype) {
  const Type = TYPES[dtype];
  if (values instanceof Type) return values;
  if (values instanceof Uint8ClampedArray && Type === Uint8Array)
    return new Uint8Array(values.buffer, values.byteOffset, values.length);
  return Type.from(values, dtype === "<i8" ? BigInt : dtype === "|b1" ? (one) => (one ? 1 : 0) : Number);
}

/** Collects the arrays of one message: its fields hold their indices. */
class Arrays {
  described = [];
  values = [];

  add(name, dtype, shape, values) {
    const array = typed(values, dtype);
    if (array.length !== product(shape))
      throw refused("shape", `${array.length} values in ${name}`, `${product(shape)}, for ${shape[0]} agents`);
    this.values.push(array);
    return this.described.push([dtype, shape]) - 1;
  }

  optional(name, dtype, shape, values) {
    return values === undefined || values === null ? null : this.add(name, dtype, shape, values);
  }
}

/** Returns the bytes of a message. */
function toBytes(type, body, arrays = new Arrays()) {
  const header = [];
  pack({ type, body, arrays: arrays.described }, header);
  const begin = 8 + header.length + padding(8 + header.length);
  const total = arrays.values.reduce((size, one) => size + one.byteLength + padding(one.byteLength), begin);
  const most = type === "hello" ? MOST.hello : MOST.bytes;
  if (total > most || header.length > MOST.header)
    throw refused("too_large", `a message of ${total} bytes, ${header.length} in its header`, `at most ${most}`);
  const bytes = new Uint8Array(total);
  const view = new DataView(bytes.buffer);
  view.setUint32(0, total, true);
  view.setUint32(4, header.length, true);
  bytes.set(header, 8);
  let at = begin;
  for (const one of arrays.values) {
    bytes.set(new Uint8Array(one.buffer, one.byteOffset, one.byteLength), at);
    at += one.byteLength + padding(one.byteLength);
  }
  return bytes;
}

/** Returns the length of the message that begins with these 8 bytes, checked before anything of that size exists. */
function lengths(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, 8);
  const [total, header] = [view.getUint32(0, true), view.getUint32(4, true)];
  if (total > MOST.bytes || header > MOST.header)
    throw new SparringError(
      "too_large",
      `a message of ${total} bytes with a header of ${header}`,
      `at most ${MOST.bytes} and ${MOST.header}`,
      "send less at once",
    );
  if (header === 0 || total < 8 + header) throw malformed("lengths that contradict each other", "a whole message");
  return { total, header };
}

/** Returns the message that bytes hold: type, body and arrays as {dtype, shape, values}. */
function fromBytes(bytes) {
  const aligned = bytes.slice(); // at offset 0 of its buffer, as typed arrays need it
  const { header } = lengths(aligned);
  const top = unpack(aligned.subarray(8, 8 + header));
  if (typeof top?.type !== "string" || typeof top.body !== "object" || top.body === null || !Array.isArray(top.arrays))
    throw malformed("a header without type, body or arrays", "all three");
  if (top.arrays.length > MOST.arrays) throw malformed("too many arrays", `at most ${MOST.arrays}`);
  let at = 8 + header + padding(8 + header);
  const arrays = top.arrays.map((one) => {
    const [dtype, shape] = Array.isArray(one) && one.length === 2 ? one : [];
    const Type = Object.hasOwn(TYPES, dtype ?? "") ? TYPES[dtype] : undefined;
    const sound = Array.isArray(shape) && shape.length <= MOST.dimensions;
    if (Type === undefined || !sound || !shape.every((length) => Number.isSafeInteger(length) && length >= 0))
      throw malformed("an array of another dtype or shape", "[dtype, shape]");
    const [count, size] = [product(shape), product(shape) * Type.BYTES_PER_ELEMENT];
    if (!(at + size <= aligned.length)) throw malformed("arrays beyond the message", "all arrays within it");
    const values = new Type(aligned.buffer, at, count);
    at += size + padding(size);
    return { dtype, shape, values };
  });
  if (at !== aligned.length) throw malformed(`${aligned.length} bytes`, `${at}`);
  return { type: top.type, body: top.body, arrays };
}

// ---------------------------------------------------------------- connections

/** One connection, whose transport calls `feed` and `lose`. A timer sends Ping while the game waits for something. */
class Link {
  #chunks = [];
  #size = 0;
  #inbox = [];
  #error = null;
  #wake = null;
  #beat = null;
  #since = now();
  #lastSent = now();

  constructor(timeoutS, signal) {
    this.timeoutS = timeoutS;
    this.signal = signal;
    this.transport = null;
  }

  get isLost() {
    return this.#error !== null;
  }

  /** Lets a waiting `receive` look again. */
  wake() {
    this.#wake?.();
  }

  /** Adds received bytes; where `isWhole`, they are exactly one message. */
  feed(bytes, isWhole) {
    try {
      if (isWhole && (bytes.length < 8 || lengths(bytes).total !== bytes.length))
        throw malformed(`a binary message of ${bytes.length} bytes`, "one message of the protocol");
      if (this.#size === 0) this.#since = now();
      this.#chunks.push(bytes);
      this.#size += bytes.length;
      for (let message = this.#next(); message !== null; message = this.#next()) this.#deliver(message);
    } catch (error) {
      this.lose(error, true);
    }
  }

  /** Notes why nothing more will come. */
  lose(error, ofTrainer = false) {
    error.ofTrainer = ofTrainer;
    this.#error ??= error;
    this.wake();
  }

  #next() {
    if (this.#size < 8) return null;
    if (this.#chunks[0].length < 8) this.#chunks = [this.#joined()];
    const { total } = lengths(this.#chunks[0]);
    if (this.#size < total) return null;
    const all = this.#joined();
    this.#chunks = all.length > total ? [all.subarray(total)] : [];
    this.#size = all.length - total;
    this.#since = now();
    return fromBytes(all.subarray(0, total));
  }

  #joined() {
    if (this.#chunks.length === 1) return this.#chunks[0];
    const all = new Uint8Array(this.#size);
    let at = 0;
    for (const one of this.#chunks) {
      all.set(one, at);
      at += one.length;
    }
    return all;
  }

  #deliver(message) {
    if (message.type === "ping") this.send("pong", { number: message.body.number ?? 0 });
    else if (message.type !== "pong") {
      if (this.#inbox.length >= 4) throw malformed("messages that nothing asked for", "one answer to each step");
      this.#inbox.push(message);
      this.wake();
    }
  }

  send(type, body, arrays) {
    this.transport.send(toBytes(type, body, arrays));
    this.#lastSent = now();
  }

  /** Sends Ping whenever nothing was sent for a heartbeat. */
  keepAlive(heartbeatS, timeoutS) {
    this.timeoutS = timeoutS;
    const interval = Math.min(heartbeatS, timeoutS / 3); // at least two Pings within the timeout
    const beat = () => {
      if (now() - this.#lastSent >= interval) this.send("ping", {});
      this.#beat = setTimeout(beat, 1000 * Math.max(interval / 10, this.#lastSent + interval - now()));
    };
    beat();
  }

  /** Returns the next message; `timeoutS` bounds a silence, and a message from its first byte to its last. */
  async receive() {
    if (this.#size === 0) this.#since = now();
    for (;;) {
      if (this.signal.aborted) throw new StopRequested();
      if (this.#inbox.length > 0) return this.#inbox.shift();
      if (this.#error !== null) throw this.#error;
      const left = this.#since + this.timeoutS - now();
      if (left <= 0) throw new LinkLost(`${this.#size} bytes of a message in ${this.timeoutS} s`);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, 1000 * left);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
      this.#wake = null;
    }
  }

  /** Sends a last message, if there is one, and closes the connection. */
  async close(type, body) {
    clearTimeout(this.#beat);
    if (this.transport === null) return;
    if (type !== undefined && !(this.#error instanceof LinkLost)) {
      this.send(type, body);
      await within(PARTING_S, this.transport.end()).catch(() => {}); // a trainer that does not close it in time
    }
    this.transport.destroy();
  }
}

/** Waits for `seconds`, or until the signal. */
function pause(seconds, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, 1000 * seconds);
    signal.addEventListener("abort", done);
  });
}

/** Returns what a promise becomes, or throws LinkLost after `seconds`. */
async function within(seconds, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new LinkLost("no answer to a connection in time")), 1000 * seconds);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** Connects a link over a socket of Node. */
async function openSocket(link, url, address, tls) {
  const net = await import(tls ? "node:tls" : "node:net");
  const place =
    url.protocol === "unix:"
      ? { path: address.slice("unix://".length) }
      : { host: url.hostname.replace(/^\[|\]$/g, ""), port: Number(url.port), noDelay: true };
  const socket = net.connect({ ...place, ...tls });
  const closed = new Promise((resolve) => socket.once("close", resolve));
  link.transport = {
    send: (bytes) => socket.write(bytes),
    end: () => (socket.end(), closed),
    destroy: () => socket.destroy(),
  };
  socket.on("data", (data) => link.feed(new Uint8Array(data.buffer, data.byteOffset, data.length), false));
  socket.on("end", () => link.lose(new LinkLost("the connection closed without Bye")));
  return new Promise((resolve, reject) => {
    socket.once(tls ? "secureConnect" : "connect", resolve);
    socket.on("error", (error) => {
      link.lose(new LinkLost(error.message));
      reject(new LinkLost(error.message));
    });
  });
}

/** Connects a link over a WebSocket. */
async function openWebSocket(link, address) {
  const socket = new globalThis.WebSocket(address);
  socket.binaryType = "arraybuffer";
  const closed = new Promise((resolve) => socket.addEventListener("close", resolve));
  link.transport = {
    send: (bytes) => socket.readyState === socket.OPEN && socket.send(bytes),
    end: () => (socket.close(1000), closed),
    destroy: () => socket.close(),
  };
  socket.addEventListener("message", ({ data }) => {
    if (data instanceof ArrayBuffer) link.feed(new Uint8Array(data), true);
    else link.lose(malformed("a text message", "binary messages"), true);
  });
  return new Promise((resolve, reject) => {
    socket.addEventListener("open", resolve, { once: true });
    socket.addEventListener("close", ({ code, reason }) => {
      const remedy = "start the run first; its pipeline.websocket_origins must hold the origin of a page";
      const lost = FINAL_CLOSE[code]
        ? new SparringError(FINAL_CLOSE[code], reason || `close code ${code}`, "messages within the limits", "correct the game")
        : new LinkLost(`a WebSocket that closed (code ${code} ${reason})`, "a trainer that answers", remedy);
      link.lose(lost);
      reject(lost);
    });
  });
}

/** Returns a function that connects a link to the address. */
function opener(address, tls) {
  let url;
  try {
    url = new URL(address);
  } catch {
    url = { protocol: "" };
  }
  const isNode = globalThis.process?.versions?.node !== undefined;
  const problem = (remedy) =>
    new SparringError("settings", `address ${JSON.stringify(address)}`, "one that this program can reach", remedy);
  if (url.protocol === "ws:" || url.protocol === "wss:") {
    if (globalThis.WebSocket === undefined)
      throw problem("use Node 22 or later, or node --experimental-websocket, or a tcp:// address");
    return (link) => openWebSocket(link, address);
  }
  if (!isNode || !((url.protocol === "tcp:" && url.hostname && url.port) || url.protocol === "unix:"))
    throw problem(isNode ? "write tcp://HOST:PORT, unix:///PATH or ws://HOST:PORT" : "write ws://HOST:PORT");
  return (link) => openSocket(link, url, address, url.protocol === "tcp:" ? tls : undefined);
}

// ---------------------------------------------------------------- the conversation

const nameOf = (behavior) => behavior.split("?")[0];

function specsOf(behaviors) {
  const specs = map();
  for (const [id, { observations, actions }] of Object.entries(behaviors))
    specs[id] = {
      observations: observations.map(({ name, shape, dtype = "float32", kind = "vector" }) => ({ name, shape, dtype, kind })),
      actions: { continuous: actions.continuous ?? 0, discrete: actions.discrete ?? [] },
    };
  return specs;
}

/** Returns the fields that decisions and ends have in common. */
function rowsOf(arrays, rows, { observations, actions }) {
  const n = rows.agents.length;
  if (rows.observations.length !== observations.length)
    throw refused("shape", `${rows.observations.length} observations`, `${observations.length}, as in the spec`);
  return {
    agents: arrays.add("agents", "<i8", [n], rows.agents),
    observations: observations.map(({ name, shape, dtype }, index) =>
      arrays.add(name, dtype === "uint8" ? "|u1" : "<f4", [n, ...shape], rows.observations[index]),
    ),
    rewards: arrays.add("rewards", "<f4", [n], rows.rewards ?? new Float32Array(n)),
    group_rewards: arrays.optional("group_rewards", "<f4", [n], rows.groupRewards),
    matches: arrays.optional("matches", "<i8", [n], rows.matches),
    did_continuous: arrays.optional("did_continuous", "<f4", [n, actions.continuous], rows.didContinuous),
    did_discrete: arrays.optional("did_discrete", "<i4", [n, actions.discrete.length], rows.didDiscrete),
  };
}

function reportOf(arrays, { behavior, decisions, ends }, spec) {
  const choices = spec.actions.discrete.reduce((all, one) => all + one, 0);
  return {
    behavior,
    decisions: decisions && {
      ...rowsOf(arrays, decisions, spec),
      groups: arrays.optional("groups", "<i8", [decisions.agents.length], decisions.groups),
      masks: arrays.optional("masks", "|b1", [decisions.agents.length, choices], decisions.masks),
    },
    ends: ends && {
      ...rowsOf(arrays, ends, spec),
      interrupted: arrays.add("interrupted", "|b1", [ends.agents.length], ends.interrupted ?? new Uint8Array(ends.agents.length)),
      outcomes: arrays.optional("outcomes", "<f4", [ends.agents.length], ends.outcomes),
    },
  };
}

const mistake = (code, got, expected, remedy) =>
  Object.assign(new SparringError(code, got, expected, remedy), { ofTrainer: true });

class Client {
  #steps = map();
  #open = map(); // agents that got an action, until they are reported again
  #announced = new Set();
  #parameters = map();
  #process = Array.from({ length: 16 }, () => Math.floor(16 * Math.random()).toString(16)).join("");
  #link = null;
  #begun = false;

  constructor(game, options, signal) {
    this.game = game;
    this.options = options;
    this.signal = signal;
    this.open = opener(options.address, options.tls);
    this.specs = specsOf(game.behaviors());
    this.scripts = game.scripts?.() ?? {};
  }

  wake() {
    this.#link?.wake();
  }

  async play() {
    const { connectTimeoutS, reconnect } = this.options;
    let [deadline, delay] = [now() + connectTimeoutS, PAUSE.first];
    for (;;) {
      try {
        return this.#result(await this.#converse(deadline));
      } catch (error) {
        if (error instanceof StopRequested) return this.#result(await this.#end("stopped"));
        if (!(error instanceof LinkLost)) {
          await this.#fail(error);
          throw error;
        }
        await this.#drop();
        if (this.#begun) {
          // the connection had worked: a new attempt begins
          if (!reconnect) throw error;
          [deadline, delay, this.#begun] = [now() + connectTimeoutS, PAUSE.first, false];
        }
        const left = deadline - now();
        if (left <= 0)
          throw new LinkLost(
            `no trainer at ${this.options.address} in ${connectTimeoutS} s (last: ${error.got})`,
            "one that keeps the connection",
            error.remedy,
          );
        await pause(Math.min(delay, left), this.signal);
        if (this.signal.aborted) return this.#result("stopped");
        delay = Math.min(2 * delay, PAUSE.longest);
      }
    }
  }

  #result(reason) {
    return { steps: { ...this.#steps }, reason };
  }

  async #drop(type, body) {
    const link = this.#link;
    this.#link = null;
    this.#open = map();
    await link?.close(type, body);
  }

  async #end(reason) {
    await this.#drop("bye", { reason: reason.slice(0, 1000), steps: this.#steps });
    return reason;
  }

  /** Reports a mistake of the trainer to it, and one of the game as the reason of a Bye. */
  async #fail(error) {
    const { code, got, expected, remedy } = error;
    if (error.isFault) await this.#drop();
    else if (error.ofTrainer) await this.#drop("fault", { code, got, expected, remedy });
    else await this.#end(`failed: ${error.message}`);
  }

  async #receive() {
    const message = await this.#link.receive();
    if (message.type !== "fault") return message;
    const { code, got, expected, remedy } = message.body;
    throw Object.assign(new SparringError(code, got, expected, remedy), { isFault: true });
  }

  /** Leads one connection from Hello to Bye, whose reason it returns. */
  async #converse(deadline) {
    const left = Math.max(SHORTEST_S, deadline - now());
    const link = new Link(left, this.signal);
    this.#link = link;
    await within(Math.min(left, LONGEST_TRY_S), this.open(link));
    this.#hello();
    let message = await this.#receive();
    if (message.type === "bye") return this.#end(message.body.reason ?? "");
    if (message.type !== "welcome") throw this.#unexpected(message, "welcome");
    const { version, heartbeat_s: heartbeatS, timeout_s: timeoutS } = message.body;
    if (version !== VERSION) throw mistake("version", `version ${version}`, `${VERSION}`, "use a kit of this version");
    if (!(heartbeatS >= SHORTEST_S && timeoutS >= SHORTEST_S))
      throw mistake("internal", "times below 0.001 s", "longer ones", "correct the trainer's times");
    link.keepAlive(heartbeatS, timeoutS);
    let reports = null;
    for (let sequence = 0; ; sequence += 1) {
      message = await this.#receive();
      this.#begun = true;
      if (message.type === "bye") return this.#end(message.body.reason ?? "");
      if (message.type === "reset") {
        this.#parameters = Object.assign(map(), message.body.parameters);
        const seed = message.body.seed ?? this.options.seed;
        this.options.seed = null; // later episodes continue the sequence of the first seed
        this.#open = map();
        reports = await this.game.reset(this.#parameters, seed);
      } else if (message.type === "act" && reports !== null) {
        const actions = this.#accept(message, reports, sequence - 1);
        Object.assign(this.#parameters, message.body.parameters);
        reports = await this.game.step(actions, this.#parameters);
      } else {
        throw this.#unexpected(message, reports === null ? "reset" : "act or reset");
      }
      if (this.signal.aborted) throw new StopRequested();
      this.#report(reports, sequence);
    }
  }

  #unexpected(message, expected) {
    return mistake("unexpected_message", `'${message.type}'`, expected, "follow the table in docs/protocol.md");
  }

  #hello() {
    const { number, credential } = this.options;
    this.#announced = new Set(Object.keys(this.specs));
    this.#link.send("hello", {
      version: VERSION,
      name: this.game.name,
      behaviors: this.specs,
      number,
      steps: this.#steps,
      credential,
      scripts: this.scripts,
      process: this.#process,
    });
  }

  #announce(reports) {
    const unknown = reports.filter(({ behavior }) => !this.#announced.has(behavior));
    if (unknown.length === 0) return;
    const added = map();
    for (const [id, spec] of Object.entries(specsOf(this.game.behaviors())))
      if (!this.#announced.has(id)) added[id] = spec;
    for (const { behavior } of unknown)
      if (!(behavior in added))
        throw refused("unknown_behavior", `a report of ${behavior}`, "a behavior id that behaviors() returns");
    this.#link.send("behaviors", { behaviors: added });
    Object.assign(this.specs, added);
    for (const id of Object.keys(added)) this.#announced.add(id);
  }

  #report(reports, sequence) {
    this.#announce(reports);
    const arrays = new Arrays();
    const described = reports.map((one) => reportOf(arrays, one, this.specs[one.behavior]));
    const statistics = (this.game.statistics?.() ?? []).map(({ name, value, aggregation = "average" }) => ({
      name,
      value,
      aggregation,
    }));
    if (this.#link.isLost) return; // `receive` says why
    this.#link.send("step", { sequence, reports: described, statistics }, arrays);
    for (const one of reports) this.#count(one);
  }

  /** Counts the outcomes of acted decisions in a report that was sent. */
  #count({ behavior, decisions, ends }) {
    const waiting = this.#open[behavior];
    if (waiting === undefined) return;
    for (const agents of [decisions?.agents ?? [], ends?.agents ?? []])
      for (const agent of agents)
        if (waiting.delete(Number(agent))) this.#steps[nameOf(behavior)] = (this.#steps[nameOf(behavior)] ?? 0) + 1;
  }

  /** Returns the actions of an Act, which must answer the decisions row by row. */
  #accept(act, reports, sequence) {
    const asked = map();
    for (const { behavior, decisions } of reports) if (decisions) asked[behavior] = decisions;
    const all = map();
    for (const entry of Array.isArray(act.body.actions) ? act.body.actions : []) {
      const { behavior } = entry;
      if (act.body.sequence !== sequence || !(behavior in asked) || behavior in all)
        throw mistake(
          "sequence",
          `act ${act.body.sequence} for ${behavior}`,
          `act ${sequence} for ${Object.keys(asked)}`,
          "answer the last step, and each behavior with decisions once",
        );
      all[behavior] = this.#actionsOf(act, entry, asked[behavior]);
    }
    for (const [behavior, { agents }] of Object.entries(asked)) {
      if (agents.length === 0) continue;
      if (act.body.sequence !== sequence || !(behavior in all))
        throw mistake("shape", `no actions for ${behavior}`, "one row for each decision", "answer each decision");
      this.#open[behavior] ??= new Set();
      for (const agent of agents) this.#open[behavior].add(Number(agent));
    }
    return all;
  }

  #actionsOf(act, entry, { agents }) {
    const { continuous, discrete } = this.specs[entry.behavior].actions;
    const n = agents.length;
    const column = (name, dtype, shape) => {
      const array = act.arrays[entry[name]];
      if (array === undefined || array.dtype !== dtype || array.shape.join() !== shape.join())
        throw mistake(
          "shape",
          `${name} of another dtype or shape for ${entry.behavior}`,
          `${dtype} [${shape}]`,
          "answer each decision with one row of actions",
        );
      return array.values;
    };
    const actions = {
      agents: Array.from(column("agents", "<i8", [n]), Number),
      continuous: column("continuous", "<f4", [n, continuous]),
      discrete: column("discrete", "<i4", [n, discrete.length]),
      scripts: (entry.scripts ?? null) === null ? null : column("scripts", "<i4", [n]),
    };
    if (actions.agents.some((agent, row) => agent !== Number(agents[row])))
      throw mistake("unknown_agent", "actions of other agents", "those of the step in its order", "answer each decision");
    if (actions.discrete.some((choice, index) => choice < 0 || choice >= discrete[index % discrete.length]))
      throw mistake("shape", `a choice that ${entry.behavior} has not`, "one of the branch's", "choose from the spec");
    const offered = this.scripts[nameOf(entry.behavior)]?.length ?? 0;
    if (actions.scripts?.some((one) => one < 0 || one > offered))
      throw mistake("scripts", `a script that ${entry.behavior} has not`, "one that hello names", "ask for one of them");
    return actions;
  }
}

function numberFrom(variable, environment) {
  const text = environment[variable];
  if (!text) return null;
  if (!/^-?\d+$/.test(text)) throw new SparringError("settings", `$${variable} ${text}`, "a whole number", "correct it");
  return Number(text);
}

/**
 * Plays a game for the trainer until either side says Bye, and reconnects when the connection breaks.
 *
 * While the game computes without giving control back (`await`), no Ping can be sent: a frame must take less than the
 * trainer's `simulator_timeout_s`.
 *
 * It throws SparringError where the trainer refuses the game, either side breaks the protocol, or an option is wrong,
 * LinkLost where no trainer answers in time, and what the game throws.
 */
export async function run(game, options = {}) {
  const program = globalThis.process?.versions?.node ? globalThis.process : null;
  const environment = program?.env ?? {};
  const settings = {
    address: options.address ?? environment.SPARRING_ADDRESS ?? "",
    number: options.number ?? numberFrom("SPARRING_NUMBER", environment),
    seed: options.seed ?? numberFrom("SPARRING_SEED", environment),
    credential: options.credential ?? environment.SPARRING_CREDENTIAL ?? "",
    connectTimeoutS: options.connectTimeoutS ?? 60,
    reconnect: options.reconnect ?? true,
    tls: options.tls,
  };
  if (settings.address.startsWith("tcp:") && environment.SPARRING_KEYS && !settings.tls)
    throw new SparringError(
      "settings",
      "$SPARRING_KEYS without the option tls",
      "tls: {ca, cert, key}, with the files of that folder",
      "see docs/security.md; or let the run listen at unix:///PATH",
    );
  const stopping = new AbortController();
  const client = new Client(game, settings, stopping.signal);
  const stop = () => {
    stopping.abort();
    client.wake();
  };
  if (options.signal?.aborted) stop();
  options.signal?.addEventListener("abort", stop, { once: true });
  for (const name of ["SIGINT", "SIGTERM"]) program?.once(name, stop);
  try {
    return await client.play();
  } finally {
    for (const name of ["SIGINT", "SIGTERM"]) program?.off(name, stop);
    options.signal?.removeEventListener("abort", stop);
    await game.close?.();
  }
}
