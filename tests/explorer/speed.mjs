// How smooth and how soon: frames while dragging along 64 tokens; first picture and one selection of 512.

import { open, ready } from "./browser.mjs";

/** Drags along the tokens and back: the intervals of those frames in which another token listens, in milliseconds. */
export async function drag(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const row = await page.locator(job.track ?? ".token-row").boundingBox();
  const y = row.y + Math.min(20, row.height / 2);
  await page.mouse.move(row.x + 4, y);
  await page.mouse.down();
  await page.evaluate(noteFrames);
  const steps = job.moves ?? 240;
  for (let step = 1; step <= steps; step++) {
    const along = 1 - Math.abs(1 - (2 * step) / steps);
    await page.mouse.move(row.x + 4 + along * (row.width - 8), y);
  }
  const frames = await page.evaluate(() => window.dragged.splice(0));
  await page.mouse.up();
  await ready(page);
  const changed = (index) => index > 0 && frames[index][1] !== frames[index - 1][1];
  const busy = frames.slice(1).filter((_, index) => changed(index) || changed(index + 1));
  const gaps = busy.map(([, , gap]) => gap).sort((one, other) => one - other);
  const at = (share) => gaps[Math.min(gaps.length - 1, Math.floor(share * gaps.length))];
  const receivers = new Set(frames.map(([, token]) => token)).size;
  return { frames: gaps.length, receivers, median: at(0.5), p95: at(0.95), worst: at(1), seen };
}

/** In the page: for each frame its time, the receiver that is shown, and the time since the frame before. */
function noteFrames() {
  const frames = (window.dragged = []);
  let last = performance.now();
  const note = (time) => {
    frames.push([time, window.explorer.scene.state.token, time - last]);
    last = time;
    requestAnimationFrame(note);
  };
  requestAnimationFrame(note);
}

/** How soon the page is there and how long an edit takes, in milliseconds: by the clock, and of the page's thread, which does not count
 *  what a busy machine does besides. Sorted, of several visits.
 *
 *  node tests/explorer/run.mjs <<< '{"chromium": "/usr/bin/chromium", "jobs": [{"scenario": "soon", "file": "PAGE.html"}]}' */
export async function soon(browser, job) {
  const times = { paint: [], thread: [], edit: [], editThread: [] };
  for (let visit = 0; visit < (job.visits ?? 5); visit++) {
    const { page, context } = await open(browser, job.file, { viewport: { width: 1280, height: 800 } });
    const ticks = await threadOf(context, page);
    await page.waitForFunction(() => performance.getEntriesByName("first-contentful-paint").length);
    times.paint.push(await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime));
    const start = await ticks();
    await page.reload();
    await ready(page);
    times.thread.push((await ticks()) - start);
    for (let src = 0; src < 8; src++) {
      const before = await ticks();
      times.edit.push(await page.evaluate(edited, src));
      times.editThread.push((await ticks()) - before);
    }
    await context.close();
  }
  for (const name of Object.keys(times)) times[name] = times[name].map(Math.round).sort((one, other) => one - other);
  return times;
}

/** In the page: cuts an edge, and waits until what follows is drawn. */
async function edited(src) {
  const start = performance.now();
  window.explorer.dispatch({ type: "edge", src, dst: 9, head: 0, present: false, given: true });
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
}

/** What the page's main thread has worked so far. */
async function threadOf(context, page) {
  const client = await context.newCDPSession(page);
  await client.send("Performance.enable", { timeDomain: "threadTicks" });
  return async () => {
    const { metrics } = await client.send("Performance.getMetrics");
    return 1000 * metrics.find((one) => one.name === "TaskDuration").value;
  };
}

/** A long text: the time to the first picture and to a computed one, and of one selection. */
export async function long(browser, job) {
  const { page, seen } = await open(browser, job.file);
  // The browser records the paint a moment after it has drawn, later on a busy machine.
  await page.waitForFunction(() => performance.getEntriesByName("first-contentful-paint").length);
  const first = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime);
  const computed = await page.evaluate(() => performance.now());
  const selection = await page.evaluate(async () => {
    const times = [];
    for (const token of [500, 40, 250, 511, 3]) {
      const start = performance.now();
      window.explorer.dispatch({ type: "receiver", token });
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      times.push(performance.now() - start);
    }
    return times.sort((one, other) => one - other);
  });
  const cut = await page.evaluate(async () => {
    const start = performance.now();
    window.explorer.dispatch({ type: "edge", src: 0, dst: 3, head: 0, present: false, given: true });
    window.explorer.render();
    return performance.now() - start;
  });
  return {
    first,
    computed,
    selection,
    cut,
    tokens: await page.locator(".token").count(),
    kind: await page.locator(".stage").getAttribute("data-kind"),
    seen,
  };
}
