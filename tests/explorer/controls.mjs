// Every control driven once, by mouse and by keys, as somebody who tries the page would.

import { choose, cut, numbers, open, port, press, radio, ready, receive, select } from "./browser.mjs";

const state = (page) => page.evaluate(() => JSON.parse(JSON.stringify(window.explorer.state)));
const isEdge = (page, src) =>
  page.evaluate((src) => {
    const { state, scene } = window.explorer;
    return scene.layer.edges[(state.head * scene.layer.tokens + state.token) * scene.layer.tokens + src];
  }, src);

/** Every choice of every list and row of buttons is taken: what the state then is. */
export async function choices(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const found = {};
  for (const [legend, key] of [
    ["Layer", "layer"],
    ["Head", "head"],
    ["Form", "form"],
    ["Steps", "step"],
  ]) {
    const values = await page
      .getByRole("group", { name: legend, exact: true })
      .locator("input")
      .evaluateAll((all) => all.map((one) => one.value));
    found[key] = [];
    for (const value of values) {
      await choose(page, legend, value);
      const now = await state(page);
      found[key].push([value, key === "head" && now.allHeads ? "all" : String(now[key])]);
    }
  }
  for (const [label, read] of [
    ["In the words of", (now) => now.view],
    ["An edit applies", (now) => now.scope],
    ["Graph", (now) => String(now.work.mask)],
    ["from", (now) => String(now.sender)],
    ["to", (now) => String(now.token)],
    ["in head", (now) => String(now.head)],
  ]) {
    const values = await page
      .getByLabel(label, { exact: true })
      .locator("option")
      .evaluateAll((all) => all.map((one) => one.value));
    found[label] = [];
    for (const value of values) {
      await select(page, label, value);
      found[label].push([value, read(await state(page))]);
    }
  }
  return { found, seen };
}

/** The words of each reading over all steps, and the their numbers. */
export async function readings(browser, job) {
  const { page } = await open(browser, job.file);
  const views = await page.evaluate(() => window.explorer.scene.data.views);
  const shown = [];
  for (const view of views) {
    await select(page, "In the words of", view);
    const steps = await page.locator(".steps .segment").allTextContents();
    const numbers = [];
    for (const step of [2, 3, 5]) {
      await choose(page, "Steps", String(step));
      numbers.push(await page.$$eval(".step-body data", (all) => all.map((one) => one.value)));
    }
    shown.push({ view, steps, numbers });
  }
  return shown;
}

/** A click on an arc selects it, the button cuts it; undo, redo, the list of edits and the address bring it back and forth. */
export async function arc(browser, job) {
  const { page, seen } = await open(browser, job.file);
  await choose(page, "Head", "0");
  const place = await page
    .locator(".arcs .edges path.edge")
    .last()
    .evaluate((path) => {
      const middle = path.getPointAtLength(path.getTotalLength() / 2);
      const box = path.ownerSVGElement.getBoundingClientRect();
      return { x: box.left + middle.x, y: box.top + middle.y };
    });
  await page.mouse.move(place.x, place.y);
  const readout = await page.locator(".readout").textContent();
  await page.mouse.click(place.x, place.y);
  await ready(page);
  const { sender, token, head, work } = await state(page);
  const selected = { sender, token, head, edits: work.edits, numbers: await numbers(page, ".dock-numbers") };
  const promised = await page.locator(".dock .cut").textContent();
  await cut(page);
  const steps = [(await state(page)).work.edits];
  await page.getByRole("button", { name: "Undo", exact: true }).click();
  await ready(page);
  steps.push((await state(page)).work.edits);
  await page.keyboard.press("Control+Shift+Z");
  await ready(page);
  steps.push((await state(page)).work.edits);
  const hash = await page.evaluate(() => location.hash);
  const again = await open(browser, job.file, { hash });
  const restored = (await state(again.page)).work.edits;
  await page.getByRole("button", { name: /^undo:/ }).click();
  await ready(page);
  steps.push((await state(page)).work.edits);
  return { readout, selected, promised, steps, hash, restored, seen };
}

/** The whole of a visit without a mouse. */
export async function keys(browser, job) {
  const { page, seen } = await open(browser, job.file);
  await page.locator('.token[tabindex="0"]').focus();
  const shown = [];
  const note = async (key) => {
    await page.keyboard.press(key);
    await ready(page);
    const now = await state(page);
    const focus = await page.evaluate(() => document.activeElement?.dataset?.token ?? null);
    shown.push({ key, token: now.token, sender: now.sender, edits: now.work.edits.length, focus });
  };
  for (const key of [
    "Home",
    "ArrowRight",
    "ArrowRight",
    "ArrowRight",
    "Shift+Home",
    "x",
    "Shift+ArrowRight",
    "x",
    "Control+z",
    "Control+z",
    "End",
  ])
    await note(key);
  await page.locator('.port-button[tabindex="0"]').focus();
  await page.keyboard.press("Home");
  const label = await page.evaluate(() => document.activeElement.getAttribute("aria-label"));
  const pressed = [];
  for (const key of ["Enter", "x"]) {
    await page.keyboard.press(key);
    await ready(page);
    pressed.push(
      await page.evaluate(() => ["aria-pressed", "aria-label"].map((name) => document.activeElement.getAttribute(name))),
    );
  }
  await page.waitForTimeout(450);
  const said = await page.locator('main > [role="status"]').textContent();
  return { shown, label, pressed, said, seen };
}

/** The reach of a token, layer after layer: stepped by hand, played, and at once where motion is not wanted. */
export async function reach(browser, job) {
  const { page, seen } = await open(browser, job.file);
  await select(page, "Graph", String(job.mask));
  await choose(page, "View", "reach");
  const reached = async () => Number(await page.locator(".reach .summary data").getAttribute("value"));
  const counts = [await reached()];
  await press(page, "Back");
  counts.unshift(await reached());
  for (let step = 0; step < 3; step++) {
    await press(page, "Step");
    counts.push(await reached());
  }
  await page.getByLabel("Receiver", { exact: true }).fill("3");
  await ready(page);
  const other = await reached();
  await press(page, "Play");
  await page.waitForTimeout(900);
  const playing = await reached();
  await page.getByRole("button", { name: /Play|Pause/ }).click();
  const still = await open(browser, job.file, { reducedMotion: "reduce", hash: await page.evaluate(() => location.hash) });
  await press(still.page, "Play");
  const atOnce = Number(await still.page.locator(".reach .summary data").getAttribute("value"));
  const rows = () => still.page.locator(".reach .row").count();
  const alike = await rows();
  await still.page.evaluate(() => {
    window.explorer.dispatch({ type: "look", change: { layer: 1, scope: "layer" } });
    window.explorer.dispatch({ type: "edge", src: 2, dst: 3, head: 0, present: false, given: true });
  });
  await ready(still.page);
  return { counts, other, playing, atOnce, rows: [alike, await rows()], seen };
}

/** Decoding plays and pauses, goes back, takes another token than the likeliest, and ends where there is no more room. */
export async function decoding(browser, job) {
  const { page, seen } = await open(browser, job.file);
  await choose(page, "View", "write");
  const count = () => page.evaluate(() => window.explorer.state.work.written.length);
  const counts = [];
  await press(page, "Play");
  await page.waitForTimeout(1300);
  counts.push(await count());
  await press(page, "Pause");
  const paused = await count();
  await press(page, "Back");
  counts.push(paused - (await count()));
  await page.locator(".write button.share").nth(2).click();
  await ready(page);
  const taken = await page.evaluate(() => window.explorer.state.work.written.at(-1));
  for (let step = 0; step < 40 && (await page.getByRole("button", { name: "Step", exact: true }).isEnabled()); step++)
    await press(page, "Step");
  const full = await count();
  const text = await page.locator(".write .summary").textContent();
  await select(page, "Next token", "1");
  return { counts, taken, full, text, seen };
}

/** Notes that must not be missed, and the receiver that is isolated. */
export async function noted(browser, job) {
  const { page, seen } = await open(browser, job.file);
  await select(page, "Graph", String(job.ahead));
  const ahead = await page.locator(".note").allTextContents();
  await select(page, "Graph", String(job.strict));
  await receive(page, 0);
  await choose(page, "Steps", "3");
  const isolated = await page.locator(".step-body").textContent();
  const edges = await isEdge(page, 0);
  await select(page, "Graph", "0");
  await receive(page, 1);
  await port(page, 5);
  await cut(page);
  const added = await page.locator(".note").allTextContents();
  return { ahead, isolated, edges, added, seen };
}

/** Both themes by the button, remembered where there is a memory; the system's until then. */
export async function themes(browser, job) {
  const { page, seen } = await open(browser, job.file, { colorScheme: "dark" });
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const dark = await paper();
  await page.getByRole("button", { name: "Change to the light theme" }).click();
  const light = await paper();
  await page.reload();
  await ready(page);
  return { dark, light, again: await paper(), seen };
}

/** The buttons that step, and that of the edge. */
export async function buttons(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const steps = [];
  for (let step = 0; step < 6; step++) await press(page, "Next step");
  steps.push((await state(page)).step);
  await press(page, "Step back");
  steps.push((await state(page)).step);
  await cut(page);
  const gone = (await state(page)).work.edits;
  await cut(page);
  const mended = (await state(page)).work.edits;
  await page.locator("details.table > summary").click();
  await page.locator("details.table tbody button").first().click();
  await ready(page);
  const fromTable = (await state(page)).work.edits;
  await page.getByText("Keyboard shortcuts while a token has the focus").click();
  const help = await page.locator(".keys").isVisible();
  await choose(page, "Steps", "3");
  await page.locator(".step-body button.share").nth(1).click();
  await ready(page);
  return {
    steps,
    cut: gone,
    mended,
    fromTable,
    help,
    studied: (await state(page)).sender,
    checked: await radio(page, "Steps", "3").isChecked(),
    seen,
  };
}

/** A finger on a phone: taps a token, the port of a sender, whose numbers are then shown, and the button. */
export async function touch(browser, job) {
  const { page, seen } = await open(browser, job.file, { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true });
  await page.locator('[data-token="6"]').tap();
  await ready(page);
  const receiver = (await state(page)).token;
  await page.locator('.port-button[data-src="2"]').tap();
  await ready(page);
  const selected = [(await state(page)).sender, (await state(page)).work.edits, await numbers(page, ".dock-numbers")];
  await page.locator(".dock .cut").tap();
  await ready(page);
  return { receiver, selected, edits: (await state(page)).work.edits, seen };
}

/** Keys, clicks and moves that come faster than the page is drawn: each call below sends all of its own before any frame. */
export async function haste(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const after = async (sent) => {
    await sent;
    await ready(page);
    return state(page);
  };
  const keys = (...names) => after(page.evaluate(sendKeys, names));
  const clicks = (selector, times) =>
    after(page.locator(selector).evaluate((button, times) => Array.from({ length: times }, () => button.click()), times));
  await page.locator('.token[tabindex="0"]').focus();
  const walk = await keys("ArrowLeft", "ArrowLeft", "Shift+Home", "Shift+ArrowRight", "x");
  const again = await keys("x", "x");
  const button = await clicks(".dock .cut", 3);
  const steps = await clicks('[aria-label="Next step"]', 3);
  await page.locator('.port-button[tabindex="0"]').focus();
  const ports = await keys("Home", "ArrowRight", "ArrowRight", "x");
  await press(page, "Reset");
  await page.locator('[data-token="8"]').hover();
  await page.mouse.down();
  const drag = await after(page.evaluate(sendMoves, [5, 8]));
  await page.mouse.up();
  await choose(page, "View", "reach");
  await press(page, "Back");
  const reach = await clicks(".reach .player button:nth-child(3)", 2);
  await choose(page, "View", "write");
  await clicks(".player.writing button:nth-child(3)", 2);
  const ids = await page.evaluate(() => window.explorer.scene.tokens.map((token) => token.id));
  return { walk, again, button, steps, ports, drag, reach, ids, seen };
}

/** In the page: keys on the element that has the focus, with `Shift+` before a name. */
function sendKeys(names) {
  for (const name of names) {
    const options = { key: name.replace("Shift+", ""), shiftKey: name.startsWith("Shift+"), bubbles: true, cancelable: true };
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", options));
  }
}

/** In the page: moves of a pressed pointer to the middles of tokens. */
function sendMoves(tokens) {
  for (const token of tokens) {
    const { left, top, width, height } = document.querySelector(`[data-token="${token}"]`).getBoundingClientRect();
    const place = { clientX: left + width / 2, clientY: top + height / 2 };
    document.querySelector(".token-row").dispatchEvent(new PointerEvent("pointermove", place));
  }
}

/** A text of one's own, by keys alone: read, kept in the address, another one too long, and back to the first. */
export async function typed(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const ids = () => page.evaluate(() => window.explorer.scene.tokens.map((token) => token.id));
  const told = () => page.locator(".typing-told").textContent();
  await page.getByRole("button", { name: "Type your own text" }).focus();
  await page.keyboard.press("Enter");
  const offered = await page.getByRole("textbox").inputValue();
  await page.keyboard.insertText(job.text);
  const [counted, pieces] = [await told(), await page.locator(".typing-pieces bdi").allTextContents()];
  await page.keyboard.press("Control+Enter");
  await ready(page);
  const read = {
    ids: await ids(),
    title: await page.locator("h1").textContent(),
    focus: await page.evaluate(() => document.activeElement.dataset.token),
    chances: await numbers(page, ".predict .predictions"),
  };
  await page.keyboard.press("Shift+Home");
  await page.keyboard.press("x");
  await ready(page);
  const cutting = { edits: (await state(page)).work.edits, chances: await numbers(page, ".predict .predictions") };
  await page.keyboard.press("Control+z");
  await ready(page);
  const hash = await page.evaluate(() => location.hash);
  const again = await open(browser, job.file, { hash });
  const restored = await again.page.evaluate(() => window.explorer.scene.tokens.map((token) => token.id));
  await page.getByRole("button", { name: "Type your own text" }).click();
  await page.getByRole("textbox").fill("name ".repeat(90));
  const long = [await told(), await page.getByRole("button", { name: "Read it" }).isDisabled()];
  await page.getByRole("button", { name: "Back to the first text" }).click();
  await ready(page);
  return { offered, counted, pieces, read, cutting, restored, long, back: await ids(), seen };
}

/** Every head chosen from the small pictures: its picture, what is said of it, and who attends to the sender and the receiver. */
export async function glance(browser, job) {
  const { page, seen } = await open(browser, job.file);
  const heads = [];
  for (const map of await page.locator(".glance-map").all()) {
    await map.click();
    await ready(page);
    const picture = await map.locator("canvas").evaluate((canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return Array.from(data).filter((_, index) => index % 4 === 3);
    });
    const halves = await page.locator(".reading .half").evaluateAll((all) =>
      all.map((one) => [one.querySelector("p").textContent, one.dataset.holds === "true"]),
    );
    const { layer, head, allHeads } = await state(page);
    const found = { layer, head, allHeads, picture, halves, values: await numbers(page, ".reading") };
    heads.push({ ...found, label: await map.getAttribute("aria-label"), chosen: await page.locator('.glance-map[aria-pressed="true"]').count() });
  }
  await receive(page, 4);
  await port(page, 1);
  const receivers = [await numbers(page, ".hearers ul")];
  await choose(page, "Who attends to", "receiver");
  receivers.push(await numbers(page, ".hearers ul"));
  await page.locator(".hearers button.share").nth(1).click();
  await ready(page);
  const { sender, token, head, layer } = await state(page);
  return { heads, receivers, selected: { sender, token, head, layer, first: receivers[1][1][0] }, seen };
}

/** Words for nodes: what each of them attends to in one head, chosen by its button. */
export async function words(browser, job) {
  const { page, seen } = await open(browser, job.file);
  await choose(page, "Layer", String(job.layer));
  await choose(page, "Head", String(job.head));
  const nodes = page.locator(".word-row button");
  const heard = [];
  for (const node of await nodes.all()) {
    await node.click();
    await ready(page);
    heard.push([(await state(page)).token, await numbers(page, ".word-list")]);
  }
  const arcs = await page.locator(".word-arcs path:not(.faint)").count();
  return { words: await nodes.allTextContents(), heard, arcs, seen };
}
