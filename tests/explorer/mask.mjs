// The mask beside the arcs: what a cell shows, lights and cuts; the names of the rows; the tour by hand; where Reach begins.

import { choose, cut, numbers, open, press, ready } from "./browser.mjs";

const cell = (page, [src, dst]) => page.locator(`.mask-cell[data-src="${src}"][data-dst="${dst}"]`);
const edges = (page) =>
  page.evaluate(() => {
    const { state, scene } = window.explorer;
    const size = scene.layer.tokens ** 2;
    return Array.from(scene.layer.edges.subarray(state.head * size, (state.head + 1) * size));
  });
const lit = (page) => page.locator(".arcs path.looked").evaluateAll((all) => all.filter((one) => one.style.display !== "none").length);
const stop = (page) => page.locator(".tour-count").textContent();

/** In the page: which of these words stand in an emphasised place that can be seen at once. */
function seenWords(words) {
  const seen = Array.from(document.querySelectorAll(".lead, .dock-numbers")).filter((one) => {
    const { top, bottom, height } = one.getBoundingClientRect();
    return height && top >= 0 && bottom <= innerHeight;
  });
  const text = seen.map((one) => one.innerText.toLowerCase()).join(" ");
  return words.filter((word) => text.includes(word));
}

/** In the page: the token pair over which the light of the mask stands. */
function lightedCell() {
  const [light, area] = [".mask-looked", ".mask-area"].map((name) => document.querySelector(name).getBoundingClientRect());
  const count = window.explorer.scene.tokens.length;
  const at = (start, whole, size) => Math.round((count * (start - whole)) / size);
  return [at(light.left, area.left, area.width), at(light.top, area.top, area.height)];
}

/** In the page: each name of a row, and the elements at whose height it stands. */
function rowNames() {
  const rows = { ".ports circle": "port", ".token": "token", ".phase": "phase", ".guess": "guess" };
  return Array.from(document.querySelectorAll(".row-names:not([hidden]) span"), (name) => {
    const middle = (box) => (box.top + box.bottom) / 2;
    const found = Object.keys(rows).filter((row) =>
      Array.from(document.querySelectorAll(row)).some((one) => Math.abs(middle(one.getBoundingClientRect()) - middle(name.getBoundingClientRect())) < 6),
    );
    return [name.textContent, found.map((row) => rows[row])];
  });
}

export async function cells(browser, job) {
  const { page, seen } = await open(browser, job.file, { viewport: job.viewport });
  const words = await page.evaluate(seenWords, ["mask", "message passing", "softmax"]);
  if (job.viewport.width < 500) await choose(page, "Figure", "mask");
  const [names, start] = [[await page.evaluate(rowNames)], await edges(page)];
  const found = [];
  for (const pair of job.cells) {
    await cell(page, pair).hover();
    const lights = [await lit(page), await page.evaluate(lightedCell)];
    await cell(page, pair).click();
    await ready(page);
    const now = await edges(page);
    const changed = now.flatMap((edge, index) => (edge === start[index] ? [] : [[index % job.count, Math.floor(index / job.count)]]));
    const kinds = await page.locator(".mask-grid .cut").evaluateAll((all) => all.map((one) => [Number(one.dataset.src), Number(one.dataset.dst)]));
    const drawn = await page.locator(".arcs path.cut").count();
    if (found.length % 2) await cell(page, pair).click();
    else await press(page, "Undo");
    await ready(page);
    found.push({ lights, changed, kinds, drawn, restored: String(await edges(page)) === String(start) });
  }
  names.push(await page.evaluate(rowNames));
  await cell(page, [15, 15]).focus();
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("x");
  await ready(page);
  const byKey = await page.evaluate(() => [window.explorer.state.work.edits, document.activeElement.getAttribute("aria-label")]);
  await press(page, "Reset");
  await choose(page, "View", "reach");
  const graph = () => page.locator(".graph select").evaluate((list) => list.selectedOptions[0].textContent);
  const reach = [await graph(), await page.locator(".reach-graph").textContent(), await page.locator(".reach .summary").textContent()];
  await choose(page, "View", "listen");
  return { words, names, cells: found, byKey, reach: [...reach, await graph()], seen };
}

/** Step 1 of the tour, with its edge cut in three other places than by its own button; what its head's card says. */
export async function byHand(browser, job) {
  const found = {};
  const arc = async (page) => {
    const place = await page.locator(".arcs path.edge").last().evaluate((path) => {
      const { x, y } = path.getPointAtLength(path.getTotalLength() / 2);
      const box = path.ownerSVGElement.getBoundingClientRect();
      return [box.left + x, box.top + y];
    });
    await page.mouse.move(...place);
    found.light = await page.evaluate(lightedCell);
    await page.mouse.click(...place);
  };
  const means = { button: cut, arc, cell: (page) => cell(page, [3, 15]).click() };
  for (const [name, act] of Object.entries(means)) {
    const { page, seen } = await open(browser, job.file);
    const { token, sender, head, layer } = await page.evaluate(() => window.explorer.state);
    found.begin = { token, sender, head, layer };
    await page.locator(".tour .primary").click();
    await ready(page);
    found.card = await page.locator(".reading").innerText();
    const before = await stop(page);
    await act(page);
    await page.waitForFunction(() => document.querySelector(".tour-count").textContent.startsWith("2 "), null, { timeout: 5000 }).catch(() => {});
    found[name] = [before, await stop(page), seen.errors];
  }
  return found;
}

/** What a page of an English text says of the model, and the likely next tokens of the first text that it offers instead. */
export async function hinted(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const hint = await page.locator(".hint").innerText();
  await page.locator(".hint button").first().click();
  await ready(page);
  return { hint, chances: (await numbers(page, ".dock-next .predictions")).map(([, value]) => value), seen };
}
