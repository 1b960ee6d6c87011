// The controls above the figure: what to look at, over which graph, in whose words.

import { button, h, radios, select, set, write, type Choice, type Chooser } from "./dom";
import { headColour } from "./paint";
import { reachMask } from "./reach";
import { layerNumber, type Scene } from "./scene";
import type { Action, Mode } from "./state";
import { clipped, counted, visible } from "./words";

const RADIOS_UP_TO = 8;

export class Controls {
  readonly element: HTMLElement;
  readonly undo = button("↶", () => this.dispatch({ type: "undo" }), { class: "icon", "aria-label": "Undo" });
  readonly redo = button("↷", () => this.dispatch({ type: "redo" }), { class: "icon", "aria-label": "Redo" });
  private mode = radios("View", (value) => this.look({ mode: value as Mode }), "mode");
  private graph = select("Graph", (value) => this.chooseGraph(Number(value)), "graph");
  private reaching = false;
  private meaning = h("p", { class: "meaning" });
  private layer: Chooser;
  private head: Chooser;

  constructor(
    sizes: { layers: number; heads: number },
    private dispatch: (action: Action) => void,
    figure: HTMLElement,
  ) {
    const chooser = (count: number) => (count <= RADIOS_UP_TO ? radios : select);
    this.layer = chooser(sizes.layers)("Layer", (value) => this.look({ layer: Number(value) }));
    this.head = chooser(sizes.heads)("Head", (value) => this.chooseHead(value));
    const where = h("div", { class: "fields where" }, this.layer.element, this.head.element);
    const fields = h("div", { class: "fields" }, this.mode.element, figure, where, this.graph.element);
    this.element = h("div", { class: "controls" }, fields, this.meaning);
  }

  update(scene: Scene): void {
    const { state, data, limits, engine } = scene;
    const modes: Choice[] = [
      { value: "listen", label: "Attend" },
      { value: "reach", label: "Reach" },
    ];
    if (engine.whole) modes.push({ value: "write", label: "Write" });
    this.mode.update(modes, state.mode);
    this.graph.update(
      data.masks.map((mask, index) => ({ value: String(index), label: clipped(visible(mask.name).replaceAll("␣", " "), 60) })),
      String(shownMask(scene)),
    );
    this.reaching = state.mode === "reach";
    write(this.meaning, this.meant(scene));
    this.layer.update(
      numbers(limits.layers).map((choice) => ({ ...choice, label: String(layerNumber(data, Number(choice.value))) })),
      String(state.layer),
    );
    this.head.update(
      [{ value: "all", label: "all" }, ...numbers(limits.heads, headColour)],
      state.allHeads ? "all" : String(state.head),
    );
    set(this.undo, "disabled", state.past.length === 0);
    set(this.redo, "disabled", state.future.length === 0);
    for (const field of [this.layer, this.head]) set(field.element, "hidden", state.mode === "reach");
  }

  /** What the graph is, and what n stands for in its name. */
  private meant(scene: Scene): string {
    const { data, engine, tokens } = scene;
    const mask = data.masks[shownMask(scene)];
    const room = engine.size - tokens.length;
    const size = room ? ` (n = ${engine.size}: ${counted(tokens.length, "token")} and room for ${room} more)` : "";
    return `${visible(mask.meaning).replaceAll("␣", " ").replace(/\.$/, "")}${size}.`;
  }

  private look(change: Extract<Action, { type: "look" }>["change"]): void {
    this.dispatch({ type: "look", change });
  }

  /** *Reach* shows a graph of its own, which changes nothing elsewhere. */
  private chooseGraph(mask: number): void {
    if (this.reaching) this.look({ reachMask: mask });
    else this.dispatch({ type: "mask", mask });
  }

  private chooseHead(value: string): void {
    this.look(value === "all" ? { allHeads: true } : { allHeads: false, head: Number(value) });
  }
}

/** The graph of the view: *Reach* has one of its own. */
function shownMask(scene: Scene): number {
  return scene.state.mode === "reach" ? reachMask(scene) : scene.state.work.mask;
}

function numbers(count: number, colour?: (index: number) => string): Choice[] {
  return Array.from({ length: count }, (_, index) => ({
    value: String(index),
    label: String(index),
    ...(colour ? { colour: colour(index) } : {}),
  }));
}
