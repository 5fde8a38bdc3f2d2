// The page in a real browser, against a running server: node tests/router/page/check.mjs http://127.0.0.1:8000 FOLDER
// Needs playwright-core and axe-core (npm) and a Chromium (CHROMIUM=/usr/bin/chromium). Writes screenshots to FOLDER.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const [base, folder] = process.argv.slice(2);
const HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>';

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ["--no-sandbox"] });

async function open(options) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.on("console", (message) => assert.notEqual(message.type(), "error", message.text()));
  page.on("pageerror", (error) => assert.fail(error));
  await page.goto(base);
  await page.waitForFunction(() => document.getElementById("model").textContent !== "the target");
  return page;
}

async function inspect(page, name) {
  await page.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run());
  assert.deepEqual(violations.map((each) => [each.id, each.nodes[0].html]), [], `${name}: axe`);
}

async function race(page) {
  await page.getByRole("button", { name: "Race" }).click();
  await page.waitForSelector("#badge.good, #badge.bad, #trouble:not([hidden])", { timeout: 120_000 });
  await page.waitForSelector("#race-sources .token", { timeout: 30_000 });
  assert.match(await page.textContent("#badge"), /identical tokens/);
  assert.equal(await page.textContent("#race-off"), await page.textContent("#race-on"));
  console.log(await page.textContent("#badge"), "|", await page.textContent("#race-off-figure"), "|", await page.textContent("#race-on-figure"));
}

const page = await open({ colorScheme: "light", viewport: { width: 1100, height: 900 } });
await race(page);
assert.ok(await page.locator("#race-sources .accepted").count());
await page.focus("#race-sources");
await page.keyboard.press("ArrowRight");
assert.match(await page.textContent("#race-detail"), /token 1, .*: \w+/);
await inspect(page, "race");

await page.focus("#tab-race");
await page.keyboard.press("ArrowRight");
await page.fill("#play-prompt", "A class of a stack, as a form:\n");
await page.click("#play-form-demo");
await page.waitForFunction(() => document.getElementById("play-figure").textContent.includes("tokens per pass") && document.querySelector("#play-sources .token") && document.getElementById("play-text").textContent.includes("lines"), null, { timeout: 60_000 });
await page.waitForSelector("#play-stop:disabled");
await inspect(page, "playground");

await page.fill("#play-schema", JSON.stringify({ enum: [HOSTILE] }));
await page.fill("#play-tokens", "200");
await page.press("#play-tokens", "Enter");
await page.waitForFunction(() => document.getElementById("play-text").textContent.endsWith('script>"'), null, { timeout: 60_000 });
await page.waitForSelector("#play-stop:disabled");
assert.equal(JSON.parse(await page.locator("#play-text").textContent()), HOSTILE);
assert.equal(await page.locator("img, #play-text script").count(), 0);
assert.equal(await page.evaluate(() => window.hacked), undefined);
await page.click("#copy-curl");
assert.match(await page.textContent("#play-copy"), /^curl http/);
await inspect(page, "hostile");

await page.click("#tab-race");
// The draft is killed under a stream, where it has a process of its own, and the text goes on.
await page.fill("#race-tokens", "400");
const whole = race(page);
await page.waitForFunction(() => document.getElementById("race-on").textContent.length > 40, null, { timeout: 120_000 });
await page.click("#kill-draft");
await page.waitForSelector("#killed:not(:empty), #trouble:not([hidden])");
console.log((await page.textContent("#killed")) || (await page.textContent("#trouble")));
await whole;
await page.fill("#race-tokens", "128");

// A key that has expired: the page asks for another, and goes on with it.
const REFUSED = { error: { message: "The API key is not known here.", type: "authentication_error", code: "invalid_api_key", param: null } };
const expired = await browser.newContext();
const locked = await expired.newPage();
await locked.route("**/v1/**", (route) => (route.request().headers().authorization === "Bearer fresh" ? route.continue() : route.fulfill({ status: 401, json: REFUSED })));
await locked.goto(base);
await locked.waitForSelector("#key-row:not([hidden])");
assert.match(await locked.textContent("#trouble"), /not known/);
await locked.fill("#key", "fresh");
await locked.press("#key", "Enter");
await locked.waitForFunction(() => document.getElementById("trouble").hidden);
assert.notEqual(await locked.textContent("#model"), "the target");
await expired.close();

for (const view of ["live", "cluster"]) {
  await page.click(`#tab-${view}`);
  await page.waitForTimeout(4500);
  assert.ok((await page.textContent(`#${view}`)).length > 60, view);
  await inspect(page, view);
}

const phone = await open({ colorScheme: "dark", viewport: { width: 360, height: 740 } });
await race(phone);
assert.ok(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "no sideways scrolling on a phone");
await inspect(phone, "phone-dark");
await browser.close();
console.log("the page holds");
