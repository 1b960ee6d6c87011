// Which tokens attend to which: the bits of a mask, the user's edits over them, and how far reach spreads over layers.

import type { Edit, PageData } from "../types";
import { bitsOf } from "./decode";

/** The masks of a page, each unpacked when it is first asked for: rows are receivers, of `size` senders. */
export class Masks {
  readonly size: number;
  private readonly unpacked: (Uint8Array | undefined)[] = [];

  constructor(private readonly data: PageData) {
    this.size = data.tokens.length + data.room;
  }

  bits(mask: number): Uint8Array {
    const found = this.data.masks[mask];
    if (found === undefined) throw new RangeError(`mask must be in 0 .. ${this.data.masks.length - 1}, got ${mask}`);
    return (this.unpacked[mask] ??= bitsOf(found.bits, this.size * this.size));
  }
}

/** The [tokens, tokens] corner of a mask of `size` tokens. */
export function corner(bits: Uint8Array, size: number, tokens: number): Uint8Array {
  const result = new Uint8Array(tokens * tokens);
  for (let dst = 0; dst < tokens; dst++) {
    result.set(bits.subarray(dst * size, dst * size + tokens), dst * tokens);
  }
  return result;
}

/** The edges [heads, tokens, tokens] of one layer: the mask for every head, with the edits of this layer in their order. */
export function edgesOfLayer(base: Uint8Array, tokens: number, heads: number, layer: number, edits: Edit[]): Uint8Array {
  const edges = new Uint8Array(heads * tokens * tokens);
  for (let head = 0; head < heads; head++) edges.set(base, head * tokens * tokens);
  for (const edit of edits) {
    if (edit.layer !== "all" && edit.layer !== layer) continue;
    if (!isToken(edit.src, tokens) || !isToken(edit.dst, tokens)) continue;
    for (let head = 0; head < heads; head++) {
      if (edit.head !== "all" && edit.head !== head) continue;
      edges[(head * tokens + edit.dst) * tokens + edit.src] = edit.present ? 1 : 0;
    }
  }
  return edges;
}

function isToken(token: number, tokens: number): boolean {
  return Number.isInteger(token) && token >= 0 && token < tokens;
}

/** What `token` reaches after 1, 2, ... layers: itself, and all tokens from which an edge of any head leads on. */
export function spread(
  edgesOf: (layer: number) => Uint8Array,
  heads: number,
  tokens: number,
  token: number,
  layers: number,
): Uint8Array[] {
  const steps = Array.from({ length: layers }, (_, layer) => anyHead(edgesOf(layer), heads, tokens));
  // After l + 1 layers: the senders of the token in layer l, and what each of those had reached before.
  return steps.map((_, last) => {
    let known: Uint8Array = new Uint8Array(tokens);
    if (isToken(token, tokens)) known[token] = 1;
    for (let layer = last; layer >= 0; layer--) known = withSenders(known, steps[layer], tokens);
    return known;
  });
}

function anyHead(edges: Uint8Array, heads: number, tokens: number): Uint8Array {
  const pairs = tokens * tokens;
  const any = edges.slice(0, pairs);
  for (let head = 1; head < heads; head++) for (let pair = 0; pair < pairs; pair++) any[pair] |= edges[head * pairs + pair];
  return any;
}

function withSenders(known: Uint8Array, edges: Uint8Array, tokens: number): Uint8Array {
  const more = new Uint8Array(known);
  for (let dst = 0; dst < tokens; dst++) {
    if (!known[dst]) continue;
    for (let src = 0; src < tokens; src++) more[src] |= edges[dst * tokens + src];
  }
  return more;
}
