// Tokens by source: each source has its own underline, so no colour is needed to distinguish them.

import { post, settings } from "/page/api.js";
import { element } from "/page/dom.js";

export const SOURCES = {
  accepted: "accepted: a draft token that the target confirmed (solid)",
  forced: "forced: the grammar left one token, drafted for free (double)",
  recovered: "recovered: the target's own, where a draft was rejected (dashed)",
  bonus: "bonus: one more behind drafts that all stood (dotted)",
  plain: "plain: a pass without drafts (thin)",
};

export function fillLegend(list) {
  list.replaceChildren(...Object.entries(SOURCES).map(([name, meaning]) => {
    const item = element("li");
    item.append(element("span", name, `token ${name}`), document.createTextNode(meaning.slice(name.length)));
    return item;
  }));
}

// Texts and probabilities of `ids` after `promptIds`: one pass over the prompt, echoed with its logprobs.
export async function readTokens(promptIds, ids) {
  const body = { model: settings.model, prompt: [...promptIds, ...ids], max_tokens: 1, echo: true, logprobs: 1, temperature: 0 };
  const { tokens, token_logprobs: logprobs } = (await post("/v1/completions", body)).choices[0].logprobs;
  const first = promptIds.length;
  return ids.map((_, index) => ({ text: tokens[first + index], logprob: logprobs[first + index] }));
}

// Shows the tokens in `box`; hover, or arrow keys in the focused box, describe one in `detail`.
export function showTokens(box, detail, tokens, sources, rejected = new Map()) {
  const describe = (index) => {
    const [source, method] = (sources[index] || "plain").split(":");
    const parts = [`token ${index + 1}, ${JSON.stringify(tokens[index].text)}: ${source}`];
    if (method) parts.push(`drafted by ${method}`);
    if (tokens[index].logprob != null) parts.push(`probability ${(100 * Math.exp(tokens[index].logprob)).toFixed(1)}%`);
    if (rejected.has(index)) parts.push(`rejected: ${JSON.stringify(rejected.get(index))}`);
    return parts.join(", ");
  };
  const spans = tokens.map((token, index) => {
    const span = element("span", token.text, `token ${(sources[index] || "plain").split(":")[0]}`);
    span.title = describe(index);
    span.addEventListener("pointerenter", () => choose(index));
    return span;
  });
  let current = -1;
  const choose = (index) => {
    if (spans[current]) spans[current].classList.remove("current");
    current = Math.max(0, Math.min(index, spans.length - 1));
    if (!spans[current]) return;
    spans[current].classList.add("current");
    detail.textContent = describe(current);
  };
  box.replaceChildren(...spans);
  box.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step || !spans.length) return;
    event.preventDefault();
    choose(current + step);
    spans[current].scrollIntoView({ block: "nearest" });
  };
}
