// The communication phase of one layer: overlap -> weights over the in-edges -> mixture -> update, row by row.
// Only rows that can have changed since the last run are computed; arrays in which nothing changed are taken over as they are.

import type { LayerRun } from "../types";
import { addProduct, addScaled, dot } from "./linear";

/** What a layer's listening consists of, beside q, k, v and edges. */
export interface Listener {
  heads: number;
  dim: number;
  valueDim: number;
  width: number;
  scale: number;
  /** What is added to the logit of a pair. */
  bias(head: number, dst: number, src: number): number;
  /** One more logit of a head's softmax, without a value; -Infinity for none. */
  sink(head: number): number;
  /** W_O of all heads [heads, valueDim, width], or null where messages are kept. */
  output: Float64Array | null;
  /** v W_O [heads, tokens, width] where it is kept in place of W_O. */
  messages: Float64Array | null;
  /** b_O, or null. */
  outputBias: Float64Array | null;
}

export interface Channels {
  q: Float64Array;
  k: Float64Array;
  v: Float64Array;
}

export type Listening = Pick<LayerRun, "overlap" | "edges" | "weights" | "z" | "update">;

/**
 * The listening of `tokens` tokens, and which receivers' rows were computed anew.
 * `old` is an earlier result for as many tokens (null: none), `dirty` marks tokens whose q, k, v differ from then.
 */
export function listen(
  layer: Listener,
  tokens: number,
  { q, k, v }: Channels,
  edges: Uint8Array,
  old: Listening | null,
  dirty: Uint8Array,
): { listening: Listening; touched: Uint8Array } {
  const overlap = overlaps(layer, tokens, q, k, old, dirty);
  const rows = rowsToDo(layer.heads, tokens, edges, old, dirty);
  const touched = new Uint8Array(tokens);
  for (let row = 0; row < rows.length; row++) if (rows[row]) touched[row % tokens] = 1;
  if (old && !rows.includes(1)) return { listening: { ...old, overlap }, touched };

  const weights = old ? old.weights.slice() : new Float64Array(layer.heads * tokens * tokens);
  const z = old ? old.z.slice() : new Float64Array(layer.heads * tokens * layer.valueDim);
  const update = old ? old.update.slice() : new Float64Array(tokens * layer.width);
  for (let head = 0; head < layer.heads; head++) {
    for (let dst = 0; dst < tokens; dst++) {
      const row = head * tokens + dst;
      if (!rows[row]) continue;
      weigh(overlap, edges, weights, row * tokens, tokens, layer.sink(head));
      mix(weights, edges, v, head, row, tokens, layer.valueDim, z);
    }
  }
  for (let dst = 0; dst < tokens; dst++) if (touched[dst]) collect(layer, tokens, dst, weights, edges, z, update);
  return { listening: { overlap, edges, weights, z, update }, touched };
}

function overlaps(
  layer: Listener,
  tokens: number,
  q: Float64Array,
  k: Float64Array,
  old: Listening | null,
  dirty: Uint8Array,
): Float64Array {
  if (old && !dirty.includes(1)) return old.overlap;
  const overlap = old ? old.overlap.slice() : new Float64Array(layer.heads * tokens * tokens);
  const { dim, scale } = layer;
  for (let head = 0; head < layer.heads; head++) {
    for (let dst = 0; dst < tokens; dst++) {
      const row = head * tokens + dst;
      for (let src = 0; src < tokens; src++) {
        if (!dirty[dst] && !dirty[src]) continue;
        overlap[row * tokens + src] =
          scale * dot(q, row * dim, k, (head * tokens + src) * dim, dim) + layer.bias(head, dst, src);
      }
    }
  }
  return overlap;
}

/** For each head and receiver: is the receiver changed, one of its senders, or the set of its edges? */
function rowsToDo(heads: number, tokens: number, edges: Uint8Array, old: Listening | null, dirty: Uint8Array): Uint8Array {
  const rows = new Uint8Array(heads * tokens);
  if (old === null) return rows.fill(1);
  for (let row = 0; row < rows.length; row++) {
    let todo = dirty[row % tokens];
    for (let src = 0, at = row * tokens; src < tokens && !todo; src++, at++) {
      if (edges[at] !== old.edges[at] || (edges[at] && dirty[src])) todo = 1;
    }
    rows[row] = todo;
  }
  return rows;
}

/** Softmax over the in-edges of one row. Without any the row is 0: not a number of a non-edge is looked at. */
function weigh(overlap: Float64Array, edges: Uint8Array, weights: Float64Array, at: number, tokens: number, sink: number): void {
  let highest = sink;
  for (let i = at; i < at + tokens; i++) if (edges[i] && overlap[i] > highest) highest = overlap[i];
  let sum = highest === -Infinity ? 0 : Math.exp(sink - highest);
  for (let i = at; i < at + tokens; i++) {
    weights[i] = edges[i] && highest !== -Infinity ? Math.exp(overlap[i] - highest) : 0;
    sum += weights[i];
  }
  for (let i = at; i < at + tokens; i++) if (edges[i]) weights[i] = sum > 0 ? weights[i] / sum : 0;
}

/** z of one head and receiver: the weighted sum of the values along its edges. */
function mix(
  weights: Float64Array,
  edges: Uint8Array,
  v: Float64Array,
  head: number,
  row: number,
  tokens: number,
  valueDim: number,
  z: Float64Array,
): void {
  z.fill(0, row * valueDim, (row + 1) * valueDim);
  for (let src = 0, at = row * tokens; src < tokens; src++, at++) {
    if (edges[at]) addScaled(weights[at], v, (head * tokens + src) * valueDim, valueDim, z, row * valueDim);
  }
}

/** The update of one receiver: the sum over heads of z W_O (or of its weighted messages), and b_O. */
function collect(
  layer: Listener,
  tokens: number,
  dst: number,
  weights: Float64Array,
  edges: Uint8Array,
  z: Float64Array,
  update: Float64Array,
): void {
  const { width, valueDim } = layer;
  update.fill(0, dst * width, (dst + 1) * width);
  if (layer.outputBias) update.set(layer.outputBias, dst * width);
  for (let head = 0; head < layer.heads; head++) {
    const row = head * tokens + dst;
    if (layer.output) {
      addProduct(z, row * valueDim, valueDim, layer.output, head * valueDim * width, width, update, dst * width);
    } else if (layer.messages) {
      for (let src = 0, at = row * tokens; src < tokens; src++, at++) {
        if (edges[at]) addScaled(weights[at], layer.messages, (head * tokens + src) * width, width, update, dst * width);
      }
    }
  }
}
