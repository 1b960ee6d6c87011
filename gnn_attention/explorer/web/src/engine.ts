// The engine: everything that the page shows, computed from what Python embedded in it. It touches no page and no network.

import { corner, edgesOfLayer, Masks, spread } from "./engine/edges";
import { FormsOf } from "./engine/forms";
import { addProduct, dot, softmax } from "./engine/linear";
import type { Listener } from "./engine/listen";
import { Model, type ModelRun } from "./engine/model";
import { Recording } from "./engine/record";
import { Tokenizer } from "./engine/tokenizer";
import type { Edit, Engine, Forms, PageData, Run } from "./types";

/** The engine of a page; `like` is one of the same model, whose weights are taken over. */
export function makeEngine(data: PageData, like?: Engine): Engine {
  if (like instanceof WholeEngine) return new WholeEngine(data, like.model, like.tokenizer);
  if (data.model.kind === "record") return new RecordEngine(data);
  return new WholeEngine(data, new Model(data.model), new Tokenizer(data.model.merges));
}

type EdgesOf = (layer: number) => Uint8Array;

abstract class AnyEngine implements Engine {
  abstract readonly whole: boolean;
  readonly masks: Masks;

  constructor(readonly data: PageData) {
    this.masks = new Masks(data);
  }

  get size(): number {
    return this.masks.size;
  }

  protected abstract listener(layer: number): Listener;
  protected abstract readonly depth: number; // layers
  protected abstract compute(tokenIds: number[], edgesOf: EdgesOf): Run;
  abstract forms(run: Run, layer: number, head: number, src: number, dst: number): Forms | null;
  abstract next(run: Run, token: number, count: number): { id: number; text: string; chance: number }[];
  abstract pick(run: Run, token: number, temperature: number, random: number): number;
  abstract contribution(run: Run, layer: number, head: number, src: number, dst: number, tokenId: number): number;
  abstract text(id: number): string;
  abstract encode(text: string): number[];
  abstract decode(tokens: number[]): string;

  run({ mask, edits, tokenIds }: { mask: number; edits: Edit[]; tokenIds?: number[] }): Run {
    const start = performance.now();
    const ids = tokenIds ?? this.data.tokens.map((token) => token.id);
    if (ids.length > this.size) throw new RangeError(`at most ${this.size} tokens, got ${ids.length}`);
    const edgesOf = this.edgesOf(mask, edits, ids.length, (layer) => this.listener(layer).heads);
    const run = this.compute(ids, edgesOf);
    run.milliseconds = performance.now() - start;
    return run;
  }

  message(run: Run, layer: number, head: number, src: number): Float64Array {
    const { output, messages, width, valueDim } = this.listener(layer);
    const { tokens, v } = run.layers[layer];
    const at = head * tokens + src;
    if (messages) return messages.slice(at * width, (at + 1) * width);
    const message = new Float64Array(width);
    if (output) addProduct(v, at * valueDim, valueDim, output, head * valueDim * width, width, message, 0);
    return message;
  }

  reach(options: { mask: number; edits: Edit[]; token: number; layers: number; size: number }): Uint8Array[] {
    const { mask, edits, token, layers, size } = options;
    const heads = this.depth ? this.listener(0).heads : 1;
    return spread(this.edgesOf(mask, edits, size, () => heads), heads, size, token, layers);
  }

  has(mask: number, src: number, dst: number, layer: number): boolean {
    const inside = src >= 0 && dst >= 0 && src < this.size && dst < this.size;
    return inside && this.edge(mask, src, dst, layer);
  }

  varies(_mask: number): boolean {
    return false;
  }

  protected edge(mask: number, src: number, dst: number, _layer: number): boolean {
    return this.masks.bits(mask)[dst * this.size + src] === 1;
  }

  /** The mask of one layer, [tokens, tokens]. */
  protected base(mask: number, tokens: number, _layer: number): Uint8Array {
    return corner(this.masks.bits(mask), this.size, tokens);
  }

  /** The edges of each layer; those without edits of their own share one array. */
  private edgesOf(mask: number, edits: Edit[], tokens: number, headsOf: (layer: number) => number): EdgesOf {
    const common = new Map<string, Uint8Array>();
    return (layer) => {
      const own = edits.some((edit) => edit.layer === layer) || (mask === 0 && !this.whole);
      const heads = headsOf(layer);
      const key = own ? `layer ${layer}` : `heads ${heads}`;
      let edges = common.get(key);
      if (!edges) common.set(key, (edges = edgesOfLayer(this.base(mask, tokens, layer), tokens, heads, layer, edits)));
      return edges;
    };
  }
}

class WholeEngine extends AnyEngine {
  readonly whole = true;
  private readonly formsOf: FormsOf;

  constructor(
    data: PageData,
    readonly model: Model,
    readonly tokenizer: Tokenizer,
  ) {
    super(data);
    this.formsOf = new FormsOf(model);
  }

  protected get depth(): number {
    return this.model.layers.length;
  }

  protected listener(layer: number): Listener {
    return this.model.layers[layer];
  }

  protected compute(tokenIds: number[], edgesOf: EdgesOf): Run {
    return this.model.run(tokenIds, edgesOf);
  }

  forms(run: Run, layer: number, head: number, src: number, dst: number): Forms {
    return this.formsOf.edge(run.layers[layer], layer, head, src, dst);
  }

  next(run: Run, token: number, count: number): { id: number; text: string; chance: number }[] {
    const chances = softmax((run as ModelRun).row(token));
    const ids = Array.from(chances.keys()).sort((a, b) => chances[b] - chances[a] || a - b);
    return ids.slice(0, count).map((id) => ({ id, text: this.text(id), chance: chances[id] }));
  }

  pick(run: Run, token: number, temperature: number, random: number): number {
    const logits = (run as ModelRun).row(token);
    if (!(temperature > 0)) return logits.reduce((best, logit, id) => (logit > logits[best] ? id : best), 0);
    const chances = softmax(logits, temperature);
    let sum = 0;
    const id = chances.findIndex((chance) => (sum += chance) > random);
    return id < 0 ? chances.length - 1 : id;
  }

  contribution(run: Run, layer: number, head: number, src: number, dst: number, tokenId: number): number {
    const { tokens, weights, width } = run.layers[layer];
    const weight = weights[(head * tokens + dst) * tokens + src];
    return weight * dot(this.message(run, layer, head, src), 0, this.model.unembedding, tokenId * width, width);
  }

  text(id: number): string {
    return this.model.sizes.vocabulary[id] ?? "";
  }

  encode(text: string): number[] {
    return this.tokenizer.encode(text);
  }

  decode(tokens: number[]): string {
    return this.tokenizer.decode(tokens);
  }
}

class RecordEngine extends AnyEngine {
  readonly whole = false;
  private readonly record: Recording;

  constructor(data: PageData) {
    super(data);
    if (data.model.kind !== "record") throw new TypeError("data hold no record");
    this.record = new Recording(data.model, data.tokens.length);
  }

  protected get depth(): number {
    return this.record.layers.length;
  }

  protected listener(layer: number): Listener {
    // The last layer stands for those that the model does not have.
    return this.record.layers[Math.min(layer, this.depth - 1)].listener;
  }

  protected compute(tokenIds: number[], edgesOf: EdgesOf): Run {
    if (tokenIds.length !== this.data.tokens.length) throw new RangeError("a record has the tokens that it was made of");
    return this.record.run(edgesOf);
  }

  override varies(mask: number): boolean {
    const [first, ...others] = this.record.layers;
    return mask === 0 && others.some((other) => other.mask.some((bit, at) => bit !== first.mask[at]));
  }

  protected override edge(mask: number, src: number, dst: number, layer: number): boolean {
    const tokens = this.data.tokens.length;
    if (mask !== 0 || src >= tokens || dst >= tokens) return super.edge(mask, src, dst, layer);
    return this.own(layer)[dst * tokens + src] === 1;
  }

  protected override base(mask: number, tokens: number, layer: number): Uint8Array {
    return mask === 0 && tokens === this.data.tokens.length ? this.own(layer) : super.base(mask, tokens, layer);
  }

  /** The mask of one layer, as it was recorded. */
  private own(layer: number): Uint8Array {
    return this.record.layers[Math.min(layer, this.depth - 1)].mask;
  }

  forms(): null {
    return null;
  }

  next(): [] {
    return [];
  }

  pick(): never {
    throw new TypeError("a record does not predict");
  }

  contribution(): never {
    throw new TypeError("a record has no unembedding");
  }

  text(): string {
    return "";
  }

  encode(): never {
    throw new TypeError("a record has no tokenizer");
  }

  decode(): string {
    return "";
  }
}

export { half } from "./engine/decode";
export { erf } from "./engine/erf";
export { characterClasses } from "./engine/tokenizer";
