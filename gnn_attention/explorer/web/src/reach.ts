// How far a token reaches over several layers: a row for each layer, going back from the receiver to the tokens within its reach.

import { button, fill, freshId, h, number, set, svg, write } from "./dom";
import { lastOf, type Scene, type SceneHost } from "./scene";
import { clipped, counted, named, visible } from "./words";

export interface ReachHost extends SceneHost {
  reach(change: { reachToken?: number; reachLayers?: number }): void;
}

const MOST_LAYERS = 12;
const ROW = 38;
const LEFT = 74;
const TOP = 22;
const LINES_UP_TO = 96; // tokens
const BEAT = 800; // milliseconds

export class Reach {
  readonly element: HTMLElement;
  private play = button("Play", () => this.toggle(), { class: "primary" });
  private back = button("Back", () => this.move(-1));
  private on = button("Step", () => this.move(1));
  private slider = h("input", { type: "range", min: 0, step: 1, id: freshId("receiver") });
  private sliderName = h("output", {});
  private picture = svg("svg", { class: "reach-picture", role: "img" });
  private told = h("p", { class: "summary", role: "status" });
  private shown = h("p", { class: "aside reach-graph" });
  private timer = 0;
  private mask = 0;
  private scene: Scene | null = null;
  private rows: Uint8Array[] = [];

  constructor(private host: ReachHost) {
    const label = h("label", { for: this.slider.id }, "Receiver ");
    const controls = h(
      "div",
      { class: "player" },
      this.back,
      this.play,
      this.on,
      h("div", { class: "slider" }, label, this.slider, this.sliderName),
    );
    const intro =
      "In one layer a token receives messages from the senders of its edges, which received messages of their own one layer before. So its reach grows from layer to layer.";
    this.element = h(
      "section",
      { class: "reach card", "aria-labelledby": "reach-title" },
      h("h2", { id: "reach-title" }, "Reach over layers"),
      h("div", { class: "reach-head" }, controls, this.told),
      this.shown,
      this.picture,
      h("p", { class: "aside" }, intro),
    );
    this.slider.addEventListener("input", () => this.host.reach({ reachToken: Number(this.slider.value) }));
    this.picture.addEventListener("pointerdown", (event) => this.pick(event));
  }

  update(scene: Scene): void {
    this.scene = scene;
    const { engine, state } = scene;
    const size = Math.max(1, engine.size);
    this.mask = reachMask(scene);
    const options = { mask: this.mask, edits: state.work.edits, token: state.reachToken, layers: MOST_LAYERS, size };
    this.rows = [alone(state.reachToken, size), ...engine.reach(options)];
    this.introduce(scene);
    if (!varied(scene, this.mask)) this.rows = this.rows.slice(0, this.stable() + 1);
    const layers = Math.min(state.reachLayers, this.last);
    set(this.slider, "max", size - 1);
    this.slider.value = String(state.reachToken);
    write(this.sliderName, this.name(state.reachToken));
    set(this.back, "disabled", layers === 0);
    set(this.on, "disabled", layers === this.last);
    this.draw(scene, layers, size);
    const reached = count(this.rows[layers]);
    fill(
      this.told,
      `After ${counted(layers, "layer")}, ${this.name(state.reachToken)} reaches `,
      number(reached, "reached", String(reached)),
      ` of ${counted(size, "token")}`,
      this.ending(layers, reached, size),
    );
    set(this.picture, "aria-label", this.told.textContent ?? "");
    if (layers === this.last) this.stop();
  }

  /** Which graph is shown, where it is not the one of the other views. */
  private introduce(scene: Scene): void {
    const name = (mask: number) => clipped(visible(scene.data.masks[mask].name).replaceAll("␣", " "), 40);
    const { mask } = scene.state.work;
    const why =
      scene.state.reachMask === null && this.mask !== mask
        ? ` In ${name(mask)}, the graph of the other views, one layer already reaches every earlier token. Choose any graph above.`
        : "";
    fill(this.shown, "Graph shown: ", h("strong", {}, name(this.mask)), `.${why}`);
  }

  stop(): void {
    window.clearInterval(this.timer);
    this.timer = 0;
    write(this.play, "Play");
  }

  private get last(): number {
    return this.rows.length - 1;
  }

  private get own(): number {
    return Math.min(MOST_LAYERS, this.scene?.limits.layers ?? 1);
  }

  private name(token: number): string {
    const text = this.scene?.tokens[token]?.text;
    return text === undefined ? `token ${token} (to come)` : `token ${named(token, text)}`;
  }

  /** The number of equal layers after which nothing new is reached, at least as many as the model has. */
  private stable(): number {
    for (let layer = 1; layer < this.rows.length; layer++)
      if (count(this.rows[layer]) === count(this.rows[layer - 1])) return Math.max(this.own, layer - 1);
    return this.rows.length - 1;
  }

  private ending(layers: number, reached: number, size: number): string {
    if (reached === size) return ", which are all.";
    if (layers === this.last && layers < MOST_LAYERS) return "; further layers add nothing.";
    return this.scene && layers > this.scene.limits.layers
      ? `; this model has only ${counted(this.scene.limits.layers, "layer")}, which end at the dashed line.`
      : ".";
  }

  private toggle(): void {
    if (this.timer) return this.stop();
    const scene = this.host.scene();
    if (scene && scene.state.reachLayers >= this.last) this.host.reach({ reachLayers: 0 });
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) return this.host.reach({ reachLayers: this.last });
    write(this.play, "Pause");
    this.timer = window.setInterval(() => this.move(1), BEAT);
  }

  private move(by: number): void {
    const scene = this.host.scene();
    if (!scene) return;
    const now = Math.min(scene.state.reachLayers, this.last);
    this.host.reach({ reachLayers: Math.max(0, Math.min(this.last, now + by)) });
  }

  private pick(event: PointerEvent): void {
    const place = this.picture.getBoundingClientRect();
    const size = this.scene?.engine.size ?? 0;
    const share = (event.clientX - place.left - LEFT) / (place.width - LEFT);
    if (size && share >= 0) this.host.reach({ reachToken: Math.min(size - 1, Math.floor(share * size)) });
  }

  // -- drawing ----------------------------------------------------------------------------------------------------------

  private draw(scene: Scene, layers: number, size: number): void {
    const width = Math.max(280, this.element.clientWidth || 800);
    const slot = (width - LEFT) / size;
    const x = (token: number) => LEFT + (token + 0.5) * slot;
    const y = (layer: number) => TOP + layer * ROW;
    const words = slot >= 14 ? 74 : 8;
    const height = TOP + this.last * ROW + 20 + words;
    set(this.picture, "viewBox", `0 0 ${width} ${height}`);
    set(this.picture, "height", height);
    this.picture.classList.toggle("dense", slot < 6);
    const rows = this.rows.map((row, layer) => this.row(row, layer, layers, x, y(layer), slot));
    const lines = size <= LINES_UP_TO && !varied(scene, this.mask) ? this.rows.slice(1).map((_, layer) => this.lines(scene, layer, layers, x, y)) : [];
    const labels = words > 8 ? scene.tokens.map((token, index) => this.label(token.text, x(index), y(this.last) + 18)) : [];
    fill(this.picture, ...lines, ...rows, ...this.border(y(this.own) + ROW / 2, width), ...labels);
  }

  private row(row: Uint8Array, layer: number, layers: number, x: (token: number) => number, y: number, slot: number): SVGElement {
    const shown = layer <= layers;
    const [on, off]: string[][] = [[], []];
    row.forEach((heard, token) =>
      (shown && heard ? on : off).push(slot < 6 ? block(x(token), y, slot) : disc(x(token), y, Math.min(5.5, slot * 0.34))),
    );
    const label = svg(
      "text",
      { class: `row-label${shown ? " shown" : ""}`, x: 0, y: y + 4 },
      layer ? `${layer} layer${layer > 1 ? "s" : ""}` : "itself",
    );
    return svg(
      "g",
      { class: layer === layers ? "row fresh" : "row" },
      label,
      svg("path", { class: "off", d: off.join("") }),
      svg("path", { class: "on", d: on.join("") }),
    );
  }

  /** Where the layers of this model end. */
  private border(y: number, width: number): SVGElement[] {
    return this.own < this.last ? [svg("line", { class: "border", x1: 0, x2: width, y1: y, y2: y })] : [];
  }

  /** From each token that is newly reached at the next row up to its receivers. */
  private lines(
    scene: Scene,
    layer: number,
    layers: number,
    x: (token: number) => number,
    y: (layer: number) => number,
  ): SVGElement {
    const [above, below, before] = [this.rows[layer], this.rows[layer + 1], this.rows[layer - 1]];
    const parts: string[] = [];
    below.forEach((heard, src) => {
      if (!heard || above[src]) return;
      above.forEach((reached, dst) => {
        if (reached && !before?.[dst] && edgeBetween(scene, this.mask, src, dst))
          parts.push(`M${x(dst).toFixed(1)} ${y(layer)}L${x(src).toFixed(1)} ${y(layer + 1)}`);
      });
    });
    const classes = ["hops", layer < layers ? "shown" : "", layer + 1 === layers ? "fresh" : ""];
    return svg("path", { class: classes.filter(Boolean).join(" "), d: parts.join("") });
  }

  private label(text: string, x: number, y: number): SVGElement {
    return svg(
      "text",
      { class: "token-label", transform: `translate(${x.toFixed(1)} ${y}) rotate(90)`, "unicode-bidi": "isolate" },
      clipped(visible(text), 8),
    );
  }
}

/** The graph that *Reach* shows: a window in the place of the causal graph, which reaches everything at once. */
export function reachMask({ data, engine, state }: Scene): number {
  const { mask } = state.work;
  if (state.reachMask !== null) return state.reachMask;
  if (!data.masks[mask].causal || engine.varies(mask)) return mask;
  for (let dst = 0; dst < engine.size; dst++) for (let src = 0; src <= dst; src++) if (!engine.has(mask, src, dst, 0)) return mask;
  const window = data.masks.findIndex((one) => one.name.startsWith("window("));
  return window < 0 ? mask : window;
}

function alone(token: number, size: number): Uint8Array {
  const row = new Uint8Array(size);
  row[token] = 1;
  return row;
}

function count(row: Uint8Array): number {
  return row.reduce((sum, heard) => sum + heard, 0);
}

function disc(x: number, y: number, r: number): string {
  return `M${(x - r).toFixed(1)} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
}

function block(x: number, y: number, slot: number): string {
  return `M${(x - slot / 2).toFixed(2)} ${y - 4}h${slot.toFixed(2)}v8h${(-slot).toFixed(2)}z`;
}

/** Whether one layer has other edges than another: then a layer that brings nothing is not the end. */
function varied({ engine, state }: Scene, mask: number): boolean {
  return engine.varies(mask) || state.work.edits.some((edit) => edit.layer !== "all");
}

/** An edge of the graph with those edits that apply to every layer. */
function edgeBetween(scene: Scene, mask: number, src: number, dst: number): boolean {
  const { edits } = scene.state.work;
  const edit = lastOf(
    edits,
    (found) => found.src === src && found.dst === dst && found.layer === "all" && (found.head === "all" || found.present),
  );
  return edit ? edit.present : scene.engine.has(mask, src, dst, 0);
}
