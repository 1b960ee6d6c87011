// The panel under the figure: which edge, which form, which step, and what that step computes.

import { button, fill, h, radios, select, set, write, type Choice } from "./dom";
import type { Scene, SceneHost } from "./scene";
import { STEPS, type Form } from "./state";
import { pairOf, stepNames, stepParts } from "./steps";
import { clipped, viewName, visible } from "./words";

export interface PanelHost extends SceneHost {
  receive(token: number, dragging: boolean): void;
  study(src: number | null): void;
  head(head: number): void;
  form(form: Form): void;
  step(step: number): void;
  words(view: string): void;
}

export class Panel {
  readonly element: HTMLElement;
  private from = select("from", (value) => this.host.study(Number(value)), "inline");
  private to = select("to", (value) => this.host.receive(Number(value), false), "inline");
  private head = select("in head", (value) => this.host.head(Number(value)), "inline");
  private view = select("In the words of", (value) => this.host.words(value), "inline");
  private form = radios("Form", (value) => this.host.form(value as Form));
  private steps = radios("Steps", (value) => this.host.step(Number(value)), "steps");
  private back = button("‹", () => this.move(-1), { class: "icon", "aria-label": "Step back" });
  private on = button("›", () => this.move(1), { class: "icon", "aria-label": "Next step" });
  private title = h("h3", {});
  private body = h("div", { class: "step-body" });
  private choices: { of: Scene["tokens"]; list: Choice[] } = { of: [], list: [] };

  constructor(private host: PanelHost) {
    const edge = h("div", { class: "edge-line" }, this.from.element, this.to.element, this.head.element, this.view.element);
    const bar = h("div", { class: "step-bar" }, this.back, this.steps.element, this.on);
    const heading = h("h2", { id: "panel-title" }, "One edge, step by step");
    this.element = h(
      "section",
      { class: "panel card", "aria-labelledby": "panel-title" },
      heading,
      edge,
      bar,
      h("div", { class: "step-head" }, this.title, this.form.element),
      this.body,
    );
  }

  update(scene: Scene): void {
    const { state, tokens, layer } = scene;
    const pair = pairOf(scene, (src) => this.host.study(src));
    if (this.choices.of !== tokens)
      this.choices = {
        of: tokens,
        list: tokens.map((token, index) => ({ value: String(index), label: `${index}: ${clipped(visible(token.text), 16)}` })),
      };
    const choices = this.choices.list;
    this.from.update(choices, String(scene.sender));
    this.to.update(choices, String(state.token));
    this.head.update(
      Array.from({ length: layer.heads }, (_, head) => ({ value: String(head), label: String(head) })),
      String(state.head),
    );
    this.view.update(
      scene.limits.views.map((value) => ({ value, label: viewName(value) })),
      state.view,
    );
    set(this.form.element, "hidden", pair.forms === null);
    this.form.update(
      ["standard", "factored", "merged"].map((value) => ({ value, label: value })),
      state.form,
    );
    const names = stepNames(scene);
    this.steps.update(
      names.map((label, index) => ({ value: String(index), label: `${index + 1} ${label}` })),
      String(state.step),
    );
    set(this.back, "disabled", state.step === 0);
    set(this.on, "disabled", state.step === STEPS - 1);
    write(this.title, `${state.step + 1}. ${capital(names[state.step])}`);
    this.body.dataset["step"] = String(state.step);
    this.keepFocus(() => fill(this.body, ...stepParts(pair)));
  }

  /** The list is built anew: the focus stays on the line it was on. */
  private keepFocus(build: () => void): void {
    const buttons = () => Array.from(this.body.querySelectorAll<HTMLElement>("button"));
    const at = buttons().indexOf(document.activeElement as HTMLElement);
    build();
    if (at >= 0) buttons()[at]?.focus({ preventScroll: true });
  }

  private move(by: number): void {
    const scene = this.host.scene();
    if (scene) this.host.step(scene.state.step + by);
  }
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
