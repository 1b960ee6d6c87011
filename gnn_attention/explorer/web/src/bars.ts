// Pictures of numbers: a vector as small bars up and down, and a list of named shares.

import { bdi, h, number, svg } from "./dom";
import { clipped, rounded, visible } from "./words";

/** A vector, bar by bar about a middle line; `most` is the value that reaches the edge, the vector's own largest unless given. */
export function vector(label: string, values: Float64Array, most = largest(values)): HTMLElement {
  const count = Math.max(1, values.length);
  const bars = Array.from(values, (value, index) => bar(index, most ? (20 * value) / most : 0)).join("");
  const picture = svg(
    "svg",
    {
      class: "vector-bars",
      viewBox: `0 0 ${count} 44`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": described(label, values),
    },
    svg("path", { class: "zero", d: `M0 22H${count}` }),
    svg("path", { class: "bars", d: bars }),
  );
  const name = h("span", { class: "vector-name" }, label);
  return h(
    "div",
    { class: "vector" },
    name,
    picture,
    h("span", { class: "vector-fact" }, `${values.length} numbers, length ${rounded(length(values))}`),
  );
}

function bar(index: number, tall: number): string {
  return `M${index + 0.12} 22v${(-tall).toFixed(2)}h.76V22z`;
}

function described(label: string, values: Float64Array): string {
  if (!values.length) return `${label}: no numbers`;
  return `${label}: ${values.length} numbers from ${rounded(Math.min(...values))} to ${rounded(Math.max(...values))}, length ${rounded(length(values))}`;
}

/** The largest size of a number among these vectors: the common scale of several pictures. */
export function largest(...vectors: Float64Array[]): number {
  let most = 0;
  for (const values of vectors) for (const value of values) most = Math.max(most, Math.abs(value));
  return most;
}

function length(values: Float64Array): number {
  return Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
}

/** One line of a list: who, how much now and before, and what to do when it is pressed. */
export interface Share {
  index: number | null;
  text: string;
  value: number;
  shown: string; // the value as text
  part: number; // of the bar, from 0 to 1
  before: number | null; // a mark at this part, where it was
  aside?: string;
  open?: boolean; // there is no edge
  chosen?: boolean;
  name: string; // of the number, for whoever checks
  colour?: string;
  press?: () => void;
}

/** A list of shares as bars; a mark shows where each was before. */
export function shares(label: string, list: Share[]): HTMLElement {
  return h("ul", { class: "shares", "aria-label": label }, ...list.map(share));
}

function share(line: Share): HTMLElement {
  const fillBar = h("span", { class: "share-bar" });
  fillBar.style.width = `${(100 * clampPart(line.part)).toFixed(2)}%`;
  if (line.colour) fillBar.style.background = line.colour;
  const track = h("span", { class: "share-track", "aria-hidden": "true" }, fillBar);
  if (line.before !== null) track.append(markAt(line.before));
  const who = h(
    "span",
    { class: "share-who" },
    line.index === null ? null : h("span", { class: "index" }, `${line.index} `),
    bdi(clipped(visible(line.text), 20)),
  );
  const value = h("span", { class: "share-value" }, number(line.value, line.name, line.shown));
  const aside = h("span", { class: "share-aside" }, line.aside ?? "");
  const parts = [who, aside, track, value];
  const inner = line.press
    ? h("button", { type: "button", class: "share", "aria-current": line.chosen ? "true" : null }, ...parts)
    : h("div", { class: "share" }, ...parts);
  if (line.press) inner.addEventListener("click", line.press);
  if (line.open) inner.classList.add("open");
  return h("li", { "data-index": line.index }, inner);
}

function markAt(part: number): HTMLElement {
  const mark = h("span", { class: "share-before" });
  mark.style.left = `${(100 * clampPart(part)).toFixed(2)}%`;
  return mark;
}

function clampPart(part: number): number {
  return Number.isFinite(part) ? Math.max(0, Math.min(1, part)) : 0;
}
