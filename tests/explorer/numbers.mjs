// What the page shows after a cut, an added edge and another graph: Python computes the same.

import { choose, cut, open, port, press, receive, select, shown } from "./browser.mjs";

async function begin(browser, { file, layer, head, token, scope }) {
  const opened = await open(browser, file);
  await choose(opened.page, "Layer", String(layer));
  await choose(opened.page, "Head", String(head));
  await select(opened.page, "An edit applies", scope ?? "everywhere");
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
