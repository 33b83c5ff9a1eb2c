/** Asks the server, and follows what it streams. */

/**
 * @typedef {{mean: Float32Array, low: Float32Array, high: Float32Array}} Column
 * @typedef {{step: Float64Array, time: Float64Array, columns: Map<string, Column>, isWhole: boolean}} Series
 */

/** @param {string} path @param {Object<string, any>} asked lists are repeated, null is left out */
export function address(path, asked) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(asked)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined) words.append(name, String(one));
  }
  return `/api/${path}?${words}`;
}

/** @param {string} path @param {Object<string, any>} asked @returns {Promise<Response>} */
async function get(path, asked) {
  const answer = await fetch(address(path, asked));
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

/** @param {string} path @param {Object<string, any>} asked @returns {Promise<any>} */
export async function json(path, asked) {
  return (await get(path, asked)).json();
}

/**
 * Returns columns of a behavior over steps and time; `encoded` of the server says how they are written.
 * @param {Object<string, any>} asked
 * @returns {Promise<Series>}
 */
export async function series(asked) {
  const bytes = await (await get("series", asked)).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const { names, rows, isWhole } = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  let at = 4 + length;
  const doubles = () => new Float64Array(bytes, (at += 8 * rows) - 8 * rows, rows);
  const floats = () => new Float32Array(bytes, (at += 4 * rows) - 4 * rows, rows);
  const step = doubles(), time = doubles();
  const columns = new Map(names.map((/** @type {string} */ name) => [name, { mean: floats(), low: floats(), high: floats() }]));
  return { step, time, columns, isWhole };
}

/**
 * Follows the stream of the server until the returned function is called; after a pause of the server it goes on.
 *
 * A browser has six connections to a server, so a page that is not looked at gives back its own.
 * @param {string | null} run
 * @param {Object<string, (content: any) => void>} listeners by the name of the event
 * @param {(isOpen: boolean) => void} onLink
 * @returns {() => void}
 */
export function follow(run, listeners, onLink) {
  /** @type {EventSource | null} */
  let source = null;
  let timer = 0;
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const open = () => {
    close();
    if (document.hidden) return;
    source = new EventSource(address("events", { run }));
    source.onopen = () => onLink(true);
    source.onerror = () => {
      onLink(false);
      close();
      timer = setTimeout(open, 1000);
    };
    for (const [name, listener] of Object.entries(listeners)) {
      source.addEventListener(name, (event) => listener(JSON.parse(event.data)));
    }
  };
  document.addEventListener("visibilitychange", open);
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  if (document.readyState === "complete") open();
  return () => {
    document.removeEventListener("visibilitychange", open);
    removeEventListener("pagehide", close);
    removeEventListener("pageshow", open);
    close();
  };
}
