// Sentences, formulas and headings of the steps.

import { h } from "./dom";

export type Parts = (Node | string)[];

export function text(...parts: Parts): HTMLElement {
  return h("p", { class: "told" }, ...parts);
}

export function aside(...parts: Parts): HTMLElement {
  return h("p", { class: "aside" }, ...parts);
}

export function formula(...parts: Parts): HTMLElement {
  return h("p", { class: "formula" }, ...parts);
}

export function heading(words: string): HTMLElement {
  return h("h4", {}, words);
}

export function strong(...parts: Parts): HTMLElement {
  return h("strong", {}, ...parts);
}

export function sub(letters: string): HTMLElement {
  return h("sub", {}, letters);
}

export function sup(letters: string): HTMLElement {
  return h("sup", {}, letters);
}
