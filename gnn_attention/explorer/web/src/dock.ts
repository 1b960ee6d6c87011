// What stays on the screen: the selected edge with its numbers, the button that cuts it and says where, and the predictions.

import { bdi, button, fill, h, number, select, set } from "./dom";
import { shares } from "./bars";
import { headColour } from "./paint";
import { nextLines, placeOf } from "./predict";
import { given, isEdge, layerNumber, messageLength, rowOf, type Scene, type SceneHost } from "./scene";
import type { Scope } from "./state";
import { clipped, percent, rounded, visible } from "./words";

export interface DockHost extends SceneHost {
  toggle(src: number, dst: number, head: number): void;
  scope(scope: Scope): void;
  reset(): void;
  steps(): void;
}

const SHOWN = 3;
const SCOPES: Scope[] = ["layer", "head", "everywhere"];
// What each number means, for whoever points at it.
const MEANINGS = {
  logit: "The score of this edge before the softmax: query · key × scale, plus a bias. It has no unit.",
  weight: "The softmax turns the scores of all edges into this receiver into weights that add up to 1.",
  message: "The length of the vector that the sender sends in this head (value × output matrix).",
  carried: "Weight × message: the length of what arrives at the receiver along this edge.",
};

export class Dock {
  readonly element: HTMLElement;
  private pair = h("p", { class: "dock-pair" });
  private numbers = h("div", { class: "dock-numbers" });
  private verb = h("span", {});
  private place = h("span", { class: "sr-only" });
  private cut = button("", () => this.toggle(), { class: "primary cut" });
  private scope = select("An edit applies", (value) => this.host.scope(value as Scope));
  private reset = button("Reset", () => this.host.reset(), { class: "reset", title: "Reset to the model’s own graph" });
  private title = h("h2", { id: "next-title" });
  private lines = h("div", { class: "predictions" });
  private ending = h("p", { class: "aside dock-ending" });
  private next = h("div", { class: "dock-next" }, this.title, this.lines, this.ending);

  constructor(
    private host: DockHost,
    tour: HTMLElement,
    player: HTMLElement,
  ) {
    fill(this.cut, this.verb, this.place);
    const steps = button("How it is computed ↓", () => this.host.steps(), { class: "to-steps" });
    const act = h("div", { class: "dock-act" }, this.cut, this.scope.element, this.reset, steps);
    const edge = h("div", { class: "dock-edge" }, this.pair, this.numbers, act);
    const label = "The selected edge and the likely next tokens";
    this.element = h("section", { class: "dock", "aria-label": label }, tour, h("div", { class: "dock-body" }, edge, player, this.next));
  }

  update(scene: Scene): void {
    const { state } = scene;
    const layer = layerNumber(scene.data, state.layer);
    const edge = isEdge(scene.layer, state.head, scene.sender, state.token);
    this.describe(scene, layer, edge);
    const verb = edge ? "Cut" : given(scene, scene.sender, state.token) ? "Put back" : "Add";
    fill(this.verb, `${verb} ${scene.sender} → ${state.token}`);
    fill(this.place, ` ${placeOf(state.scope, layer, state.head)}`);
    this.scope.update(
      SCOPES.map((value) => ({ value, label: placeOf(value, layer, state.head) })),
      state.scope,
    );
    set(this.reset, "hidden", !scene.edited);
    set(this.next, "hidden", !scene.engine.whole);
    if (scene.engine.whole) this.predict(scene);
  }

  /** The edge, and its numbers in the order in which they are computed. */
  private describe(scene: Scene, layer: number, edge: boolean): void {
    const { state, tokens, sender } = scene;
    const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = headColour(state.head);
    const where = h("span", { class: "where" }, swatch, `layer ${layer}, head ${state.head}${edge ? "" : ": no edge"}`);
    fill(this.pair, ...mention(sender, tokens[sender].text), " → ", ...mention(state.token, tokens[state.token].text), where);
    const row = rowOf(scene.layer, state.head, state.token);
    const [weight, logit] = [row.weights[sender], row.logits[sender]];
    const was = rowOf(scene.was, state.head, state.token).weights[sender];
    const length = messageLength(scene, scene.run, state.head, sender);
    const before = scene.edited ? ["weight", wide(", "), h("span", { class: "stat-was" }, "was ", number(was, "weight-was", rounded(was)))] : ["weight", wide(`: ${percent(weight)}`)];
    fill(
      this.numbers,
      stat("logit", logit, ["logit", wide(" (score)")]),
      sign("softmax →"),
      stat("weight", weight, before),
      sign("×"),
      stat("message", length, ["message", wide(" length")]),
      sign("="),
      stat("carried", weight * length, ["arrives"]),
    );
  }

  private predict(scene: Scene): void {
    const { tokens, state } = scene;
    fill(this.title, "Next token after ", bdi(`‘${clipped(visible(tokens[state.token].text), 12)}’`), ": probability");
    fill(this.lines, shares("likely next tokens", nextLines(scene, SHOWN)));
    const last = tokens.length - 1;
    set(this.ending, "hidden", state.token === last);
    const [now] = scene.engine.next(scene.run, last, 1);
    const [before] = scene.engine.next(scene.base, last, 1);
    const guess = (one: typeof now) => `‘${clipped(visible(one.text), 12)}’`;
    const old = scene.edited ? `, was ${before.id === now.id ? "" : `${guess(before)} `}${percent(before.chance)}` : "";
    fill(this.ending, "After the whole text: ", bdi(guess(now)), ` ${percent(now.chance)}${old}.`);
  }

  private toggle(): void {
    const scene = this.host.scene();
    if (scene) this.host.toggle(scene.sender, scene.state.token, scene.state.head);
  }
}

function stat(name: keyof typeof MEANINGS, value: number, label: (Node | string)[]): HTMLElement {
  return h("span", { class: `stat ${name}`, title: MEANINGS[name] }, number(value, name, rounded(value)), h("span", { class: "stat-name" }, ...label));
}

function wide(words: string): HTMLElement {
  return h("span", { class: "wide" }, words);
}

function sign(text: string): HTMLElement {
  return h("span", { class: "stat-sign" }, text);
}

function mention(index: number, text: string): (Node | string)[] {
  return [h("span", { class: "index" }, `${index} `), bdi(clipped(visible(text), 18))];
}
