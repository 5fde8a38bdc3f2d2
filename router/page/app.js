// The page: its views, its key, and the model's name.

import { get, settings } from "/page/api.js";
import { byId, showTrouble } from "/page/dom.js";
import { startLive } from "/page/live.js";
import { startPlayground } from "/page/playground.js";
import { startRace } from "/page/race.js";
import { fillLegend } from "/page/sources.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const readLive = startLive();

function select(tab) {
  for (const each of tabs) {
    const isChosen = each === tab;
    each.setAttribute("aria-selected", String(isChosen));
    each.tabIndex = isChosen ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !isChosen;
  }
  readLive();
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
}

async function start() {
  try {
    settings.model = (await get("/v1/models")).data[0].id;
    byId("model").textContent = settings.model;
    showTrouble(null);
  } catch (error) {
    showTrouble(error);
  }
}

byId("key").addEventListener("change", () => {
  settings.key = byId("key").value.trim();
  start();
});
fillLegend(byId("legend"));
startRace();
startPlayground();
start();
