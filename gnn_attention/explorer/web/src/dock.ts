// What stays on the screen: the selected edge with its numbers, the button that cuts it and says where, and what is expected next.

import { bdi, button, fill, h, number, select, set, write } from "./dom";
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

export class Dock {
  readonly element: HTMLElement;
  private pair = h("p", { class: "dock-pair" });
  private numbers = h("p", { class: "dock-numbers" });
  private cut = button("", () => this.toggle(), { class: "primary cut" });
  private scope = select("An edit applies", (value) => this.host.scope(value as Scope));
  private reset = button("Reset", () => this.host.reset(), { class: "reset", title: "Reset to the model’s own graph" });
  private title = h("h2", { id: "next-title" });
  private lines = h("div", { class: "predictions" });
  private next = h("div", { class: "dock-next" }, this.title, this.lines);

  constructor(
    private host: DockHost,
    tour: HTMLElement,
    player: HTMLElement,
  ) {
    const steps = button("Steps of this edge ↓", () => this.host.steps(), { class: "to-steps" });
    const act = h("div", { class: "dock-act" }, this.cut, this.scope.element, this.reset, steps);
    const edge = h("div", { class: "dock-edge" }, this.pair, this.numbers, act);
    const label = "The selected edge and the likely next tokens";
    this.element = h("section", { class: "dock", "aria-label": label }, tour, h("div", { class: "dock-body" }, edge, player, this.next));
  }

  update(scene: Scene): void {
    const { state } = scene;
    const layer = layerNumber(scene.data, state.layer);
    const edge = isEdge(scene.layer, state.head, scene.sender, state.token);
    this.told(scene, layer);
    const what = `${scene.sender} → ${state.token}`;
    const verb = edge ? "Cut" : given(scene, scene.sender, state.token) ? "Put back" : "Add";
    write(this.cut, `${verb} ${what} ${placeOf(state.scope, layer, state.head)}`);
    this.scope.update(
      SCOPES.map((value) => ({ value, label: placeOf(value, layer, state.head) })),
      state.scope,
    );
    set(this.reset, "hidden", !scene.edited);
    set(this.next, "hidden", !scene.engine.whole);
    if (scene.engine.whole) this.expects(scene);
  }

  private told(scene: Scene, layer: number): void {
    const { state, tokens, sender } = scene;
    const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = headColour(state.head);
    const where = h("span", { class: "where" }, swatch, `layer ${layer}, head ${state.head}`);
    fill(this.pair, ...mention(sender, tokens[sender].text), " → ", ...mention(state.token, tokens[state.token].text), where);
    const row = rowOf(scene.layer, state.head, state.token);
    const [weight, logit] = [row.weights[sender], row.logits[sender]];
    const was = rowOf(scene.was, state.head, state.token).weights[sender];
    const length = messageLength(scene, scene.run, state.head, sender);
    const gets = row.edges[sender] ? ` ${percent(weight)} of what the receiver hears` : " there is no edge, so nothing is carried";
    fill(
      this.numbers,
      h("strong", {}, "weight ", number(weight, "weight", rounded(weight))),
      scene.edited ? h("span", {}, " (was ", number(was, "weight-was", rounded(was)), ")") : "",
      `,${gets} · logit `,
      number(logit, "logit", rounded(logit)),
      " · message of length ",
      number(length, "message", rounded(length)),
      ", carries ",
      number(weight * length, "carried", rounded(weight * length)),
    );
  }

  private expects(scene: Scene): void {
    const { text } = scene.tokens[scene.state.token];
    fill(this.title, "After ", bdi(`‘${clipped(visible(text), 16)}’`), " the model expects");
    fill(this.lines, shares("likely next tokens", nextLines(scene, SHOWN)));
  }

  private toggle(): void {
    const scene = this.host.scene();
    if (scene) this.host.toggle(scene.sender, scene.state.token, scene.state.head);
  }
}

function mention(index: number, text: string): (Node | string)[] {
  return [h("span", { class: "index" }, `${index} `), bdi(clipped(visible(text), 18))];
}
