// One prompt and one seed, without drafts and with them; the badge compares token ids.

import { post, settings, stream } from "/page/api.js";
import { byId, showTrouble } from "/page/dom.js";
import { readTokens, showTokens } from "/page/sources.js";

function setBadge(text, kind) {
  const badge = byId("badge");
  badge.textContent = text;
  badge.className = `badge ${kind}`;
}

async function run(name, body) {
  const pane = byId(`race-${name}`);
  const figure = byId(`race-${name}-figure`);
  const result = { ids: [], sources: [], seconds: 0, rate: 0, metrics: null };
  pane.textContent = "";
  const began = performance.now();
  let first = 0;
  for await (const event of stream("/v1/completions", body)) {
    const now = performance.now();
    first ||= now;
    for (const choice of event.choices) {
      pane.append(document.createTextNode(choice.text));
      result.ids.push(...choice.token_ids);
      result.sources.push(...choice.token_sources);
    }
    result.metrics = event.metrics || result.metrics;
    result.seconds = (now - began) / 1000;
    result.rate = result.ids.length / result.seconds;
    figure.textContent = `${result.ids.length} tokens in ${result.seconds.toFixed(2)} s: ${result.rate.toFixed(1)} tokens/s, first after ${((first - began) / 1000).toFixed(2)} s`;
  }
  return result;
}

function judge(off, on) {
  const length = Math.max(off.ids.length, on.ids.length);
  const differs = Array.from({ length }, (_, index) => off.ids[index] !== on.ids[index]).indexOf(true);
  if (differs >= 0) {
    setBadge(`different from token ${differs + 1} on: verification by rejection or in blocks keeps the distribution, not the text; so may rounding on a GPU`, "bad");
    return;
  }
  const times = (on.rate / off.rate).toFixed(2);
  setBadge(`✓ identical tokens: all ${length}, ${times} times the speed`, "good");
}

// Shows how many passes had drafts: an adaptive deployment drops them where they do not pay.
function showPasses({ metrics }) {
  const told = metrics && metrics.speculation_explanation;
  if (!told) return;
  const count = (passes) => Object.values(passes).reduce((total, number) => total + number, 0);
  const drafted = count(told.passes), plain = count(told.plain_passes);
  const reasons = Object.entries(told.plain_passes).map(([reason, number]) => `${reason} ${number}`).join(", ");
  byId("race-on-figure").append(document.createTextNode(`; drafts in ${drafted} of ${drafted + plain} passes (without: ${reasons || "none"})`));
}

async function race() {
  const body = {
    model: settings.model,
    prompt: byId("race-prompt").value,
    max_tokens: Number(byId("race-tokens").value),
    seed: Number(byId("race-seed").value),
    temperature: Number(byId("race-temperature").value),
    stream: true,
    return_token_ids: true,
    return_token_sources: true,
  };
  setBadge("", "");
  for (const name of ["off", "on"]) byId(`race-${name}`).textContent = "";
  byId("race-sources").replaceChildren();
  const { tokens } = await post("/tokenize", { model: settings.model, prompt: body.prompt });
  for (const enabled of [false, true]) { // so the prompt is cached, and both ways have run before
    for await (const _ of stream("/v1/completions", { ...body, max_tokens: Math.min(16, body.max_tokens), speculation: { enabled } }));
  }
  const off = await run("off", { ...body, speculation: { enabled: false } });
  const on = await run("on", { ...body, speculation: { explain: true } });
  judge(off, on);
  showPasses(on);
  showTokens(byId("race-sources"), byId("race-detail"), await readTokens(tokens, on.ids), on.sources);
}

// Simulates a fault: a running race continues without drafts until a new process has started.
async function killDraft() {
  const { num_drafts: count } = await post("/admin/drafts/kill", {});
  byId("killed").textContent = `Killed ${count === 1 ? "the draft's process" : `${count} draft processes`}: the text goes on, and drafts come back when a new process has started.`;
}

export function startRace() {
  byId("kill-draft").addEventListener("click", () => {
    showTrouble(null);
    killDraft().catch(showTrouble);
  });
  const form = byId("race-form");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    showTrouble(null);
    try {
      await race();
    } catch (error) {
      showTrouble(error);
    } finally {
      button.disabled = false;
    }
  });
}
