// What the page shows after a cut, an added edge, another graph and a step of decoding: Python computes the same.

import { choose, cut, numbers, open, port, press, ready, receive, select, shown } from "./browser.mjs";

async function begin(browser, { file, layer, head, token, scope }) {
  const opened = await open(browser, file);
  await choose(opened.page, "Layer", String(layer));
  await choose(opened.page, "Head", String(head));
  await select(opened.page, "An edit holds", scope ?? "everywhere");
  await receive(opened.page, token);
  return opened;
}

/** Selects the edge of a port and cuts or adds it, and asks for the numbers then, and after reset or a second click if wanted. */
export async function toggled(browser, job) {
  const { page } = await begin(browser, job);
  const toggle = async () => {
    const promised = await page.locator(".dock .cut").textContent();
    await cut(page);
    return { promised, ...(await shown(page)) };
  };
  await port(page, job.src);
  const after = await toggle();
  if (job.again) return { ...after, again: await toggle() };
  if (!job.reset) return after;
  await press(page, "Reset");
  return { ...after, reset: await shown(page) };
}

export async function mask(browser, job) {
  const { page } = await begin(browser, job);
  await select(page, "Graph", String(job.mask));
  return {
    ...(await shown(page)),
    name: await page.evaluate(() => window.explorer.scene.data.masks[window.explorer.state.work.mask].name),
  };
}

/** Writes two tokens: what it may go on with after each, and how many tokens the new node attends to. */
export async function written(browser, job) {
  const { page } = await open(browser, job.file);
  await choose(page, "View", "write");
  const seen = [];
  for (let step = 0; step < 3; step++) {
    seen.push({
      chances: await numbers(page, "section.write ul"),
      summary: await numbers(page, "section.write .summary"),
      ids: await ids(page),
    });
    await press(page, "Step");
  }
  await press(page, "Back");
  seen.push({ ids: await ids(page) });
  return seen;
}

async function ids(page) {
  await ready(page);
  return page.evaluate(() => window.explorer.scene.tokens.map((token) => token.id));
}
