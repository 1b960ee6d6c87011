// The tokenizer of gnn_attention.model.tokenizer: words, then the bytes of each, joined pair by pair in the order of learning.

import { DIGITS, LETTERS } from "./letters";

const [OTHER, LETTER, DIGIT, SPACE] = [0, 1, 2, 3];
const BLANK = 32;
const LINE = 10;
const [LONGEST_WORD, LONGEST_MARKS, LONGEST_NUMBER, LONGEST_BLANK] = [32, 4, 2, 32];
const SPACES: [number, number][] = [
  [0x09, 0x0d],
  [0x1c, 0x20],
  [0x85, 0x85],
  [0xa0, 0xa0],
  [0x1680, 0x1680],
  [0x2000, 0x200a],
  [0x2028, 0x2029],
  [0x202f, 0x202f],
  [0x205f, 0x205f],
  [0x3000, 0x3000],
];
const CHARACTERS = 0x110000;
let classes: Uint8Array | null = null;

/** The class of every character: 0 a mark, 1 a letter, 2 a digit, 3 white space. Worked out once. */
export function characterClasses(): Uint8Array {
  if (classes) return classes;
  classes = new Uint8Array(CHARACTERS);
  for (const [ranges, kind] of [[LETTERS, LETTER], [DIGITS, DIGIT]] as const) {
    const numbers = ranges.split(" ").map((text) => parseInt(text, 36));
    for (let index = 0, at = 0; index < numbers.length; index += 2) {
      at += numbers[index];
      classes.fill(kind, at, (at += numbers[index + 1]));
    }
  }
  for (const [from, to] of SPACES) classes.fill(SPACE, from, to + 1);
  return classes;
}

/** Where the word that begins at `at` ends. */
function endOfWord(letters: number[], at: number, kinds: Uint8Array): number {
  const kind = (place: number) => (place < letters.length ? kinds[letters[place]] : SPACE);
  const run = (from: number, most: number, belongs: (place: number) => boolean) => {
    let end = from;
    while (end < letters.length && end - from < most && belongs(end)) end++;
    return end;
  };
  // A word or marks, with the blank before them.
  const first = letters[at] === BLANK ? at + 1 : at;
  if (kind(first) === LETTER) return run(first, LONGEST_WORD, (place) => kind(place) === LETTER);
  if (kind(first) === OTHER) return run(first, LONGEST_MARKS, (place) => kind(place) === OTHER);
  if (kind(at) === DIGIT) return run(at, LONGEST_NUMBER, (place) => kind(place) === DIGIT);
  if (letters[at] === LINE) return at + 1;
  // An indentation leaves the last blank to the word that follows.
  const blanks = run(at, LONGEST_BLANK + 1, (place) => letters[place] === BLANK);
  if (blanks - at > 1 && letters[blanks] !== BLANK && (kind(blanks) === LETTER || kind(blanks) === OTHER)) return blanks - 1;
  return run(at, LONGEST_BLANK, (place) => kind(place) === SPACE && letters[place] !== LINE);
}

export class Tokenizer {
  private readonly made = new Map<number, number>(); // left * size + right: the token that joins them
  private readonly parts: [number, number][] = [];
  private readonly known = new Map<string, number[]>();
  private readonly size: number;

  /** `merges`: two tokens for each token from 256 on. */
  constructor(merges: number[]) {
    this.size = 256 + merges.length / 2;
    for (let index = 0; index < merges.length; index += 2) {
      this.made.set(merges[index] * this.size + merges[index + 1], 256 + index / 2);
      this.parts.push([merges[index], merges[index + 1]]);
    }
  }

  /** The tokens of a text. Throws for half a character (a lone surrogate), which no tokenizer can read. */
  encode(text: string): number[] {
    const lone = /\p{Cs}/u.exec(text);
    if (lone) throw new RangeError(`character ${lone.index} is half a character (a lone surrogate)`);
    const letters = Array.from(text, (letter) => letter.codePointAt(0) as number);
    const kinds = characterClasses();
    const tokens: number[] = [];
    for (let at = 0; at < letters.length; ) {
      const end = endOfWord(letters, at, kinds);
      tokens.push(...this.word(String.fromCodePoint(...letters.slice(at, end))));
      at = end;
    }
    return tokens;
  }

  /** The text of tokens; U+FFFD where a character is cut. */
  decode(tokens: number[]): string {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(tokens.flatMap((token) => this.bytes(token))));
  }

  private word(word: string): number[] {
    let tokens = this.known.get(word);
    if (!tokens) this.known.set(word, (tokens = this.joined(Array.from(new TextEncoder().encode(word)))));
    return tokens;
  }

  /** Of all pairs that stand side by side the one learned first is joined, leftmost first, until none is left. */
  private joined(tokens: number[]): number[] {
    for (;;) {
      let [best, at] = [Infinity, -1];
      for (let index = 0; index + 1 < tokens.length; index++) {
        const made = this.made.get(tokens[index] * this.size + tokens[index + 1]) ?? Infinity;
        if (made < best) [best, at] = [made, index];
      }
      if (at < 0) return tokens;
      tokens.splice(at, 2, best);
    }
  }

  private bytes(token: number): number[] {
    if (token < 256) return [token];
    const [left, right] = this.parts[token - 256];
    return [...this.bytes(left), ...this.bytes(right)];
  }
}
