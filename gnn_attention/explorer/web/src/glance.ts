// Every head at a glance: its weights as a small picture, and what the head under study looks for and says.

import { fill, h, number, set } from "./dom";
import { headColour } from "./paint";
import { readingOf, type Claim, type Reading } from "./readings";
import { layerNumber, type Scene } from "./scene";
import type { LayerRun, PageData, Run } from "./types";
import { clipped, rounded, visible } from "./words";

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
  private shown = "";
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
    const how = "Each row is a token that listens, each column a token that is heard. Darker means a larger weight. Choose a head.";
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
    const label = job && job !== NO_JOB ? `${where}: ${job}` : where;
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
    const key = `${layer}.${head}`;
    if (key === this.shown) return;
    this.shown = key;
    set(this.told, "hidden", reading === null);
    if (reading) fill(this.told, ...sentence(reading, layerNumber(this.data, layer)));
  }
}

const NO_JOB = "none of these";

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

/** The two halves of the sentence, each marked where the record does not show it. */
function sentence(reading: Reading, layer: number): HTMLElement[] {
  const title = h("h3", {}, `Head ${reading.head} of layer ${layer}${reading.job === NO_JOB ? "" : ` (${reading.job})`}`);
  const test =
    "This is an average over other texts; in this text the head may do something else. The description comes from the weights in one half of " +
    "32 passages of Python. It was tested on the other half by cutting the edges that it names and, for comparison, as many random edges.";
  return [title, half("looks for", reading.looksFor, reading.looks), half("says", reading.says, reading.said), h("p", { class: "aside" }, test)];
}

function half(verb: string, words: string, claim: Claim): HTMLElement {
  const mark = h("strong", { class: "verdict" }, claim.holds ? "✓ supported" : "✗ not supported");
  const [effect, unit] = verb === "says" ? ["what it says falls by ", ""] : ["the predictions change by ", " nats"];
  const numbers = h(
    "span",
    { class: "aside" },
    `Without the edges that this names, ${effect}`,
    number(claim.claimed, `${verb}-claimed`, rounded(claim.claimed)),
    `${unit}; without as many random edges, by `,
    number(claim.control, `${verb}-control`, rounded(claim.control)),
    ".",
  );
  const text = h("p", {}, `On average this head ${verb} `, h(claim.holds ? "strong" : "s", { class: "claim" }, ...quoted(words)), ". ", mark);
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

