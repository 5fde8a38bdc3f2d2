// The page in a real browser, against a running server: node tests/page/check.mjs http://127.0.0.1:8000 FOLDER
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
await page.fill("#play-schema", JSON.stringify({ enum: [HOSTILE] }));
await page.fill("#play-tokens", "200");
await page.press("#play-tokens", "Enter");
await page.waitForSelector("#play-sources .token", { timeout: 60_000 });
assert.equal(JSON.parse(await page.locator("#play-text").textContent()), HOSTILE);
assert.equal(await page.locator("img, #play-text script").count(), 0);
assert.equal(await page.evaluate(() => window.hacked), undefined);
await page.click("#copy-curl");
assert.match(await page.textContent("#play-copy"), /^curl http/);
await inspect(page, "playground");

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
