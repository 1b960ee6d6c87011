// The exact forward pass of gnn_attention.model.LanguageModel in float64: embedding, (communication, computation) layers,
// unembedding. What the last run computed is taken over wherever nothing that it depends on has changed.

import type { LayerRun, Run, WholeModel } from "../types";
import { numbersOf } from "./decode";
import { gelu } from "./erf";
import { addProducts, addScaled, dot, gathered, normRow, transposed } from "./linear";
import { type Channels, listen, type Listener, type Listening } from "./listen";

interface LayerWeights extends Listener {
  attentionNorm: Float64Array;
  W_Q: Float64Array; // [heads, width, dim]
  W_K: Float64Array;
  W_V: Float64Array;
  output: Float64Array; // [heads, dim, width]
  mlpNorm: Float64Array;
  into: Float64Array; // [width, inner]
  intoBias: Float64Array;
  from: Float64Array; // [inner, width]
  fromBias: Float64Array;
}

/** A run whose logits are computed when somebody asks for them, row by row. */
class ModelRun implements Run {
  milliseconds = 0;
  private readonly rows = new Map<number, Float64Array>();
  private all: Float64Array | null = null;

  constructor(
    private readonly model: Model,
    readonly tokenIds: number[],
    readonly layers: LayerRun[],
    readonly last: Float64Array, // [T, width] the states that are unembedded
  ) {}

  /** The logits of the token that follows this one. */
  row(token: number): Float64Array {
    let row = this.rows.get(token);
    if (!row) this.rows.set(token, (row = this.model.unembedded(this.last, token)));
    return row;
  }

  get logits(): Float64Array {
    if (!this.all) {
      this.all = new Float64Array(this.tokenIds.length * this.model.vocabularySize);
      this.tokenIds.forEach((_, token) => this.all!.set(this.row(token), token * this.model.vocabularySize));
    }
    return this.all;
  }
}
export type { ModelRun };

export class Model {
  readonly layers: LayerWeights[];
  readonly vocabularySize: number;
  readonly unembedding: Float64Array; // [vocabulary, width]
  private readonly embedding: Float64Array;
  private readonly norm: Float64Array;
  private last: ModelRun | null = null;

  constructor(readonly sizes: WholeModel) {
    this.embedding = this.tensor("embedding.weight");
    this.norm = this.tensor("norm.weight");
    this.unembedding = this.tensor("unembedding.weight");
    this.vocabularySize = this.unembedding.length / sizes.width;
    this.layers = Array.from({ length: sizes.layers }, (_, number) => this.layerWeights(number));
  }

  /** A run over the edges [heads, T, T] of each layer. */
  run(tokenIds: number[], edgesOf: (layer: number) => Uint8Array): ModelRun {
    const tokens = tokenIds.length;
    const old = this.last;
    let dirty: Uint8Array = Uint8Array.from(tokenIds, (id, token) => (old && id === old.tokenIds[token] ? 0 : 1));
    let states = this.embedded(tokenIds);
    const layers: LayerRun[] = [];
    this.layers.forEach((weights, number) => {
      const before = old && old.layers[number] ? ofSize(old.layers[number], tokens) : null;
      const done = this.layer(weights, tokens, states, edgesOf(number), before, dirty);
      layers.push(done.run);
      states = done.run.thought;
      dirty = done.dirty;
    });
    return (this.last = new ModelRun(this, tokenIds.slice(), layers, states));
  }

  /** The logits [vocabulary] of one row of last states. */
  unembedded(states: Float64Array, token: number): Float64Array {
    const { width, epsilon } = this.sizes;
    const normed = new Float64Array(width);
    normRow(states, token * width, this.norm, epsilon, normed, 0);
    return Float64Array.from({ length: this.vocabularySize }, (_, id) => dot(normed, 0, this.unembedding, id * width, width));
  }

  private embedded(tokenIds: number[]): Float64Array {
    const { width } = this.sizes;
    const states = new Float64Array(tokenIds.length * width);
    tokenIds.forEach((id, token) => {
      if (!Number.isInteger(id) || id < 0 || id >= this.vocabularySize) {
        throw new RangeError(`tokens must be in 0 .. ${this.vocabularySize - 1}, got ${id}`);
      }
      states.set(this.embedding.subarray(id * width, (id + 1) * width), token * width);
    });
    return states;
  }

  /** One layer of a run; `dirty` tokens come with another state than in `old`, and leave with one. */
  private layer(
    weights: LayerWeights,
    tokens: number,
    before: Float64Array,
    edges: Uint8Array,
    old: LayerRun | null,
    dirty: Uint8Array,
  ): { run: LayerRun; dirty: Uint8Array } {
    const { width, heads, dim, valueDim } = weights;
    const heard = this.heard(weights, tokens, before, old, dirty);
    const channels = project(weights, tokens, heard, old, dirty);
    const { listening, touched } = listen(weights, tokens, channels, edges, old, dirty);
    const changed = touched.map((isTouched, token) => isTouched | dirty[token]);
    const { after, thought } = this.think(weights, before, listening, old, changed);
    const run = { tokens, heads, width, dim, valueDim, before, heard, ...channels, ...listening, after, thought };
    return { run, dirty: changed };
  }

  /** The normed states; rows that are not dirty are taken over. */
  private heard(
    weights: LayerWeights,
    tokens: number,
    before: Float64Array,
    old: LayerRun | null,
    dirty: Uint8Array,
  ): Float64Array {
    if (old && !dirty.includes(1)) return old.heard;
    const { width } = weights;
    const heard = old ? old.heard.slice() : new Float64Array(tokens * width);
    for (let token = 0; token < tokens; token++) {
      if (dirty[token]) normRow(before, token * width, weights.attentionNorm, this.sizes.epsilon, heard, token * width);
    }
    return heard;
  }

  /** The states after both updates. */
  private think(
    weights: LayerWeights,
    before: Float64Array,
    { update }: Listening,
    old: LayerRun | null,
    changed: Uint8Array,
  ): { after: Float64Array; thought: Float64Array } {
    if (old && !changed.includes(1)) return { after: old.after, thought: old.thought };
    const { width, into, intoBias, from, fromBias, mlpNorm } = weights;
    const after = old ? old.after.slice() : new Float64Array(before.length);
    const thought = old ? old.thought.slice() : new Float64Array(before.length);
    const rows = marked(changed);
    for (const token of rows) {
      for (let i = token * width; i < (token + 1) * width; i++) after[i] = before[i] + update[i];
    }
    const normed = new Float64Array(rows.length * width);
    const inner = new Float64Array(rows.length * intoBias.length);
    const result = gathered(after, width, rows);
    rows.forEach((token, place) => {
      normRow(after, token * width, mlpNorm, this.sizes.epsilon, normed, place * width);
      inner.set(intoBias, place * intoBias.length);
      addScaled(1, fromBias, 0, width, result, place * width);
    });
    addProducts(normed, rows.length, width, into, 0, intoBias.length, inner);
    for (let i = 0; i < inner.length; i++) inner[i] = gelu(inner[i]);
    addProducts(inner, rows.length, intoBias.length, from, 0, width, result);
    rows.forEach((token, place) => thought.set(result.subarray(place * width, (place + 1) * width), token * width));
    return { after, thought };
  }

  private layerWeights(number: number): LayerWeights {
    const { width, heads, headDim: dim, reach } = this.sizes;
    const of = (name: string) => this.tensor(`blocks.${number}.${name}`);
    const table = of("attention.score_mod.table");
    const intoBias = of("mlp.0.bias");
    const inner = intoBias.length;
    return {
      ...{ heads, dim, valueDim: dim, width, scale: 1 / Math.sqrt(dim), messages: null, outputBias: null },
      bias: (head, dst, src) => table[head * (2 * reach + 1) + Math.max(-reach, Math.min(reach, dst - src)) + reach],
      sink: () => -Infinity,
      attentionNorm: of("attention_norm.weight"),
      W_Q: of("attention.heads.W_Q"),
      W_K: of("attention.heads.W_K"),
      W_V: of("attention.heads.W_V"),
      output: of("attention.heads.W_O"),
      mlpNorm: of("mlp_norm.weight"),
      into: transposed(of("mlp.0.weight"), inner, width),
      intoBias,
      from: transposed(of("mlp.2.weight"), width, inner),
      fromBias: of("mlp.2.bias"),
    };
  }

  private tensor(name: string): Float64Array {
    const stored = this.sizes.tensors[name];
    if (!stored) throw new RangeError(`the model has no tensor ${name}`);
    return numbersOf(stored);
  }
}

/** q, k, v of all heads [heads, T, dim] from the normed states; rows that are not dirty are taken over. */
function project(weights: LayerWeights, tokens: number, heard: Float64Array, old: Channels | null, dirty: Uint8Array): Channels {
  if (old && !dirty.includes(1)) return { q: old.q, k: old.k, v: old.v };
  const { heads, dim, width } = weights;
  const rows = marked(dirty);
  const read = gathered(heard, width, rows);
  const made = (matrix: Float64Array, before: Float64Array | undefined): Float64Array => {
    const out = before ? before.slice() : new Float64Array(heads * tokens * dim);
    for (let head = 0; head < heads; head++) {
      const written = new Float64Array(rows.length * dim);
      addProducts(read, rows.length, width, matrix, head * width * dim, dim, written);
      rows.forEach((token, place) => out.set(written.subarray(place * dim, (place + 1) * dim), (head * tokens + token) * dim));
    }
    return out;
  };
  return { q: made(weights.W_Q, old?.q), k: made(weights.W_K, old?.k), v: made(weights.W_V, old?.v) };
}

/** The numbers of the tokens that are marked. */
function marked(tokens: Uint8Array): number[] {
  return Array.from(tokens.keys()).filter((token) => tokens[token]);
}

/** An earlier result for another number of tokens: the rows and pairs that both have are kept, the others are 0. */
function ofSize(run: LayerRun, tokens: number): LayerRun {
  if (run.tokens === tokens) return run;
  const { heads, width, dim, valueDim } = run;
  const few = Math.min(tokens, run.tokens);
  const rows = (array: Float64Array, columns: number) =>
    regrouped(array, 1, run.tokens * columns, new Float64Array(tokens * columns));
  const byHead = (array: Float64Array, columns: number) =>
    regrouped(array, heads, run.tokens * columns, new Float64Array(heads * tokens * columns));
  const pairs = <A extends Float64Array | Uint8Array>(array: A, empty: A): A => {
    for (let row = 0; row < heads * few; row++) {
      const [head, dst] = [Math.floor(row / few), row % few];
      const from = (head * run.tokens + dst) * run.tokens;
      empty.set(array.subarray(from, from + few), (head * tokens + dst) * tokens);
      // A row that heard a token which is gone must not be taken over: 2 equals neither 0 nor 1.
      if (array === run.edges && array.subarray(from + few, from + run.tokens).includes(1)) {
        empty.fill(2, (head * tokens + dst) * tokens, (head * tokens + dst + 1) * tokens);
      }
    }
    return empty;
  };
  return {
    ...{ tokens, heads, width, dim, valueDim },
    ...{ before: rows(run.before, width), heard: rows(run.heard, width) },
    ...{ q: byHead(run.q, dim), k: byHead(run.k, dim), v: byHead(run.v, valueDim) },
    overlap: pairs(run.overlap, new Float64Array(heads * tokens * tokens)),
    edges: pairs(run.edges, new Uint8Array(heads * tokens * tokens)),
    weights: pairs(run.weights, new Float64Array(heads * tokens * tokens)),
    z: byHead(run.z, valueDim),
    ...{ update: rows(run.update, width), after: rows(run.after, width), thought: rows(run.thought, width) },
  };
}

/** Groups of `size` numbers each, cut or filled up with zeros to the size of the groups of `empty`. */
function regrouped(array: Float64Array, groups: number, size: number, empty: Float64Array): Float64Array {
  const wanted = empty.length / groups;
  for (let group = 0; group < groups; group++) {
    empty.set(array.subarray(group * size, group * size + Math.min(size, wanted)), group * wanted);
  }
  return empty;
}
