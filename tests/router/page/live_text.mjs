// The texts of the page's live panels for the metrics on stdin, as JSON by element: node live_text.mjs < metrics.txt
// The document has only what the page's modules use; `check.mjs` opens the page in a browser.

import { readFileSync } from "node:fs";
import { register } from "node:module";

const PAGE = new URL("../../../router/page/", import.meta.url).href;
register(`data:text/javascript,${encodeURIComponent(`
  export const resolve = (name, context, next) => next(name.startsWith("/page/") ? "${PAGE}" + name.slice(6) : name, context);
  export const load = (url, context, next) => next(url, url.startsWith("${PAGE}") ? { ...context, format: "module" } : context);
`)}`);

class Node {
  #text = "";
  children = [];
  hidden = false;
  get textContent() {
    return this.children.length ? this.children.map((each) => each.textContent).join("") : this.#text;
  }
  set textContent(text) {
    this.children = [];
    this.#text = String(text);
  }
  get lastChild() {
    return this.children.at(-1);
  }
  append(...nodes) {
    this.children.push(...nodes);
  }
  replaceChildren(...nodes) {
    this.children = nodes;
  }
  setAttribute() {}
}

const elements = {};
const metrics = readFileSync(0, "utf8");
Object.assign(globalThis, {
  Node,
  document: { hidden: false, createElement: () => new Node(), getElementById: (id) => (elements[id] ??= new Node()) },
  fetch: async () => ({ ok: true, text: async () => metrics }),
  setInterval: () => 0,
});

// A table's rows are lists of cells, all else is a text.
const shown = (node) => (node.children[0]?.children.length ? node.children.map((row) => row.children.map((cell) => cell.textContent)) : node.textContent);

const { startLive } = await import(`${PAGE}live.js`);
await startLive()();
console.log(JSON.stringify(Object.fromEntries(Object.entries(elements).map(([id, node]) => [id, shown(node)]))));
