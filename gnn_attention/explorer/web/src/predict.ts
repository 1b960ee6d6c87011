// What the model predicts after the chosen token, before and after, and the list of what was changed.

import { shares, type Share } from "./bars";
import { bdi, button, fill, h, set } from "./dom";
import { layerNumber, type Scene } from "./scene";
import type { Scope } from "./state";
import type { Edit, PageData } from "./types";
import { clipped, percent, visible } from "./words";

export interface PredictHost {
  drop(index: number): void;
}

const SHOWN = 7;

export class Predict {
  readonly element: HTMLElement;
  private title = h("h2", { id: "predict-title" });
  private lines = h("div", { class: "predictions" });
  private key = h("p", { class: "aside" });
  private changes = h("div", { class: "changes" });

  constructor(private host: PredictHost) {
    this.element = h(
      "section",
      { class: "predict card", "aria-labelledby": "predict-title" },
      this.title,
      this.lines,
      this.key,
      this.changes,
    );
  }

  update(scene: Scene): void {
    const { whole } = scene.engine;
    const text = scene.tokens[scene.state.token].text;
    if (whole) fill(this.title, "Next token after ", bdi(`‘${clipped(visible(text), 16)}’`), ": probability");
    else fill(this.title, "Changes");
    set(this.lines, "hidden", !whole);
    if (whole) fill(this.lines, shares("likeliest next tokens", nextLines(scene)));
    set(this.key, "hidden", !whole || !scene.edited);
    fill(this.key, "The thin mark shows the probability along the model’s own graph, without edits.");
    fill(this.changes, ...this.edits(scene));
  }

  private edits(scene: Scene): Node[] {
    const { work } = scene.state;
    if (!scene.edited)
      return [h("p", { class: "aside" }, "Nothing is changed yet: cut or add an edge, or choose another graph.")];
    const items = work.edits.map((edit, index) =>
      h("li", {}, describe(edit, scene.data), this.remover(describe(edit, scene.data), index)),
    );
    const graph = work.mask
      ? [
          h(
            "p",
            { class: "aside" },
            `The graph ${clipped(visible(scene.data.masks[work.mask].name).replaceAll("␣", " "), 60)} replaces the model’s own.`,
          ),
        ]
      : [];
    const list = items.length
      ? [h("h3", {}, "Edits"), h("ul", { class: "edits", tabindex: items.length > 6 ? 0 : null }, ...items)]
      : [];
    return [...graph, ...list];
  }

  private remover(what: string, index: number): HTMLElement {
    return button("×", () => this.host.drop(index), { class: "icon small", "aria-label": `undo: ${what}` });
  }
}

/** Where an edit of this scope applies, in words. */
export function placeOf(scope: Scope, layer: number, head: number): string {
  if (scope === "everywhere") return "everywhere";
  return scope === "layer" ? `in layer ${layer}, all heads` : `in layer ${layer}, head ${head}`;
}

/** An edit in words. */
export function describe(edit: Edit, data: PageData): string {
  const layer = edit.layer === "all" ? "" : `layer ${layerNumber(data, edit.layer)}`;
  const where = edit.layer === "all" ? "everywhere" : edit.head === "all" ? `${layer}, all heads` : `${layer}, head ${edit.head}`;
  return `${edit.present ? "added" : "cut"} ${edit.src} → ${edit.dst}, ${where}`;
}

/** The likeliest next tokens of the receiver, with what was the likeliest before any edit. */
export function nextLines(scene: Scene, most = SHOWN): Share[] {
  const { engine, run, base, state } = scene;
  const all = scene.limits.vocabulary;
  const before = new Map(engine.next(base, state.token, scene.edited ? all : 1).map((guess) => [guess.id, guess.chance]));
  const [likeliest] = before.keys();
  const now = engine.next(run, state.token, scene.edited ? all : most);
  const shown = now.slice(0, most);
  if (!shown.some((guess) => guess.id === likeliest)) shown.push(...now.filter((guess) => guess.id === likeliest)); // what it predicted before
  return shown.map((guess) => {
    const was = before.get(guess.id) ?? 0;
    const aside = scene.edited ? `was ${percent(was)}` : "";
    return {
      index: null,
      text: guess.text,
      value: guess.chance,
      shown: percent(guess.chance),
      part: guess.chance,
      before: scene.edited ? was : null,
      aside,
      name: `chance-${guess.id}`,
    };
  });
}
