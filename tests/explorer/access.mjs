// For everybody: axe-core over every view in both themes and on a phone, nothing wider than the window, hostile text inert.

import { AXE, choose, cut, open, openTable } from "./browser.mjs";

async function violations(page) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations.map(
    (one) =>
      `${one.id}: ${one.nodes
        .map((node) => node.target.join(" "))
        .slice(0, 3)
        .join(", ")}`,
  );
}

const overflow = (page) => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);

const KINDS = {
  light: { colorScheme: "light" },
  dark: { colorScheme: "dark" },
  phone: { colorScheme: "light", viewport: { width: 390, height: 844 }, hasTouch: true },
};

/** axe in the views of `plan`, by kind of visit: listen, "step N" of an edited graph with the table open, reach, write. */
export async function axe(browser, job) {
  const found = {};
  for (const [kind, views] of Object.entries(job.plan)) {
    const { page, seen } = await open(browser, job.file, KINDS[kind]);
    found[kind] = { overflow: 0, seen };
    for (const view of views) {
      await show(page, view);
      found[kind][view] = await violations(page);
      found[kind].overflow += await overflow(page);
    }
  }
  return found;
}

async function show(page, view) {
  if (view === "typing") return page.getByRole("button", { name: "Type your own text" }).click();
  if (!view.startsWith("step ")) return choose(page, "View", view);
  if ((await page.locator("details.table[open]").count()) === 0) {
    await openTable(page);
    await cut(page);
  }
  await choose(page, "Steps", view.slice(5));
}

/** 200 % zoom: half the pixels for the same text; and a page of one token, and of many. */
export async function sizes(browser, job) {
  const shown = {};
  for (const [name, file] of Object.entries(job.files)) {
    for (const width of job.widths[name]) {
      const { page, seen, context } = await open(browser, file, { viewport: { width, height: 500 }, deviceScaleFactor: 2 });
      const kind = await page.locator(".stage").getAttribute("data-kind");
      shown[`${name} at ${width}`] = { overflow: await overflow(page), kind, tokens: await page.locator(".token").count(), seen };
      await context.close();
    }
  }
  return shown;
}

/** Texts that would like to be markup: no element more than on the page of harmless texts, no script run, no direction turned. */
export async function hostile(browser, job) {
  const count = async (file) => {
    const { page, seen } = await open(browser, file);
    await openTable(page);
    const elements = await page.evaluate(() => {
      const names = {};
      for (const element of document.querySelectorAll("#root *")) names[element.localName] = (names[element.localName] ?? 0) + 1;
      return names;
    });
    const raw = await page.evaluate(() =>
      /[\u0000-\u0008\u200b-\u200f\u202a-\u202e\u2067\u200b]/.test(document.querySelector("#root").textContent),
    );
    const texts = await page.locator(".token").allTextContents();
    const ran = await page.evaluate(() => window.ran ?? null);
    return { elements, raw, texts, ran, title: await page.title(), seen };
  };
  return { hostile: await count(job.hostile), harmless: await count(job.harmless) };
}

/** Inside a notebook's frame: no storage, no address, no error. */
export async function framed(browser, job) {
  const context = await browser.newContext({ viewport: { width: 900, height: 900 } });
  const page = await context.newPage();
  const seen = { requests: [], errors: [] };
  context.on("request", (request) => seen.requests.push(request.url()));
  page.on("console", (message) => message.type() === "error" && seen.errors.push(message.text()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  await page.goto(`file://${job.frame}`);
  const frame = page.frames()[1];
  await frame.waitForFunction(() => window.explorer?.scene && window.explorer.scene.state === window.explorer.state);
  await frame.locator('.port-button[data-src="0"]').click();
  await frame.locator(".dock .cut").click();
  await frame.locator(".reset").waitFor();
  const edits = await frame.evaluate(() => window.explorer.state.work.edits.length);
  return { edits, seen };
}

/** What a page says that cannot start. */
export async function failed(browser, job) {
  const page = await (await browser.newContext()).newPage();
  await page.goto(`file://${job.file}`);
  return page.getByRole("alert").innerText();
}
