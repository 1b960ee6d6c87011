// The same edges as a table, for screen readers and for whoever likes tables.

import { bdi, button, fill, h, number, set } from "./dom";
import { attendedMost, layerNumber, messageLength, type Scene } from "./scene";
import { clipped, named, rounded, term, visible } from "./words";

export class EdgeTable {
  readonly element = h("details", { class: "table card" });
  private title = h("summary", {});
  private caption = h("caption", {});
  private head = h("thead", {});
  private rows = h("tbody", {});
  private scene: Scene | null = null;

  constructor(private toggle: (src: number, dst: number, head: number) => void) {
    const table = h("table", {}, this.caption, this.head, this.rows);
    this.element.append(
      this.title,
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table of the edges into the receiver" }, table),
    );
    this.element.addEventListener("toggle", () => this.scene && this.update(this.scene));
  }

  /** Rows are made while the table is open, and its title always. */
  update(scene: Scene): void {
    this.scene = scene;
    const { state, tokens, layer } = scene;
    const which = layerNumber(scene.data, state.layer);
    const senders = attendedMost(layer, state.head, state.token).sort((one, other) => one - other);
    fill(
      this.title,
      "All edges into ",
      bdi(named(state.token, tokens[state.token].text)),
      ` in layer ${which}, head ${state.head}: ${senders.length}`,
    );
    if (!this.element.open) return fill(this.rows);
    fill(this.caption, `Layer ${which}, head ${state.head}, receiver ${state.token}`);
    const words = [
      "sender",
      "token",
      term(scene.data, state.view, "logits"),
      term(scene.data, state.view, "weights"),
      "length of the message",
      "edge",
    ];
    fill(this.head, h("tr", {}, ...words.map((word) => h("th", { scope: "col" }, word))));
    const at = Array.from(this.rows.querySelectorAll("button")).indexOf(document.activeElement as HTMLButtonElement);
    fill(this.rows, ...(senders.length ? senders.map((src) => this.row(scene, src)) : [nobody()]));
    if (at >= 0) this.rows.querySelectorAll("button")[Math.min(at, senders.length - 1)]?.focus();
    set(this.element, "data-rows", senders.length);
  }

  private row(scene: Scene, src: number): HTMLElement {
    const { state, layer, tokens } = scene;
    const at = (state.head * layer.tokens + state.token) * layer.tokens + src;
    const length = messageLength(scene, scene.run, state.head, src);
    const cut = button("cut", () => this.toggle(src, state.token, state.head), {
      class: "small",
      "aria-label": `cut the edge from ${named(src, tokens[src].text)}`,
    });
    const cells = [
      h("td", {}, bdi(clipped(visible(tokens[src].text), 32))),
      h("td", {}, number(layer.overlap[at], "logit", rounded(layer.overlap[at]))),
      h("td", {}, number(layer.weights[at], "weight", rounded(layer.weights[at]))),
      h("td", {}, number(length, "message", rounded(length))),
      h("td", {}, cut),
    ];
    return h("tr", { "data-src": src }, h("th", { scope: "row" }, String(src)), ...cells);
  }
}

function nobody(): HTMLElement {
  return h("tr", {}, h("td", { colspan: 6 }, "The receiver attends to no token: its update from this head is exactly 0."));
}
