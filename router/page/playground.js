// One request with every option, its unverified drafts after the text, and the request as text to copy.

import { settings, stream } from "/page/api.js";
import { byId, element, fillTable, showTrouble } from "/page/dom.js";
import { showTokens } from "/page/sources.js";

const FORM_SCHEMA = { type: "object", properties: { name: { type: "string", maxLength: 20 }, kind: { enum: ["function", "class"] }, lines: { type: "integer", minimum: 0, maximum: 99 } }, required: ["name", "kind", "lines"], additionalProperties: false };

const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
const text = (id) => byId(id).value || undefined;

function speculation() {
  const asked = { num_tokens: number("play-k"), verify: text("play-verify"), method: text("play-method") };
  if (byId("play-enabled").value === "off") asked.enabled = false;
  return JSON.parse(JSON.stringify(asked)); // without undefined fields
}

// The request as a user would send it; the page adds the fields that it displays.
function request() {
  const isChat = byId("play-endpoint").value !== "completions";
  const prompt = byId("play-prompt").value;
  const body = {
    model: settings.model,
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: number("play-tokens"),
    temperature: number("play-temperature"),
    seed: number("play-seed"),
    speculation: speculation(),
  };
  if (text("play-schema")) body.response_format = { type: "json_schema", json_schema: { name: "form", schema: JSON.parse(byId("play-schema").value) } };
  if (isChat && text("play-tools")) body.tools = JSON.parse(byId("play-tools").value);
  if (text("play-prediction")) body.prediction = { type: "content", content: byId("play-prediction").value };
  return { path: `/v1/${byId("play-endpoint").value}`, body: JSON.parse(JSON.stringify(body)) };
}

function shown(body) {
  return {
    ...body,
    logprobs: body.messages ? true : 0,
    stream: true,
    stream_options: { include_drafts: true, include_usage: true },
    return_token_ids: true,
    return_token_sources: true,
    speculation: { ...body.speculation, explain: true },
  };
}

function tokensOf(choice) {
  if (!choice.logprobs) return [];
  if (choice.logprobs.content) return choice.logprobs.content.map(({ token, logprob }) => ({ text: token, logprob }));
  return choice.logprobs.tokens.map((token, index) => ({ text: token, logprob: choice.logprobs.token_logprobs[index] }));
}

// The rejected tokens of drafts, by the position of the first rejected one.
function noteRejected(rejected, draft, ids, from) {
  if (!draft) return;
  const wrong = draft.token_ids.findIndex((id, index) => from + index < ids.length && ids[from + index] !== id);
  if (wrong >= 0) rejected.set(from + wrong, wrong === 0 ? draft.text : `token ${draft.token_ids[wrong]} of ${draft.text}`);
}

// The calls of tools as text: the name once, then its arguments as they come.
function calls({ tool_calls: parts = [] }) {
  return (parts || []).map((part) => `${part.function.name ? `\n→ ${part.function.name} ` : ""}${part.function.arguments ?? ""}`).join("");
}

async function generate(signal) {
  const { path, body } = request();
  const out = byId("play-text");
  const committed = document.createTextNode("");
  const ahead = element("span", "", "unverified");
  out.replaceChildren(committed, ahead);
  byId("play-reasons").replaceChildren();
  const ids = [], sources = [], tokens = [], rejected = new Map();
  let draft = null, explanation = null, spec = null, from = 0;
  const began = performance.now();
  for await (const event of stream(path, shown(body), signal)) {
    for (const shownDraft of event.x_drafts || []) {
      [draft, from] = [shownDraft, ids.length];
      ahead.textContent = ` [${draft.text}]`;
    }
    for (const choice of event.choices) {
      committed.data += choice.text ?? `${choice.delta.content ?? ""}${calls(choice.delta)}`;
      ids.push(...(choice.token_ids || []));
      sources.push(...(choice.token_sources || []));
      tokens.push(...tokensOf(choice));
      if (choice.token_ids && choice.token_ids.length) {
        noteRejected(rejected, draft, ids, from);
        draft = null;
        ahead.textContent = "";
      }
    }
    if (event.metrics) [explanation, spec] = [event.metrics.speculation_explanation, event.metrics.speculative_decoding];
    const seconds = (performance.now() - began) / 1000;
    byId("play-figure").textContent = `${ids.length} tokens in ${seconds.toFixed(2)} s: ${(ids.length / seconds).toFixed(1)} tokens/s${spec ? `, ${spec.mean_acceptance_length.toFixed(2)} tokens per pass with drafts` : ""}`;
  }
  showTokens(byId("play-sources"), byId("play-detail"), tokens, sources, rejected);
  if (!explanation) return;
  const rows = Object.entries(explanation.plain_passes).map(([reason, passes]) => [reason, passes, explanation.reasons[reason]]);
  fillTable(byId("play-reasons"), ["reason", "passes", ""], rows);
  if (explanation.routes) byId("play-route").textContent = explanation.routes.join("\n").replaceAll("; ", ";\n");
}

const quoted = (value) => `'${value.replaceAll("'", "'\\''")}'`;

// A JSON text whose true, false and null are read by json.loads: no Python literal is needed.
const FORMS = {
  curl({ path, body }) {
    const key = settings.key ? ' -H "Authorization: Bearer $OUTRIDER_API_KEY"' : "";
    return `curl ${location.origin}${path} -H 'Content-Type: application/json'${key} -d ${quoted(JSON.stringify(body))}`;
  },
  python({ path, body }) {
    const key = settings.key ? '    "Authorization": "Bearer " + os.environ["OUTRIDER_API_KEY"],\n' : "";
    return [
      `import json\n${key ? "import os\n" : ""}import urllib.request\n`,
      `body = json.loads(${JSON.stringify(JSON.stringify(body)).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`)})`,
      `headers = {\n    "Content-Type": "application/json",\n${key}}`,
      `request = urllib.request.Request(${JSON.stringify(location.origin + path)}, json.dumps(body).encode(), headers)`,
      "with urllib.request.urlopen(request, timeout=600) as answer:",
      "    print(json.load(answer))",
    ].join("\n");
  },
  yaml() {
    const asked = speculation();
    const lines = Object.entries(asked).filter(([name]) => name === "num_tokens" || name === "verify").map(([name, value]) => `        ${name}: ${value}`);
    const draft = asked.method ? `      draft:\n        kind: ${JSON.stringify(asked.method)}  # and path, where it has files\n` : "";
    return `# in args of deploy.yaml\n${draft}      speculation:\n${lines.join("\n") || "        {}  # as deployed"}\n`;
  },
};

async function copy(form) {
  const made = FORMS[form](request());
  byId("play-copy").textContent = made;
  try {
    await navigator.clipboard.writeText(made);
  } catch {
    byId("play-copy").focus(); // no clipboard without HTTPS: the text is there to be selected
  }
}

export function startPlayground() {
  let running = null;
  const attempt = async (work) => {
    showTrouble(null);
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") showTrouble(error);
    }
  };
  byId("play-form").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(async () => {
      running?.abort();
      const mine = (running = new AbortController());
      byId("play-stop").disabled = false;
      try {
        await generate(mine.signal);
      } finally {
        if (running === mine) byId("play-stop").disabled = true;
      }
    });
  });
  byId("play-stop").addEventListener("click", () => running?.abort());
  byId("play-form-demo").addEventListener("click", () => {
    byId("play-schema").value = JSON.stringify(FORM_SCHEMA);
    byId("play-form").requestSubmit();
  });
  for (const form of Object.keys(FORMS)) byId(`copy-${form}`).addEventListener("click", () => attempt(() => copy(form)));
}
