// The mask beside the arcs: a row for each receiver, a column for each sender, and a cell for each edge that there could be.

import { bdi, fill, h, set, write } from "./dom";
import { headColour } from "./paint";
import { cellOf, headsShown, type Scene, type SceneHost } from "./scene";
import { clipped, named, rounded, visible } from "./words";

export interface MaskHost extends SceneHost {
  select(src: number, dst: number, head: number): void;
  toggle(src: number, dst: number, head: number): void;
}

export interface Cell {
  src: number;
  dst: number;
}

const MOST_CELLS = 32; // tokens: with more, the cells are painted on a canvas, without an element for each
const LARGEST = 22; // pixels of a cell
const LABELLED = 9.5;
const LONGEST = 8; // characters of a label
const LEAST = 0.16; // shade of an edge of weight 0

export class MaskView {
  readonly element: HTMLElement;
  private top = h("div", { class: "mask-senders", "aria-hidden": "true" });
  private side = h("div", { class: "mask-receivers", "aria-hidden": "true" });
  private grid = h("div", { class: "mask-grid", role: "grid", "aria-label": "Attention mask. Rows are receivers, columns are senders. Enter cuts or adds an edge." });
  private canvas = h("canvas", { class: "mask-canvas", "aria-hidden": "true" });
  private band = h("div", { class: "mask-band", "aria-hidden": "true" });
  private chosen = h("div", { class: "mask-chosen", "aria-hidden": "true" });
  private looked = h("div", { class: "mask-looked", "aria-hidden": "true", hidden: true });
  private area = h("div", { class: "mask-area" }, this.canvas, this.grid, this.band, this.chosen, this.looked);
  private table = h("div", { class: "mask-table" }, this.top, this.side, this.area);
  private meaning = h("p", { class: "aside mask-meaning" });
  private probe = h("span", { class: "probe", "aria-hidden": "true" });
  private scene: Scene | null = null;
  private texts = "";
  private painted = "";

  /** `look` lights the arc of a cell. */
  constructor(
    private host: MaskHost,
    private look: (cell: Cell | null) => void,
  ) {
    const axes = h("p", { class: "mask-axes" }, "columns: senders →", h("span", {}, "rows: receivers ↓"));
    const keys: [string, string][] = [
      ["edge", "edge (dark: large weight)"],
      ["none", "none"],
      ["cut", "cut"],
    ];
    const legend = keys.map(([kind, words]) => h("span", {}, h("i", { class: `mask-cell ${kind}`, "aria-hidden": "true" }), words));
    const how = h("p", { class: "aside mask-how" }, "Point at a cell to see its arc. Click to cut its edge or to restore it.");
    const tap = h("p", { class: "aside mask-tap" }, "Tap a cell to select its edge. Tap it again to cut it.");
    const words = h("div", { class: "mask-words" }, h("p", { class: "mask-legend" }, ...legend), how, tap, this.meaning);
    this.element = h("section", { class: "mask", "aria-label": "Attention mask" }, h("div", { class: "mask-figure" }, axes, this.table), words, this.probe);
    this.area.addEventListener("pointermove", (event) => event.pointerType !== "touch" && this.look(this.cellAt(event)));
    this.area.addEventListener("pointerleave", () => this.look(null));
    this.area.addEventListener("click", (event) => this.press(event));
    this.grid.addEventListener("focusin", (event) => {
      const cell = event.target as HTMLElement;
      if (cell.matches(":focus-visible")) this.look(cellOfElement(cell)); // not where a finger has left it
    });
    this.grid.addEventListener("focusout", () => this.look(null));
    this.grid.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draws a scene; while the pointer is dragged only the row of the receiver moves. */
  update(scene: Scene, side: number, quickly: boolean): void {
    this.scene = scene;
    const count = scene.tokens.length;
    this.place(scene, side);
    at(this.band, 0, scene.state.token, count, count);
    at(this.chosen, scene.sender, scene.state.token, count);
    mark(this.side, scene.state.token, "own");
    mark(this.top, scene.sender, "own");
    if (quickly) return;
    const mask = scene.data.masks[scene.state.work.mask];
    write(this.meaning, visible(mask.meaning).replaceAll("␣", " "));
    const heads = headsShown(scene);
    this.area.style.setProperty("--shade", heads.length === 1 ? headColour(heads[0]) : "var(--ink)");
    if (count > MOST_CELLS) return this.paint(scene, heads);
    Array.from(this.grid.children).forEach((row, dst) => Array.from(row.children).forEach((cell, src) => this.fillCell(cell as HTMLElement, scene, heads, src, dst)));
    if (!this.grid.contains(document.activeElement)) this.rove(scene.sender, scene.state.token);
  }

  /** Lights a cell, of the arc under the pointer or of its own. */
  light(cell: Cell | null): void {
    const count = this.scene?.tokens.length ?? 0;
    const shown = cell !== null && cell.src < count && cell.dst < count;
    set(this.looked, "hidden", !shown);
    mark(this.top, shown ? cell.src : -1, "looked");
    mark(this.side, shown ? cell.dst : -1, "looked");
    if (shown) at(this.looked, cell.src, cell.dst, count);
  }

  /** In another theme. */
  redraw(): void {
    this.painted = "";
  }

  private place(scene: Scene, side: number): void {
    const count = scene.tokens.length;
    const texts = scene.tokens.map((token) => clipped(visible(token.text), LONGEST));
    const key = JSON.stringify([side, texts]);
    if (key === this.texts) return;
    this.texts = key;
    this.painted = "";
    const size = Math.min(LARGEST, count > MOST_CELLS ? side / count : Math.floor((2 * side) / count) / 2);
    const labelled = size >= LABELLED;
    this.element.style.setProperty("--cell", `${size}px`);
    this.element.style.setProperty("--cells", String(count));
    this.element.classList.toggle("labelled", labelled);
    for (const list of [this.top, this.side]) fill(list, ...(labelled ? texts.map((text) => h("span", {}, bdi(text))) : []));
    const drawn = count > MOST_CELLS;
    set(this.grid, "hidden", drawn);
    set(this.canvas, "hidden", !drawn);
    fill(this.grid, ...(drawn ? [] : texts.map((_, dst) => h("div", { role: "row", class: "mask-row" }, ...texts.map((_, src) => this.cell(src, dst))))));
  }

  private cell(src: number, dst: number): HTMLElement {
    return h("div", { role: "gridcell", class: "mask-cell", tabindex: -1, "data-src": src, "data-dst": dst });
  }

  private fillCell(cell: HTMLElement, scene: Scene, heads: number[], src: number, dst: number): void {
    const { kind, weight } = cellOf(scene, heads, src, dst);
    set(cell, "class", `mask-cell ${kind}`);
    cell.style.setProperty("--share", `${shade(weight).toFixed(1)}%`);
    const pair = `from ${named(src, scene.tokens[src].text)} to ${named(dst, scene.tokens[dst].text)}`;
    const words = { edge: "edge", added: "added edge", partial: "edge in some heads", cut: "cut edge", none: "no edge" }[kind];
    set(cell, "aria-label", weight || kind === "edge" ? `${words} ${pair}, weight ${rounded(weight)}` : `${words} ${pair}`);
    set(cell, "aria-selected", String(src === scene.sender && dst === scene.state.token));
  }

  private paint(scene: Scene, heads: number[]): void {
    const count = scene.tokens.length;
    const key = JSON.stringify([scene.state.work, scene.state.layer, heads]);
    const pen = this.canvas.getContext("2d");
    if (key === this.painted || !pen) return;
    this.painted = key;
    const scale = Math.max(1, Math.floor(512 / count));
    [this.canvas.width, this.canvas.height] = [count * scale, count * scale];
    const [edge, cut] = [heads.length === 1 ? headColour(heads[0]) : "var(--ink)", "var(--cut)"].map((value) => this.colour(value));
    for (let dst = 0; dst < count; dst++)
      for (let src = 0; src < count; src++) {
        const { kind, weight } = cellOf(scene, heads, src, dst);
        if (kind === "none") continue;
        pen.globalAlpha = kind === "cut" ? 1 : shade(weight) / 100;
        pen.fillStyle = kind === "cut" ? cut : edge;
        pen.fillRect(src * scale, dst * scale, scale, scale);
      }
  }

  private colour(value: string): string {
    this.probe.style.color = value;
    return getComputedStyle(this.probe).color;
  }

  // -- pointer and keys -------------------------------------------------------------------------------------------------

  private cellAt(event: MouseEvent): Cell | null {
    const count = this.scene?.tokens.length ?? 0;
    const { left, top, width, height } = this.area.getBoundingClientRect();
    const [src, dst] = [Math.floor((count * (event.clientX - left)) / width), Math.floor((count * (event.clientY - top)) / height)];
    return src >= 0 && dst >= 0 && src < count && dst < count ? { src, dst } : null;
  }

  /** A click cuts or restores. A finger is wider than a cell, so that its first tap selects. */
  private press(event: MouseEvent): void {
    const cell = this.cellAt(event);
    const scene = this.host.scene();
    if (!cell || !scene) return;
    const selected = scene.sender === cell.src && scene.state.token === cell.dst;
    const finger = (event as PointerEvent).pointerType === "touch";
    if (finger && !selected) this.host.select(cell.src, cell.dst, scene.state.head);
    else this.toggle(cell);
  }

  private toggle(cell: Cell): void {
    const scene = this.host.scene();
    if (!scene) return;
    this.host.select(cell.src, cell.dst, scene.state.head);
    this.host.toggle(cell.src, cell.dst, scene.state.head);
  }

  private key(event: KeyboardEvent): void {
    const cell = cellOfElement(event.target);
    const last = (this.scene?.tokens.length ?? 1) - 1;
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const { src, dst } = cell;
    if (["Enter", " ", "x", "X", "Delete", "Backspace"].includes(event.key)) {
      event.preventDefault();
      return this.toggle(cell);
    }
    const moves: Record<string, [number, number]> = {
      ...{ ArrowLeft: [src - 1, dst], ArrowRight: [src + 1, dst], ArrowUp: [src, dst - 1], ArrowDown: [src, dst + 1] },
      ...{ Home: [0, dst], End: [last, dst] },
    };
    const to = moves[event.key];
    if (!to) return;
    event.preventDefault();
    const [x, y] = to.map((value) => Math.max(0, Math.min(last, value)));
    this.rove(x, y)?.focus();
  }

  /** The one cell to which Tab leads. */
  private rove(src: number, dst: number): HTMLElement | null {
    const cell = this.grid.children[dst]?.children[src] as HTMLElement | undefined;
    if (!cell) return null;
    const old = this.grid.querySelector('[tabindex="0"]');
    if (old) set(old, "tabindex", -1);
    set(cell, "tabindex", 0);
    return cell;
  }
}

function shade(weight: number): number {
  return 100 * (LEAST + (1 - LEAST) * Math.sqrt(weight));
}

function cellOfElement(target: EventTarget | null): Cell | null {
  const { src, dst } = (target as HTMLElement).dataset;
  return src === undefined || dst === undefined ? null : { src: Number(src), dst: Number(dst) };
}

/** Moves a frame to a cell, or over `wide` cells of its row. */
function at(frame: HTMLElement, src: number, dst: number, count: number, wide = 1): void {
  const part = (value: number) => `${((100 * value) / Math.max(1, count)).toFixed(4)}%`;
  Object.assign(frame.style, { left: part(src), top: part(dst), width: part(wide), height: part(1) });
}

function mark(list: HTMLElement, index: number, name: string): void {
  const old = list.querySelector(`.${name}`);
  const now = list.children[index] ?? null;
  if (old === now) return;
  old?.classList.remove(name);
  now?.classList.add(name);
}
