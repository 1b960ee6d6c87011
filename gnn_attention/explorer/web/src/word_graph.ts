// The same head with words for nodes: what the tokens of a word attend to, added up by word.

import { curveOf, pathOf, strokeOf } from "./arcs";
import { shares } from "./bars";
import { bdi, fill, h, set, svg } from "./dom";
import type { Layout } from "./layout";
import { headColour } from "./paint";
import { layerNumber, type Scene } from "./scene";
import type { LayerRun } from "./types";
import { clipped, rounded, visible } from "./words";

export interface WordsHost {
  receive(token: number, dragging: boolean): void;
}

/** Tokens first .. last that make one word. */
export interface Word {
  text: string;
  first: number;
  last: number;
}

const MOST = 16;
const FEWER = 0.8; // of the tokens: with more words the picture says nothing new
const [HEIGHT, FAINT] = [120, 0.03];
const kindOf = (letter: string | undefined) => (!letter || /\s/.test(letter) ? 0 : /[\p{L}\p{N}\p{M}_]/u.test(letter) ? 1 : 2);

/** A word ends where white space begins, or letters turn into marks or back. */
export function wordsOf(tokens: Scene["tokens"]): Word[] {
  const words: Word[] = [];
  tokens.forEach(({ text }, index) => {
    const before = tokens[index - 1]?.text ?? "";
    const [first, last] = [kindOf(Array.from(text)[0]), kindOf(Array.from(before).at(-1))];
    if (index && first !== 0 && first === last) {
      const word = words[words.length - 1];
      [word.text, word.last] = [word.text + text, index];
    } else words.push({ text, first: index, last: index });
  });
  return words;
}

/** Weights [dst, src] of words in one head: to all tokens of the sender, the mean over those of the receiver. */
export function weightsOf(layer: LayerRun, head: number, words: Word[]): number[][] {
  return words.map((dst) =>
    words.map((src) => {
      let sum = 0;
      for (let to = dst.first; to <= dst.last; to++)
        for (let from = src.first; from <= src.last; from++) sum += layer.weights[(head * layer.tokens + to) * layer.tokens + from];
      return sum / (dst.last - dst.first + 1);
    }),
  );
}

export class WordGraph {
  readonly element: HTMLElement;
  private told = h("p", { class: "aside" });
  private arcs = svg("svg", { class: "word-arcs", "aria-hidden": "true" });
  private row = h("div", { class: "word-row", role: "group", "aria-label": "Words: choose the receiver" });
  private list = h("div", { class: "word-list" });

  constructor(private host: WordsHost) {
    const title = h("h2", { id: "words-title" }, "Word by word");
    const figure = h("div", { class: "word-figure" }, this.arcs, this.row);
    this.element = h("section", { class: "card word-graph", "aria-labelledby": "words-title" }, title, this.told, figure, this.list);
  }

  update(scene: Scene): void {
    const words = wordsOf(scene.tokens);
    const shown = words.length > 1 && words.length <= MOST && words.length <= FEWER * scene.tokens.length;
    set(this.element, "hidden", !shown);
    if (!shown) return;
    const { state } = scene;
    const chosen = words.findIndex((word) => word.last >= state.token);
    const weights = weightsOf(scene.layer, state.head, words);
    const where = `in layer ${layerNumber(scene.data, state.layer)}, head ${state.head}`;
    const how = "The weights of all tokens of a sending word are added, and averaged over the tokens of the receiving word";
    fill(this.told, `Here the ${scene.tokens.length} tokens are grouped into ${words.length} words, ${where}. ${how}.`);
    this.draw(words, weights, chosen, state.head);
    const lines = words.map((word, index) => ({
      ...{ index: null, text: word.text.trimStart(), value: weights[chosen][index], shown: rounded(weights[chosen][index]) },
      ...{ part: weights[chosen][index], before: null, name: `word-${index}`, colour: headColour(state.head) },
    }));
    fill(this.list, shares(`what ${words[chosen].text.trim()} attends to`, lines.filter((line) => line.value > 0)));
  }

  private draw(words: Word[], weights: number[][], chosen: number, head: number): void {
    const width = Math.max(240, this.element.clientWidth || 640);
    const slot = width / words.length;
    const x = Float64Array.from(words, (_, index) => (index + 0.5) * slot);
    const layout: Layout = { kind: "words", width, height: HEIGHT, gutter: 0, slot, x, widths: x };
    const paths: SVGPathElement[] = [];
    weights.forEach((row, dst) =>
      row.forEach((weight, src) => {
        if (dst !== chosen && weight < FAINT) return;
        if (weight === 0) return;
        const path = svg("path", { class: dst === chosen ? "arc" : "arc faint", d: pathOf(curveOf(layout, src, dst, 0), HEIGHT) });
        path.style.stroke = dst === chosen ? headColour(head) : "";
        path.style.strokeWidth = `${strokeOf(layout, weight).toFixed(2)}px`;
        if (dst === chosen) paths.push(path);
        else paths.unshift(path);
      }),
    );
    set(this.arcs, "viewBox", `0 0 ${width.toFixed(0)} ${HEIGHT + 4}`);
    fill(this.arcs, ...paths);
    this.buttons(words, chosen);
  }

  /** Made anew for other words only, so that the focus stays. */
  private buttons(words: Word[], chosen: number): void {
    const key = words.map((word) => `${word.last}.${word.text}`).join();
    if (this.row.dataset["words"] !== key) fill(this.row, ...words.map((word) => this.button(word)));
    this.row.dataset["words"] = key;
    Array.from(this.row.children).forEach((one, index) => set(one, "aria-pressed", String(index === chosen)));
  }

  private button(word: Word): HTMLElement {
    const text = visible(word.text.trimStart() || word.text);
    const element = h("button", { type: "button", class: "word", title: text }, bdi(clipped(text, 24)));
    element.addEventListener("click", () => this.host.receive(word.last, false));
    return element;
  }
}
