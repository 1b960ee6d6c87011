// The tour of the first page: a click for each stop, which changes one number and then explains it.

import { bdi, button, fill, h, number, set, write } from "./dom";
import { isEdge, rowOf, type Scene } from "./scene";
import type { State, Work } from "./state";
import type { Edit, PageData, Run } from "./types";
import { percent, rounded, visible } from "./words";

export interface TourHost {
  show(work: Work, change: Partial<State>): void;
}

// The words that the tour is about, whatever blanks are between them: one edge decides how they go on.
const WORDS = "for name in names: print(name) for name in";
const NAME = 3; // ␣name, which followed the first ␣in, token 2
const WINDOW = "window(";

type Parts = (Node | string)[];

interface Stop {
  edits?: Edit[];
  graph?: string; // the beginning of a graph's name: of the model's own unless given
  look: Partial<State>;
  says: (scene: Scene) => Parts;
}

const noticing = { token: NAME, sender: NAME - 1, layer: 0, head: 2, allHeads: false };

/** What the tour shows where the second ␣in is the token `last`, and `twin` another name, near enough for the window. */
function stops(last: number, twin: number): Stop[] {
  const copying = { token: last, sender: NAME, layer: 1, head: 3, allHeads: false };
  const near = { ...copying, sender: twin, head: 0 };
  const cut = gone(NAME, last, 1);
  return [
    {
      look: copying,
      says: (scene) => ["The model has read this text and predicts ", name(scene), " next, with probability ", chance(scene), ". Which earlier token does that come from?"],
    },
    {
      look: copying,
      says: (scene) => [
        "Probably the one at the start of this edge: head 3 of layer 1 attends to the token after an earlier ‘␣in’ with weight ",
        weight(scene),
        ". But a weight is no proof. Cut the edge!",
      ],
    },
    {
      edits: [cut],
      look: copying,
      says: (scene) => ["With this edge cut in layer 1 only, ", name(scene), " falls from ", before(scene), " to ", chance(scene), ". So the prediction depends on this one edge."],
    },
    {
      edits: [gone(1, last, 1)],
      look: { ...copying, sender: 1 },
      says: (scene) => ["Would any cut do that? With the edge from another ‘␣name’ cut instead, ", name(scene), " still has ", chance(scene), ", almost as before."],
    },
    {
      look: noticing,
      says: (scene) => [
        "How did the head find this ‘␣name’? One layer earlier, it attends to the token before it with weight ",
        weight(scene),
        ". So its state says that it follows ‘␣in’.",
      ],
    },
    {
      edits: [gone(NAME - 1, NAME, 0)],
      look: copying,
      says: (scene) => ["With that edge cut in layer 0 only, layer 1 no longer finds it: the weight falls to ", weight(scene), ", and ", name(scene), " has ", chance(scene), "."],
    },
    {
      graph: WINDOW,
      look: copying,
      says: (scene) => [
        "Now choose another mask. In this window, our edge and ",
        missing(scene),
        " others are missing in each layer. Yet ",
        name(scene),
        " has ",
        chance(scene),
        ", more than the ",
        chanceOf(scene, runOf(scene, 0, [cut]), "tour-cut"),
        " after one cut. Why?",
      ],
    },
    {
      graph: WINDOW,
      look: near,
      says: (scene) => [
        `Another ‘name’, token ${twin}, is inside the window. The softmax divides the weight among `,
        number(attended(scene), "tour-senders", String(attended(scene))),
        ` tokens instead of ${last + 1}, so head 0 gives it `,
        weight(scene),
        " instead of ",
        weightBefore(scene),
        ". Cut this edge too!",
      ],
    },
    {
      graph: WINDOW,
      edits: [gone(twin, last, 1)],
      look: near,
      says: (scene) => ["With this edge cut as well, ", name(scene), " has only ", chance(scene), ". So a part of the prediction came from the nearer token."],
    },
    {
      look: copying,
      says: (scene) => ["Everything is restored, and ", name(scene), " has ", chance(scene), " again. Your turn: cut any edge, choose one of the heads below, or type your own text."],
    },
  ];
}

export class Tour {
  readonly element = h("div", { class: "tour" });
  /** Where the page of this tour begins; null without a tour. */
  readonly opening: Partial<State> | null;
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
    this.stops = stops(data.tokens.length - 1, data.tokens.map((token) => token.text).lastIndexOf("name"));
    this.opening = fits(data) ? this.stops[0].look : null;
    set(this.element, "hidden", this.opening === null);
    this.element.append(this.told, this.count, this.next, this.end);
  }

  /** Explains the scene that a click of the tour led to. Whoever makes the next edit by hand goes on; other edits leave the words. */
  update(scene: Scene): void {
    if (this.element.hidden) return;
    if (!this.fresh) {
      if (this.isNext(scene.state)) this.go(this.at + 1);
      return;
    }
    this.fresh = false;
    fill(this.told, ...this.stops[this.at].says(scene));
    const last = this.at === this.stops.length - 1;
    write(this.count, this.at ? `${this.at} of ${this.stops.length - 1}` : "");
    write(this.next, this.at === 0 ? "Start the tour" : last ? "Done" : "Next");
  }

  private go(to: number): void {
    const stop = this.stops[to];
    if (!stop) return this.close();
    this.at = to;
    this.fresh = true;
    this.host.show(this.workOf(stop), { mode: "listen", ...stop.look });
  }

  private workOf(stop: Stop): Work {
    const mask = stop.graph ? this.data.masks.findIndex((one) => one.name.startsWith(stop.graph as string)) : 0;
    return { mask: Math.max(0, mask), edits: stop.edits ?? [], written: [] };
  }

  /** Whether somebody has just made the edit of the next stop, by the button, an arc, a cell or the list of graphs. */
  private isNext({ work, mode }: State): boolean {
    const [now, next] = [this.stops[this.at], this.stops[this.at + 1]];
    if (!next || mode !== "listen") return false;
    const [wanted, had] = [next, now].map((stop) => JSON.stringify(this.workOf(stop)));
    return JSON.stringify({ mask: work.mask, edits: work.edits, written: work.written }) === wanted && wanted !== had && (next.edits ?? next.graph ?? this.at + 2 === this.stops.length) !== false;
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

// -- numbers: of the likeliest next token of the text as it is ------------------------------------------------------

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
  return chanceOf(scene, scene.run, "tour-chance");
}

function chanceOf(scene: Scene, run: Run, name: string): Node {
  const { id } = likeliest(scene);
  const all = scene.engine.next(run, scene.tokens.length - 1, scene.limits.vocabulary);
  const now = all.find((guess) => guess.id === id)?.chance ?? 0;
  return h("strong", {}, number(now, name, percent(now)));
}

/** A run of the same tokens over another graph. */
function runOf(scene: Scene, mask: number, edits: Edit[]): Run {
  return scene.engine.run({ mask, edits, tokenIds: scene.tokens.map((token) => token.id) });
}

function weight(scene: Scene): Node {
  const { head, token } = scene.state;
  const value = rowOf(scene.layer, head, token).weights[scene.sender];
  return h("strong", {}, number(value, "tour-weight", rounded(value)));
}

function weightBefore(scene: Scene): Node {
  const { head, token } = scene.state;
  const value = rowOf(scene.was, head, token).weights[scene.sender];
  return number(value, "tour-weight-before", rounded(value));
}

/** How many tokens the receiver attends to. */
function attended({ layer, state, tokens }: Scene): number {
  return tokens.filter((_, src) => isEdge(layer, state.head, src, state.token)).length;
}

/** How many edges of the model's own graph the chosen one lacks, besides the one of the tour. */
function missing({ engine, state, tokens }: Scene): Node {
  let count = -1;
  tokens.forEach((_, dst) => tokens.forEach((_, src) => (count += Number(engine.has(0, src, dst, 0) && !engine.has(state.work.mask, src, dst, 0)))));
  return number(count, "tour-missing", String(count));
}
