// Who attends to a token: its receivers in the head under study, most first.

import { shares, type Share } from "./bars";
import { bdi, fill, h, radios } from "./dom";
import { headColour } from "./paint";
import { isEdge, layerNumber, rowOf, type Scene } from "./scene";
import { clipped, counted, rounded, visible } from "./words";

export interface HearersHost {
  select(src: number, dst: number, head: number): void;
}

const MOST = 10;

export class Hearers {
  readonly element: HTMLElement;
  private title = h("h2", { id: "hearers-title" });
  private whose = radios("Who attends to", (value) => this.choose(value === "sender"), "whose");
  private told = h("p", { class: "aside" });
  private list = h("div", {});
  private ofSender = true;
  private scene: Scene | null = null;

  constructor(private host: HearersHost) {
    const parts = [this.title, this.whose.element, this.told, this.list];
    this.element = h("section", { class: "hearers card", "aria-labelledby": "hearers-title" }, ...parts);
  }

  update(scene: Scene): void {
    this.scene = scene;
    const { state, tokens, layer } = scene;
    const src = this.ofSender ? scene.sender : state.token;
    const name = (token: number) => `${token} ${clipped(visible(tokens[token].text), 12)}`;
    fill(this.title, "Who attends to ", bdi(`‘${clipped(visible(tokens[src].text), 16)}’`), "?");
    const choices = [
      { value: "sender", label: `sender ${name(scene.sender)}` },
      { value: "receiver", label: `receiver ${name(state.token)}` },
    ];
    this.whose.update(choices, this.ofSender ? "sender" : "receiver");
    const all = receivers(scene, src);
    const where = `in layer ${layerNumber(scene.data, state.layer)}, head ${state.head}`;
    const most = all.length > MOST ? `; the list shows the ${MOST} that attend most` : "";
    fill(this.told, `${counted(all.length, "receiver")} of ${layer.tokens} ${where}${most}.`);
    fill(this.list, shares("who attends to it", all.slice(0, MOST).map((dst) => this.line(scene, src, dst))));
  }

  private line(scene: Scene, src: number, dst: number): Share {
    const weight = rowOf(scene.layer, scene.state.head, dst).weights[src];
    const was = rowOf(scene.was, scene.state.head, dst).weights[src];
    return {
      index: dst,
      text: scene.tokens[dst].text,
      value: weight,
      shown: rounded(weight),
      part: weight,
      before: scene.edited ? was : null,
      name: `heard-by-${dst}`,
      chosen: dst === scene.state.token,
      colour: headColour(scene.state.head),
      press: () => this.host.select(src, dst, scene.state.head),
    };
  }

  private choose(ofSender: boolean): void {
    this.ofSender = ofSender;
    if (this.scene) this.update(this.scene);
  }
}

/** The receivers of a sender, those that attend most first. */
function receivers({ layer, state }: Scene, src: number): number[] {
  const weight = (dst: number) => rowOf(layer, state.head, dst).weights[src];
  const all = Array.from({ length: layer.tokens }, (_, dst) => dst).filter((dst) => isEdge(layer, state.head, src, dst));
  return all.sort((one, other) => weight(other) - weight(one) || one - other);
}
