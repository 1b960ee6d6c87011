// Debian's Chromium and Firefox by playwright-core, and what all scenarios do with a page of the explorer.

import Module, { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const require = createRequire(new URL("../../gnn_attention/explorer/web/package.json", import.meta.url));
export const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

// Firefox is driven as Debian builds it, by WebDriver BiDi. It lacks one command that playwright-core sends with every new page,
// to choose light or dark: a question for its status goes in the place of it.
const usual = Module._extensions[".js"];
Module._extensions[".js"] = (module, file) => {
  if (!file.endsWith("coreBundle.js")) return usual(module, file);
  module._compile(readFileSync(file, "utf8").replaceAll("emulation.setMediaFeaturesOverride", "session.status"), file);
};

export async function launch({ chromium, firefox }) {
  const playwright = require("playwright-core");
  if (firefox) return playwright.firefox.launch({ executablePath: firefox, channel: "moz-firefox", timeout: 90_000 });
  return playwright.chromium.launch({ executablePath: chromium, args: FLAGS });
}

/** A page of its own: what it requested, complained of and threw is in `seen`. */
export async function open(browser, file, { hash = "", ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 900 }, ...options });
  // against a page that hangs: a busy machine may take several seconds for what takes one
  context.setDefaultTimeout(60_000);
  const page = await context.newPage();
  const seen = { requests: [], errors: [] };
  context.on("request", (request) => seen.requests.push(request.url()));
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.errors.push(message.text()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("dialog", (dialog) => (seen.errors.push(`dialog ${dialog.message()}`), dialog.dismiss()));
  // the scene is waited for, whether the browser reports the load or not
  await page.goto(pathToFileURL(file).href + hash, { waitUntil: "commit" });
  await ready(page);
  return { page, seen, context };
}

/** Waits until the page has drawn a scene of its state. */
export async function ready(page) {
  await page.waitForFunction(() => window.explorer?.scene && window.explorer.scene.state === window.explorer.state);
}

/** The numbers on the page at full precision, by name, in the order in which they stand. */
export async function numbers(page, selector) {
  return page.$$eval(`${selector} data`, (all) => all.map((one) => [one.dataset.name, Number(one.value)]));
}

/** A radio button by the legend of its group and its value. */
export function radio(page, legend, value) {
  return page.getByRole("group", { name: legend, exact: true }).locator(`input[value="${value}"]`);
}

export async function choose(page, legend, value) {
  await radio(page, legend, value).check({ force: true });
  await ready(page);
}

export async function select(page, label, value) {
  await page.getByLabel(label, { exact: true }).selectOption(value);
  await ready(page);
}

export async function press(page, name) {
  await page.getByRole("button", { name, exact: true }).click();
  await ready(page);
}

/** Chooses the receiver as a hand would. */
export async function receive(page, token) {
  await page.locator(`[data-token="${token}"]`).click();
  await ready(page);
}

/** Presses the port of a sender: selects its edge into the receiver, if there is one or not. */
export async function port(page, src) {
  await page.locator(`.port-button[data-src="${src}"]`).click();
  await ready(page);
}

/** Presses the button that cuts or adds the selected edge. */
export async function cut(page) {
  await page.locator(".dock .cut").click();
  await ready(page);
}

/** Opens the table of the edges, and waits until it has its rows. */
export async function openTable(page) {
  if ((await page.locator("details.table[open]").count()) === 0) await page.locator("details.table > summary").click();
  await page.locator("details.table[open][data-rows]").waitFor();
}

/** Everything shown of the receiver: the table, the sums and states of two steps, what is expected next. */
export async function shown(page) {
  await openTable(page);
  const rows = await page.$$eval("details.table tbody tr[data-src]", (all) =>
    all.map((row) => [Number(row.dataset.src), ...Array.from(row.querySelectorAll("data"), (one) => Number(one.value))]),
  );
  const steps = {};
  for (const step of [6, 3]) {
    await choose(page, "Steps", String(step));
    steps[step] = Object.fromEntries(await numbers(page, ".step-body"));
  }
  const lines = await page.$$eval('.step-body[data-step="3"] li', (all) =>
    all.map((one) => [Number(one.dataset.index), Number(one.querySelector("data").value)]),
  );
  const chances = await numbers(page, ".predict .predictions");
  const update = await page.evaluate(() => {
    const { state, scene } = window.explorer;
    const { width } = scene.layer;
    return Array.from(scene.layer.update.subarray(state.token * width, (state.token + 1) * width));
  });
  return { rows, steps, lines, chances, update };
}
