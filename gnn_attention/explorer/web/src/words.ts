// Words and numbers as they are shown: token texts made visible, the vocabulary of a reading, rounding.

import type { PageData } from "./types";

const SIGNS: Record<string, string> = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u007f": "␡" };
// Marks without a shape of their own: they are told by their number, so that none can hide or turn the line around.
const SHAPELESS =
  /[\u0080-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}/u;
const LONG_BLANK = /\u2423{4,}/g; // ␣; escaped, as the page must be the same in every encoding
const COMBINING = /^\p{M}/u;

/** A token's text with everything in it to be seen: ␣ ⏎ ⇥, control characters as symbols, other invisible ones by number. */
export function visible(text: string): string {
  const shown = Array.from(text, shownLetter).join("");
  if (shown === "") return "∅";
  const short = shown.replace(LONG_BLANK, (blanks) => `␣×${blanks.length}`);
  return COMBINING.test(short) ? `◌${short}` : short;
}

function shownLetter(letter: string): string {
  const code = letter.codePointAt(0) as number;
  if (SIGNS[letter] !== undefined) return SIGNS[letter];
  if (code < 32) return String.fromCharCode(0x2400 + code);
  return SHAPELESS.test(letter) ? `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩` : letter;
}

/** At most `longest` characters, the last one `…` if some are left out. */
export function clipped(text: string, longest: number): string {
  const letters = Array.from(text);
  return letters.length <= longest ? text : `${letters.slice(0, longest - 1).join("")}…`;
}

/** A token in a sentence: its number and its text, whose direction is kept to itself. */
export function named(index: number, text: string): string {
  return `${index} \u2068‘${clipped(visible(text), 24)}’\u2069`;
}

/** The words of the field, in which the page begins. */
export const USUAL = "usual";

const PLAIN: Record<string, string> = {
  q: "query (q)",
  k: "key (k)",
  overlaps: "dot product (q · k)",
  logits: "logits (scores)",
  weights: "softmax weights",
  v: "value (v)",
  z: "weighted sum (z)",
  update: "update",
};

/** What the chosen reading calls a part of attention; the library's own word where the reading has none. */
export function term(data: PageData, view: string, name: string): string {
  const found = data.words.find((row) => row.name === name)?.words[view];
  return found ?? PLAIN[name] ?? name;
}

const VIEWS: Record<string, string> = {
  usual: "transformers (usual)",
  search: "soft search",
  routing: "residual streams",
  transforms: "coupled transforms",
  "message exchange": "message exchange",
};

/** A reading's name in the list of readings. */
export function viewName(view: string): string {
  return VIEWS[view] ?? view;
}

/** A number to read: three digits after the point, or three significant ones if it is small or large. */
export function rounded(value: number): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 0.0005 || size >= 1e5) ? size.toExponential(1) : size.toFixed(size < 10 ? 3 : size < 100 ? 2 : 1);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** A share in per cent. */
export function percent(share: number): string {
  const value = share * 100;
  if (value !== 0 && value < 0.1) return "< 0.1 %";
  return `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

/** A number with its sign, for what is added. */
export function signed(value: number): string {
  return value < 0 ? rounded(value) : `+${rounded(value)}`;
}

/** `1 token`, `3 tokens`. */
export function counted(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
