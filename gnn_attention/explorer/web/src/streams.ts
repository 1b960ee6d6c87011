// Below each token its residual stream, with a mark for each layer, down to the token that it predicts next.

import { bdi, fill, h, set, svg } from "./dom";
import type { Layout } from "./layout";
import { layerNumber, type Scene } from "./scene";
import { clipped, percent, visible } from "./words";

const TALL = 54;

export class Streams {
  readonly element = h("div", { class: "streams", "aria-hidden": "true" });
  private lines = svg("svg", { class: "stream-lines" });
  private expected = h("div", { class: "expected" });

  constructor() {
    this.element.append(this.lines, this.expected);
  }

  /** What is predicted is shown where there is room for words; a change is marked. */
  update(scene: Scene, layout: Layout): void {
    const shown = layout.kind !== "ticks";
    set(this.element, "hidden", !shown);
    if (!shown) return;
    set(this.lines, "viewBox", `0 0 ${layout.width} ${TALL}`);
    set(this.lines, "height", TALL);
    fill(this.lines, ...this.streams(scene, layout));
    set(this.expected, "hidden", !scene.engine.whole || layout.kind !== "words");
    if (scene.engine.whole && layout.kind === "words") fill(this.expected, ...this.predictions(scene, layout));
  }

  /** The name of each row, its height and what it means: of each layer, or where they are close of the chosen one alone. */
  names(scene: Scene): [string, number, string][] {
    const { layers } = scene.limits;
    const close = (TALL - 26) / layers < 12;
    const shown = Array.from({ length: layers }, (_, layer) => layer).filter((layer) => !close || layer === scene.state.layer);
    const stream = "The residual stream of each token: every layer adds its update to it.";
    const rows = shown.map((layer): [string, number, string] => [`stream, layer ${layerNumber(scene.data, layer)}`, markAt(layer, layers), stream]);
    if (this.expected.hidden) return rows;
    return [...rows, ["predicts next", TALL + 12, "The likeliest next token after each token. It is underlined where an edit has changed it."]];
  }

  private streams(scene: Scene, layout: Layout): Element[] {
    const { state } = scene;
    return scene.tokens.flatMap((_, token) => {
      const x = layout.x[token].toFixed(1);
      const own = token === state.token ? " own" : "";
      const line = svg("line", { class: `stream${own}`, x1: x, x2: x, y1: 0, y2: TALL - 4 });
      const layers = Array.from({ length: scene.limits.layers }, (_, layer) => this.mark(scene, x, layer, own, layout));
      return [line, ...layers];
    });
  }

  private mark(scene: Scene, x: string, layer: number, own: string, layout: Layout): Element {
    const chosen = layer === scene.state.layer ? " chosen" : "";
    const y = markAt(layer, scene.limits.layers);
    const r = Math.min(chosen ? 4 : 2.5, Math.max(1.2, layout.slot / 7));
    return svg("circle", { class: `phase${own}${chosen}`, cx: x, cy: y.toFixed(1), r });
  }

  private predictions(scene: Scene, layout: Layout): Element[] {
    return scene.tokens.map((_, token) => {
      const [now] = scene.engine.next(scene.run, token, 1);
      const [before] = scene.engine.next(scene.base, token, 1);
      const text = clipped(visible(now.text), 12);
      const classes = ["guess", token === scene.state.token ? "own" : "", now.id === before.id ? "" : "changed"].filter(Boolean);
      const element = h("span", { class: classes.join(" "), title: `probability ${percent(now.chance)}` }, bdi(text));
      element.style.left = `${layout.x[token]}px`;
      element.style.maxWidth = `${Math.max(24, roomOf(layout, token) - 4)}px`;
      return element;
    });
  }
}

/** The height at which the mark of a layer stands. */
function markAt(layer: number, layers: number): number {
  return 8 + ((TALL - 22) * (layer + 0.5)) / layers;
}

/** The distance of a token to its nearest neighbour. */
function roomOf({ x, slot }: Layout, token: number): number {
  const gaps = [token - 1, token + 1].filter((other) => other in x).map((other) => Math.abs(x[other] - x[token]));
  return Math.min(...(gaps.length ? gaps : [slot]));
}
