// A run of another model as it was recorded: q, k, v of each layer. The listening is computed anew over any edges; the states
// are not there, so later layers stay as they were.

import type { LayerRun, Recorded, RecordedLayer, Run, Stored } from "../types";
import { bitsOf, numbersOf } from "./decode";
import { listen, type Listener } from "./listen";

interface Kept {
  listener: Listener;
  q: Float64Array;
  k: Float64Array;
  v: Float64Array;
  mask: Uint8Array; // [T, T], the layer's own
}

export class Recording {
  readonly layers: Kept[];
  private last: LayerRun[] | null = null;

  constructor(
    recorded: Recorded,
    private readonly tokens: number,
  ) {
    this.layers = recorded.layers.map((layer) => kept(layer, recorded.width, tokens));
  }

  run(edgesOf: (layer: number) => Uint8Array): Run {
    const clean = new Uint8Array(this.tokens);
    const none = new Float64Array(0);
    const layers = this.layers.map(({ listener, q, k, v }, number): LayerRun => {
      const { heads, width, dim, valueDim } = listener;
      const old = this.last ? this.last[number] : null;
      const { listening } = listen(listener, this.tokens, { q, k, v }, edgesOf(number), old, old ? clean : clean.map(() => 1));
      const states = { before: none, heard: none, after: none, thought: none };
      return { tokens: this.tokens, heads, width, dim, valueDim, q, k, v, ...states, ...listening };
    });
    this.last = layers;
    return { layers, logits: null, milliseconds: 0 };
  }
}

function kept(layer: RecordedLayer, width: number, tokens: number): Kept {
  const [heads, , dim] = layer.q.shape;
  const valueDim = layer.v.shape[2];
  const bias = optional(layer.bias);
  const sinks = optional(layer.sinks);
  const listener: Listener = {
    ...{ heads, dim, valueDim, width, scale: layer.scale },
    bias: (head, dst, src) => (bias ? bias[(head * tokens + dst) * tokens + src] : 0),
    sink: (head) => (sinks ? sinks[head] : -Infinity),
    output: optional(layer.output),
    messages: optional(layer.messages),
    outputBias: optional(layer.outputBias),
  };
  const channels = { q: numbersOf(layer.q), k: perHead(layer.k, heads), v: perHead(layer.v, heads) };
  return { listener, ...channels, mask: bitsOf(layer.mask, tokens * tokens) };
}

function optional(stored: Stored | null): Float64Array | null {
  return stored && numbersOf(stored);
}

/** Key/value heads [kvHeads, T, dim], each repeated for the query heads that it serves. */
function perHead(stored: Stored, heads: number): Float64Array {
  const numbers = numbersOf(stored);
  const size = stored.shape[1] * stored.shape[2];
  const group = heads / stored.shape[0];
  if (group === 1) return numbers;
  const result = new Float64Array(heads * size);
  for (let head = 0; head < heads; head++) {
    const from = Math.floor(head / group) * size;
    result.set(numbers.subarray(from, from + size), head * size);
  }
  return result;
}
