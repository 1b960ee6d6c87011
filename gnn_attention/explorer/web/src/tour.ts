// The tour of the first page: seven clicks, each of which changes one number that is then told.

import { bdi, button, fill, h, number, set, write } from "./dom";
import { rowOf, type Scene } from "./scene";
import type { State, Work } from "./state";
import type { Edit, PageData } from "./types";
import { percent, rounded, visible } from "./words";

export interface TourHost {
  show(work: Work, change: Partial<State>): void;
}

// The words that the tour is about, whatever blanks are between them: one edge decides how they go on.
const WORDS = "for name in names: print(name) for name in";
const NAME = 3; // ␣name, which followed the first ␣in, token 2

type Parts = (Node | string)[];

interface Stop {
  edits?: Edit[];
  graph?: string; // the beginning of a graph's name: of the model's own unless given
  look: Partial<State>;
  told: (scene: Scene) => Parts;
}

const noticing = { token: NAME, sender: NAME - 1, layer: 0, head: 2, allHeads: false };

/** What the tour shows where the second ␣in is the token `last`. */
function stops(last: number): Stop[] {
  const copying = { token: last, sender: NAME, layer: 1, head: 3, allHeads: false };
  const answer = { ...copying, allHeads: true };
  return [
    {
      look: answer,
      told: (scene) => ["The model has read this text. It expects ", name(scene), " next, with probability ", chance(scene), ". Which token told it?"],
    },
    {
      look: copying,
      told: (scene) => [
        "The token at the start of this edge did. Head 3 of layer 1 has found the token that followed an earlier ‘␣in’, and gives it the weight ",
        weight(scene),
        ". But a weight is no proof, so we cut the edge.",
      ],
    },
    {
      edits: [gone(NAME, last, 1)],
      look: answer,
      told: (scene) => ["With this edge cut in layer 1 only, ", name(scene), " falls from ", before(scene), " to ", chance(scene), ". So it was this edge that told the model."],
    },
    {
      edits: [gone(1, last, 1)],
      look: { ...answer, sender: 1 },
      told: (scene) => ["Would any edge do? With the edge from another ‘␣name’ cut instead, ", name(scene), " still has ", chance(scene), ", almost as before."],
    },
    {
      look: noticing,
      told: (scene) => [
        "How did the head find this ‘␣name’? One layer earlier, this token listens to the token before it with weight ",
        weight(scene),
        ", so it knows that it follows ‘␣in’.",
      ],
    },
    {
      edits: [gone(NAME - 1, NAME, 0)],
      look: copying,
      told: (scene) => [
        "With that edge cut in layer 0 only, the search in layer 1 finds less: the weight there falls to ",
        weight(scene),
        ", and ",
        name(scene),
        " has ",
        chance(scene),
        ".",
      ],
    },
    {
      graph: "window(",
      look: answer,
      told: (scene) => ["You can also choose a graph. Here each token hears only the last few tokens, so the edge is missing, and ", name(scene), " has ", chance(scene), "."],
    },
    {
      look: answer,
      told: (scene) => ["Everything is restored, and ", name(scene), " has ", chance(scene), " again. Now it is your turn: cut another edge, choose one of the heads below, or type your own text."],
    },
  ];
}

export class Tour {
  readonly element = h("div", { class: "tour" });
  private told = h("p", { role: "status" });
  private count = h("span", { class: "tour-count" });
  private next = button("Start the tour", () => this.go(this.at + 1), { class: "primary" });
  private end = button("×", () => this.close(), { class: "icon small", "aria-label": "Close the tour" });
  private at = 0;
  private fresh = true;
  private stops: Stop[];

  constructor(
    private data: PageData,
    private host: TourHost,
  ) {
    this.stops = stops(data.tokens.length - 1);
    set(this.element, "hidden", !fits(data));
    this.element.append(this.told, this.count, this.next, this.end);
  }

  /** Tells of the scene that a click of the tour led to; what is done besides leaves the words as they are. */
  update(scene: Scene): void {
    if (this.element.hidden || !this.fresh) return;
    this.fresh = false;
    fill(this.told, ...this.stops[this.at].told(scene));
    const last = this.at === this.stops.length - 1;
    write(this.count, this.at ? `${this.at} of ${this.stops.length - 1}` : "");
    write(this.next, this.at === 0 ? "Start the tour" : last ? "Done" : "Next");
  }

  private go(to: number): void {
    const stop = this.stops[to];
    if (!stop) return this.close();
    this.at = to;
    this.fresh = true;
    const mask = stop.graph ? this.data.masks.findIndex((one) => one.name.startsWith(stop.graph as string)) : 0;
    this.host.show({ mask: Math.max(0, mask), edits: stop.edits ?? [], written: [] }, { mode: "listen", ...stop.look });
  }

  private close(): void {
    set(this.element, "hidden", true);
  }
}

/** True for the words of the tour, cut into the tokens that it names, in the model that ships. */
function fits({ model, tokens }: PageData): boolean {
  const texts = tokens.map((token) => token.text);
  const named = [texts[NAME - 2], texts[NAME - 1], texts[NAME], texts.at(-1)].join();
  const words = texts.join("").trim().split(/\s+/).join(" ");
  return model.kind === "model" && model.trained && words === WORDS && named === " name, in, name, in";
}

function gone(src: number, dst: number, layer: number): Edit {
  return { layer, head: "all", src, dst, present: false };
}

// -- what is told: of the likeliest next token of the text as it is ------------------------------------------------------

function likeliest(scene: Scene) {
  return scene.engine.next(scene.base, scene.tokens.length - 1, 1)[0];
}

function name(scene: Scene): Node {
  return bdi(`‘${visible(likeliest(scene).text)}’`);
}

function before(scene: Scene): string {
  return percent(likeliest(scene).chance);
}

function chance(scene: Scene): Node {
  const { id } = likeliest(scene);
  const all = scene.engine.next(scene.run, scene.tokens.length - 1, scene.limits.vocabulary);
  const now = all.find((guess) => guess.id === id)?.chance ?? 0;
  return h("strong", {}, number(now, "tour-chance", percent(now)));
}

function weight(scene: Scene): Node {
  const { head, token } = scene.state;
  const value = rowOf(scene.layer, head, token).weights[scene.sender];
  return h("strong", {}, number(value, "tour-weight", rounded(value)));
}
