// The controls above the figure: what to look at, over which graph, in whose words.

import { button, h, radios, select, set, write, type Choice, type Chooser } from "./dom";
import { headColour } from "./paint";
import { layerNumber, type Scene } from "./scene";
import type { Action, Mode, Scope } from "./state";
import { clipped, viewName, visible } from "./words";

const RADIOS_UP_TO = 8;

export class Controls {
  readonly element: HTMLElement;
  readonly undo = button("↶", () => this.dispatch({ type: "undo" }), { class: "icon", "aria-label": "Undo" });
  readonly redo = button("↷", () => this.dispatch({ type: "redo" }), { class: "icon", "aria-label": "Redo" });
  private mode = radios("View", (value) => this.look({ mode: value as Mode }), "mode");
  private graph = select("Graph", (value) => this.dispatch({ type: "mask", mask: Number(value) }), "graph");
  private meaning = h("p", { class: "meaning" });
  private layer: Chooser;
  private head: Chooser;
  private view = select("In the words of", (value) => this.look({ view: value }));
  private scope = select("An edit holds", (value) => this.look({ scope: value as Scope }));

  constructor(
    sizes: { layers: number; heads: number },
    private dispatch: (action: Action) => void,
  ) {
    const chooser = (count: number) => (count <= RADIOS_UP_TO ? radios : select);
    this.layer = chooser(sizes.layers)("Layer", (value) => this.look({ layer: Number(value) }));
    this.head = chooser(sizes.heads)("Head", (value) => this.chooseHead(value));
    const first = h("div", { class: "fields" }, this.graph.element, this.layer.element, this.head.element);
    const second = h("div", { class: "fields" }, this.view.element, this.scope.element);
    this.element = h(
      "div",
      { class: "controls" },
      h("div", { class: "fields apart" }, this.mode.element, second),
      first,
      this.meaning,
    );
  }

  update(scene: Scene): void {
    const { state, data, limits, engine } = scene;
    const modes: Choice[] = [
      { value: "listen", label: "Listen" },
      { value: "reach", label: "Reach" },
    ];
    if (engine.whole) modes.push({ value: "write", label: "Write" });
    this.mode.update(modes, state.mode);
    this.graph.update(
      data.masks.map((mask, index) => ({ value: String(index), label: clipped(visible(mask.name).replaceAll("␣", " "), 60) })),
      String(state.work.mask),
    );
    write(this.meaning, visible(data.masks[state.work.mask].meaning).replaceAll("␣", " "));
    this.layer.update(
      numbers(limits.layers).map((choice) => ({ ...choice, label: String(layerNumber(data, Number(choice.value))) })),
      String(state.layer),
    );
    this.head.update(
      [{ value: "all", label: "all" }, ...numbers(limits.heads, headColour)],
      state.allHeads ? "all" : String(state.head),
    );
    this.view.update(
      data.views.map((value) => ({ value, label: viewName(value) })),
      state.view,
    );
    this.scope.update(scopes(layerNumber(data, state.layer)), state.scope);
    set(this.undo, "disabled", state.past.length === 0);
    set(this.redo, "disabled", state.future.length === 0);
    for (const field of [this.layer, this.head, this.view, this.scope]) set(field.element, "hidden", state.mode === "reach");
  }

  private look(change: Extract<Action, { type: "look" }>["change"]): void {
    this.dispatch({ type: "look", change });
  }

  private chooseHead(value: string): void {
    this.look(value === "all" ? { allHeads: true } : { allHeads: false, head: Number(value) });
  }
}

function numbers(count: number, colour?: (index: number) => string): Choice[] {
  return Array.from({ length: count }, (_, index) => ({
    value: String(index),
    label: String(index),
    ...(colour ? { colour: colour(index) } : {}),
  }));
}

function scopes(layer: number): Choice[] {
  return [
    { value: "everywhere", label: "everywhere" },
    { value: "layer", label: `in layer ${layer}, all heads` },
    { value: "head", label: `in layer ${layer}, one head` },
  ];
}
