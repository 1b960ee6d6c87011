// Every head at a glance: its weights as a small picture, what the head under study does in this text, and on average.

import { bdi, fill, h, number, set } from "./dom";
import { headColour } from "./paint";
import { readingOf, type Claim, type Reading } from "./readings";
import { attendedMost, layerNumber, rowOf, type Scene } from "./scene";
import type { LayerRun, PageData, Run } from "./types";
import { clipped, counted, rounded, visible } from "./words";

export interface GlanceHost {
  look(layer: number, head: number): void;
}

const MOST = 64; // pixels: of more tokens, the largest weight of several is shown

export class Glance {
  readonly element: HTMLElement;
  private maps: { button: HTMLButtonElement; canvas: HTMLCanvasElement; layer: number; head: number }[] = [];
  private grid = h("div", { class: "glance-grid" });
  private probe = h("span", { class: "probe", "aria-hidden": "true" });
  private told = h("div", { class: "reading" });
  private drawn: Run | null = null;
  private scene: Scene | null = null;

  constructor(
    private data: PageData,
    sizes: { layers: number; heads: number },
    private host: GlanceHost,
  ) {
    for (let layer = 0; layer < sizes.layers; layer++) {
      const row = Array.from({ length: sizes.heads }, (_, head) => this.map(layer, head));
      this.grid.append(h("div", { class: "glance-row" }, h("span", { class: "glance-layer" }, `layer ${layerNumber(data, layer)}`), ...row));
    }
    const how = "Each picture is a mask with its weights: a row for each receiver, a column for each sender, darker for a larger weight. Choose a head.";
    const body = h("div", { class: "glance-body" }, h("div", { class: "glance-scroll" }, this.grid), this.told);
    const title = h("h2", { id: "glance-title" }, "All heads at a glance");
    this.element = h("section", { class: "glance card", "aria-labelledby": "glance-title" }, title, h("p", { class: "aside" }, how), body, this.probe);
  }

  update(scene: Scene): void {
    this.scene = scene;
    const { state, run } = scene;
    for (const map of this.maps) {
      set(map.button, "aria-pressed", String(map.layer === state.layer && map.head === state.head));
      if (run !== this.drawn) this.draw(map.canvas, run.layers[map.layer], map.head);
    }
    this.drawn = run;
    this.tell(scene);
  }

  /** In another theme. */
  redraw(): void {
    this.drawn = null;
    if (this.scene) this.update(this.scene);
  }

  private map(layer: number, head: number): HTMLButtonElement {
    const where = `layer ${layerNumber(this.data, layer)}, head ${head}`;
    const job = readingOf(this.data, layer, head)?.job;
    const name = h("span", { class: "glance-name" }, `head ${head}`);
    const canvas = h("canvas", { "aria-hidden": "true" });
    const label = job && job !== NO_JOB ? `${where} (on average: ${job})` : where;
    const button = h("button", { type: "button", class: "glance-map", "aria-pressed": "false", "aria-label": label, title: label }, canvas, name);
    button.addEventListener("click", () => this.host.look(layer, head));
    this.maps.push({ button, canvas, layer, head });
    return button;
  }

  private draw(canvas: HTMLCanvasElement, layer: LayerRun, head: number): void {
    const size = Math.min(MOST, layer.tokens);
    [canvas.width, canvas.height] = [size, size];
    const pen = canvas.getContext("2d");
    if (!pen) return;
    this.probe.style.color = headColour(head);
    const [red, green, blue] = (getComputedStyle(this.probe).color.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
    const picture = pen.createImageData(size, size);
    largestOf(layer, head, size).forEach((weight, pixel) => picture.data.set([red, green, blue, 255 * Math.sqrt(weight)], 4 * pixel));
    pen.putImageData(picture, 0, 0);
  }

  private tell(scene: Scene): void {
    const { layer, head } = scene.state;
    const reading = readingOf(this.data, layer, head);
    const number = layerNumber(this.data, layer);
    const here = inThisText(scene);
    fill(this.told, h("h3", {}, `Head ${head} of layer ${number}`), ...here.parts, ...(reading ? onAverage(reading, here.job, here.mostly) : []));
  }
}

const NO_JOB = "none of these"; // as in the record

/** The weights [size, size]; where several pairs share a pixel, the largest. */
function largestOf(layer: LayerRun, head: number, size: number): Float64Array {
  const { tokens, weights } = layer;
  const found = new Float64Array(size * size);
  for (let dst = 0; dst < tokens; dst++) {
    const row = Math.floor((dst * size) / tokens) * size;
    for (let src = 0; src < tokens; src++) {
      const pixel = row + Math.floor((src * size) / tokens);
      found[pixel] = Math.max(found[pixel], weights[(head * tokens + dst) * tokens + src]);
    }
  }
  return found;
}

/** What an edge does, by the tokens at its ends: of several jobs, the first that fits. */
export function jobOf(tokens: Scene["tokens"], src: number, dst: number): string {
  if (src === dst) return "self";
  if (src > 0 && src < dst && tokens[src - 1].id === tokens[dst].id) return "induction";
  if (src === dst - 1) return "previous token";
  if (tokens[src].id === tokens[dst].id) return "same token";
  return src === 0 ? "first token" : NO_JOB;
}

const token = (scene: Scene, index: number) => [`${index} `, bdi(`‘${clipped(visible(scene.tokens[index].text), 16)}’`)];

/** The job in words, of one edge. */
function described(scene: Scene, job: string, src: number): (Node | string)[] {
  if (job === "self") return ["itself"];
  if (job === "previous token") return ["the token just before"];
  if (job === "induction") return ["the token after an earlier ", bdi(`‘${clipped(visible(scene.tokens[src - 1].text), 16)}’`), " (induction)"];
  if (job === "same token") return ["an earlier token with the same text"];
  return job === "first token" ? ["the first token"] : [`a token ${Math.abs(scene.state.token - src)} places away`];
}

/** What the head does in this text: for the receiver, and how often over all of them. */
function inThisText(scene: Scene): { parts: HTMLElement[]; job: string; mostly: string } {
  const { layer, state, tokens } = scene;
  const strongest = tokens.map((_, dst) => attendedMost(layer, state.head, dst)[0] as number | undefined);
  const src = strongest[state.token];
  if (src === undefined) return { parts: [h("p", {}, "In this text the receiver attends to no token in this head.")], job: NO_JOB, mostly: NO_JOB };
  const jobs = strongest.map((best, dst) => (best === undefined ? NO_JOB : jobOf(tokens, best, dst)));
  const job = jobs[state.token];
  const counts = new Map<string, number>();
  for (const one of jobs) counts.set(one, (counts.get(one) ?? 0) + 1);
  const tally = [...counts].sort(([, one], [, other]) => other - one);
  const value = rowOf(layer, state.head, state.token).weights[src];
  const first = h(
    "p",
    { class: "here" },
    h("strong", {}, "In this text"),
    ...[", token ", ...token(scene, state.token), " attends most to token ", ...token(scene, src), ", "],
    ...[h("strong", {}, ...described(scene, job, src)), ", with weight ", number(value, "here-weight", rounded(value)), "."],
  );
  const all = tally.map(([one, count]) => `${one === NO_JOB ? "other" : one} ${count}`).join(", ");
  const often = h("p", { class: "aside" }, `The strongest edge of each of the ${counted(tokens.length, "receiver")}, by kind: ${all}.`);
  return { parts: [first, often], job, mostly: tally[0][0] };
}

/** The two halves of the recorded sentence, each marked where the record does not show it, and how it fits what is seen here. */
function onAverage(reading: Reading, job: string, mostly: string): HTMLElement[] {
  const known = reading.job !== NO_JOB;
  const others = mostly === reading.job ? "what it does for most receivers here, and this one is an exception" : "something else";
  const relation = known && job === reading.job ? "On average over other texts it does the same:" : `On average over other texts it does ${known ? others : "no job that has a name"}:`;
  const test = "Descriptions come from half of 32 passages of Python. They were tested on the other half, against as many random edges.";
  return [h("p", { class: "relation" }, relation), half("looks for", reading.looksFor, reading.looks), half("says", reading.says, reading.said), h("p", { class: "aside" }, test)];
}

function half(verb: string, words: string, claim: Claim): HTMLElement {
  const mark = h("strong", { class: "verdict" }, claim.holds ? "✓ supported" : "✗ not supported");
  const [effect, unit] = verb === "says" ? ["their logits fall by ", ""] : ["the predictions change by ", " nats"];
  const numbers = h(
    "span",
    { class: "aside" },
    `Without the edges that this names, ${effect}`,
    number(claim.claimed, `${verb}-claimed`, rounded(claim.claimed)),
    `${unit}; without as many random edges, by `,
    number(claim.control, `${verb}-control`, rounded(claim.control)),
    ".",
  );
  const text = h("p", {}, verb === "says" ? "It raises the logit of " : "It looks for ", h(claim.holds ? "strong" : "s", { class: "claim" }, ...quoted(words)), ". ", mark);
  const element = h("div", { class: "half" }, text, numbers);
  set(element, "data-holds", String(claim.holds));
  return element;
}

/** Words with the tokens in quotation marks made visible. */
function quoted(words: string): string[] {
  return words.split(/('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")/).map((part) => (/^['"]/.test(part) ? `‘${clipped(visible(plain(part.slice(1, -1))), 20)}’` : part));
}

/** Python's way to write a token, undone. */
function plain(text: string): string {
  return text.replaceAll("\\n", "\n").replaceAll("\\t", "\t").replaceAll("\\'", "'").replaceAll("\\\\", "\\");
}

