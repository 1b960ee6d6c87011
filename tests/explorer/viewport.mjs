// Every number that a click changes is on the screen: the tour, a selection, a cut and its way back, another graph, a written token.

import { numbers, open, ready } from "./browser.mjs";

const NUMBERS = ".tour data, .dock-numbers data, .dock-next data, .reach .summary data";

/** In the page: every shown number by name, its value, and whether all of it can be seen at this moment. */
function seenNumbers(selector) {
  const found = {};
  for (const one of document.querySelectorAll(selector)) {
    const box = one.getBoundingClientRect();
    if (!box.width) continue;
    const inside = box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;
    const top = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    const covered = !(top === one || one.contains(top));
    found[one.dataset.name] = { value: one.value, inside, covered };
  }
  return found;
}

const tour = (page) => page.locator(".tour button.primary").click();
const dock = (name) => (page) => page.locator(`.dock ${name}`).click();
const named = (name) => (page) => page.getByRole("button", { name, exact: true }).click();
const graph = (number) => (page) => page.getByLabel("Graph", { exact: true }).selectOption(String(number));
const mode = (value) => (page) => page.locator(`.mode input[value="${value}"]`).check({ force: true });

async function arc(page) {
  const place = await page.locator(".arcs .edges path.edge").first().evaluate((path) => {
    const middle = path.getPointAtLength(path.getTotalLength() * 0.4);
    const box = path.ownerSVGElement.getBoundingClientRect();
    return { x: box.left + middle.x, y: box.top + middle.y };
  });
  await page.mouse.click(place.x, place.y);
}

async function fromTable(page) {
  if ((await page.locator("details.table[open]").count()) === 0) await page.locator("details.table > summary").click();
  await page.locator("details.table tbody button").nth(2).click();
}

async function line(page) {
  await page.locator('.steps input[value="3"]').check({ force: true });
  await ready(page);
  await page.locator(".step-body button.share").nth(1).click();
}

const EDITS = [
  ["an arc", arc],
  ["a port", (page) => page.locator('.port-button[data-src="3"]').click()],
  ["cut", dock(".cut")],
  ["put back", dock(".cut")],
  ["another port", (page) => page.locator('.port-button[data-src="9"]').click()],
  ["cut by x", (page) => page.keyboard.press("x")],
  ["undo by keys", (page) => page.keyboard.press("Control+z")],
  ["redo", named("Redo")],
  ["undo", named("Undo")],
  ["another graph", graph(2)],
  ["reset", dock(".reset")],
  ["a receiver", (page) => page.locator('[data-token="10"]').click()],
  ["a line of a step", line],
  ["cut in the table", fromTable],
  ["take back", (page) => page.getByRole("button", { name: /^undo:/ }).click()],
  ["a head at a glance", (page) => page.locator(".glance-map").nth(2).click()],
  ["who attends to it", (page) => page.locator(".hearers button.share").nth(1).click()],
  ["write", mode("write"), true],
  ["a token more", named("Step")],
  ["a token less", named("Back")],
  ["reach", mode("reach"), true],
  ["a graph of fewer", graph(6)],
  ["a layer more", named("Step")],
  ["a layer less", named("Back")],
];

/** What each action changed: the names of the numbers, those of them that are not to be seen, the values that are. */
export async function viewport(browser, job) {
  const { page, seen } = await open(browser, job.file, { viewport: job.viewport, hasTouch: job.viewport.width < 500 });
  const stops = Array.from({ length: 9 }, (_, at) => [`tour ${at + 1}`, tour]);
  const found = [];
  for (const [name, act, silent] of [...stops, ["the end of the tour", tour, true], ...EDITS]) {
    const before = await page.evaluate(seenNumbers, NUMBERS);
    await act(page);
    await ready(page);
    const after = await page.evaluate(seenNumbers, NUMBERS);
    const changed = Object.keys(after).filter((key) => before[key]?.value !== after[key].value);
    const hidden = changed.filter((key) => !after[key].inside || after[key].covered);
    if (!silent) found.push({ name, changed, hidden });
  }
  return { found, seen };
}

/** The tour where there is one, click by click: its words and its numbers. */
export async function toured(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const told = async () => [await page.locator(".tour p").innerText(), Object.fromEntries(await numbers(page, ".tour"))];
  const stops = [];
  if (await page.locator(".tour").isVisible()) {
    stops.push(await told());
    for (let click = 1; click <= 9; click++) {
      await tour(page);
      await ready(page);
      stops.push(await told());
    }
  }
  return { title: await page.title(), heading: await page.locator("h1").innerText(), stops, seen };
}
