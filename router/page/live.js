// Figures and pairs, from /metrics alone.

import { metricsText } from "/page/api.js";
import { byId, element, fillTable, showTrouble } from "/page/dom.js";
import { parseMetrics, samplesOf, sum, sumBy } from "/page/metrics.js";

const PERIOD_MS = 2000;
let last = null; // { at, samples }

const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "–");
const ms = (seconds) => (Number.isFinite(seconds) ? `${(1000 * seconds).toFixed(1)} ms` : "–");

function meter(value, label) {
  const made = Object.assign(document.createElement("meter"), { min: 0, max: 1, value: value || 0, title: label });
  made.setAttribute("aria-label", label);
  return made;
}

// The mean of a histogram since the last reading, or since the start if it has not changed since.
function mean(samples, name) {
  const total = (suffix, of) => sum(of, `${name}_${suffix}`);
  const since = last ? last.samples : [];
  const count = total("count", samples) - total("count", since);
  if (count > 0) return (total("sum", samples) - total("sum", since)) / count;
  return total("sum", samples) / total("count", samples);
}

function figures(samples, seconds) {
  const rate = (name) => (last ? (sum(samples, name) - sum(last.samples, name)) / seconds : 0);
  const drafts = sum(samples, "outrider_spec_decode_num_drafts");
  const accepted = sum(samples, "outrider_spec_decode_num_accepted_tokens");
  return {
    "tokens per second": rate("outrider_inter_token_latency_seconds_count").toFixed(1),
    "time to first token": ms(mean(samples, "outrider_time_to_first_token_seconds")),
    "time per token": ms(mean(samples, "outrider_inter_token_latency_seconds")),
    "tokens per pass": drafts ? (1 + accepted / drafts).toFixed(2) : "–",
    "drafts accepted": percent(accepted, sum(samples, "outrider_spec_decode_num_draft_tokens")),
    "prefix cache": percent(sum(samples, "outrider_prefix_cache_hits"), sum(samples, "outrider_prefix_cache_queries")),
    running: sum(samples, "outrider_num_requests_running"),
    waiting: sum(samples, "outrider_num_requests_waiting"),
  };
}

function alarms(samples) {
  const found = [];
  if (sum(samples, "outrider_router_blind") > 0) found.push("The router does not hear of the pairs' caches.");
  for (const { labels, value } of samplesOf(samples, "outrider_spec_decode_drift_alarm")) if (value > 0) found.push(`Acceptance has changed for ${labels.class}.`);
  for (const { labels, value } of samplesOf(samples, "outrider_draft_connected")) if (value === 0 && sum(samples, "outrider_draft_num_connections") > 0) found.push(`The draft of pair ${labels.replica} is away: the same tokens, more slowly.`);
  return found;
}

function showLive(samples, seconds) {
  byId("live-figures").replaceChildren(...Object.entries(figures(samples, seconds)).map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", name), element("dd", String(value)));
    return box;
  }));
  const rings = alarms(samples);
  byId("alarms").replaceChildren(...(rings.length ? rings.map((text) => element("li", `⚠ ${text}`, "on")) : [element("li", "No alarms.")]));
  const shapes = [...sumBy(samples, "outrider_spec_decode_passes", "shape")], all = sum(samples, "outrider_spec_decode_passes");
  byId("live-shapes").textContent = all ? `Drafts of all passes: ${shapes.map(([shape, number]) => `${shape} ${percent(number, all)}`).join(", ")}.` : "";
  const passes = sum(samples, "outrider_spec_decode_num_drafts");
  const positions = [...sumBy(samples, "outrider_spec_decode_num_accepted_tokens_per_pos", "position")].sort(([a], [b]) => a - b);
  let before = passes;
  fillTable(byId("live-positions"), ["position", "stood, of all passes", "stood, given those before", ""], positions.map(([position, stood]) => {
    const given = before;
    before = stood;
    return [Number(position) + 1, percent(stood, passes), percent(stood, given), meter(stood / passes, `position ${Number(position) + 1}`)];
  }));
  fillTable(byId("live-acceptance"), ["class", "method", "first draft accepted", "all drafts accepted", ""], acceptanceByClass(samples));
  fillTable(byId("live-classes"), ["class", "pair", "speed-up"], samplesOf(samples, "outrider_spec_decode_speedup").map(({ labels, value }) => [labels.class, labels.replica ?? "", `${value.toFixed(2)}×`]));
}

// Rows of accepted and drafted tokens, of the first position and of all, for each class and method.
function acceptanceByClass(samples) {
  const rows = new Map();
  for (const kind of ["draft", "accepted"]) {
    for (const { labels, value } of samplesOf(samples, `outrider_spec_decode_class_${kind}_tokens_per_pos`)) {
      const name = `${labels.class}\n${labels.method}`;
      const row = rows.get(name) || { draft: [0, 0], accepted: [0, 0] };
      row[kind][1] += value;
      if (Number(labels.position) === 0) row[kind][0] += value;
      rows.set(name, row);
    }
  }
  return [...rows].map(([name, { draft, accepted }]) => [
    ...name.split("\n"), percent(accepted[0], draft[0]), percent(accepted[1], draft[1]), meter(accepted[1] / draft[1], `acceptance of ${name.replace("\n", ", ")}`),
  ]);
}

// Heads and drafts from the text have no process.
function draftProcess(samples, replica) {
  const states = samplesOf(samples, "outrider_draft_connected").filter(({ labels }) => (labels.replica ?? "") === replica);
  if (!states.length) return "none";
  return states.every(({ value }) => value > 0) ? "connected" : "away";
}

function showCluster(samples) {
  const names = { running: "outrider_num_requests_running", waiting: "outrider_num_requests_waiting", hits: "outrider_prefix_cache_hits", queries: "outrider_prefix_cache_queries", kv: "outrider_kv_cache_usage", length: "outrider_spec_decode_acceptance_length" };
  const by = Object.fromEntries(Object.entries(names).map(([key, name]) => [key, sumBy(samples, name, "replica")]));
  fillTable(byId("pairs"), ["pair", "running", "waiting", "KV in use", "", "prompt tokens cached", "tokens per pass", "draft process"], [...by.running.keys()].map((replica) => [
    replica || "0", by.running.get(replica), by.waiting.get(replica) ?? 0, percent(by.kv.get(replica) ?? 0, 1), meter(by.kv.get(replica), `KV in use of pair ${replica}`),
    percent(by.hits.get(replica), by.queries.get(replica)), (by.length.get(replica) ?? 1).toFixed(2), draftProcess(samples, replica),
  ]));
  const rows = [...sumBy(samples, "outrider_router_decisions", "basis")].map(([basis, count]) => [`decided by ${basis}`, count]);
  const reuse = percent(sum(samples, "outrider_router_hit_blocks"), sum(samples, "outrider_router_achievable_blocks"));
  fillTable(byId("routes"), ["", ""], [...rows, ["blocks reused, of those that some pair held", reuse], ["blocks in the index", sum(samples, "outrider_router_index_blocks")]]);
}

async function read() {
  const samples = parseMetrics(await metricsText());
  const at = performance.now();
  const seconds = last ? (at - last.at) / 1000 : 1;
  showLive(samples, seconds);
  showCluster(samples);
  last = { at, samples };
}

export function startLive() {
  let isReading = false;
  const turn = async () => {
    if (isReading || document.hidden || (byId("live").hidden && byId("cluster").hidden)) return;
    isReading = true;
    try {
      await read();
    } catch (error) {
      showTrouble(error);
    } finally {
      isReading = false;
    }
  };
  setInterval(turn, PERIOD_MS);
  return turn;
}
