// What Python embeds in the page, and what the engine computes from it. The page draws; it computes nothing itself.

/** Bits of a [size, size] mask, row after row (dst, then src), most significant bit first, in base64. size = tokens + room. */
export interface Mask {
  name: string; // the expression, e.g. "window(9, 3) | sinks(9, 1)"
  meaning: string; // one sentence: which tokens attend to which
  bits: string;
  causal: boolean; // false: some token attends to a later one
  tokens: number; // as many as the graph tells of; with this mask no more can be written
}

/** A tensor in base64, little endian, row after row. */
export interface Stored {
  shape: number[];
  dtype: "float16" | "bfloat16" | "float32";
  data: string;
}

/** The whole model: the page computes every layer anew, and predicts and writes tokens (kind "model"). */
export interface WholeModel {
  kind: "model";
  name: string;
  trained: boolean; // it is the model that ships
  width: number;
  layers: number;
  heads: number;
  headDim: number;
  reach: number; // RelativeBias: the largest distance with a bias of its own
  epsilon: number; // of the norms
  tensors: Record<string, Stored>; // by their names in LanguageModel.state_dict()
  vocabulary: string[]; // the text of each token, any characters
  merges: number[]; // the two tokens that each token from 256 on joins, in the order of learning
}

/** One run of a model that is too large or too foreign to carry: q, k, v of each layer as they were (kind "record").
 *  Cutting an edge changes this layer's weights and update; later layers are as recorded, and the page says so. */
export interface Recorded {
  kind: "record";
  name: string;
  width: number;
  layers: RecordedLayer[];
}
export interface RecordedLayer {
  number: number; // of the layer in the model
  q: Stored; // [heads, T, dim]
  k: Stored; // [kvHeads, T, dim]
  v: Stored; // [kvHeads, T, valueDim]
  output: Stored | null; // W_O [heads, valueDim, width], or
  messages: Stored | null; // v W_O of every token [heads, T, width]: the smaller of the two
  outputBias: Stored | null; // b_O [width]
  bias: Stored | null; // what is added to the logit of any pair [heads, T, T]
  sinks: Stored | null; // [heads]: one more logit in every softmax, without a value
  scale: number;
  mask: string; // bits [T, T] of this layer's own mask, taken where masks[0] is asked for
}

export interface PageData {
  version: 1;
  title: string;
  tokens: { id: number; text: string }[]; // T of them; with a whole model `room` more may be written
  room: number; // masks are of size tokens.length + room
  masks: Mask[]; // the zoo; masks[0] is the model's own
  start: number; // the mask to show first
  model: WholeModel | Recorded;
  words: Term[]; // the glossary: one row for each part of attention
  views: string[]; // ["search", "routing", "transforms", "message exchange"]
  typed?: { size: number; start: number; masks: Mask[] }; // the graphs of texts that are typed on the page, of at most `size` tokens
}
export interface Term {
  name: string; // q, k, logits, weights, v, z, update
  words: Record<string, string | null>; // by view
}

/** Edges that differ from the mask: per layer and head ("all" where every head of every layer shares it). Later ones win. */
export interface Edit {
  layer: number | "all";
  head: number | "all";
  src: number;
  dst: number;
  present: boolean; // false: cut (the others share its weight); true: added
}

/** All numbers of one layer. Flat arrays, row after row; shared between runs where nothing changed, so never write into them. */
export interface LayerRun {
  tokens: number;
  heads: number;
  width: number;
  dim: number;
  valueDim: number;
  before: Float64Array; // [T, width] the state that comes in (empty for a record)
  heard: Float64Array; // [T, width] the normed state that the heads read (empty for a record)
  q: Float64Array; // [H, T, dim]
  k: Float64Array; // [H, T, dim] (kv heads repeated)
  v: Float64Array; // [H, T, valueDim]
  overlap: Float64Array; // [H, T(dst), T(src)] logits of all pairs, edges or not
  edges: Uint8Array; // [H, T, T] 1 = edge
  weights: Float64Array; // [H, T, T] 0 where there is no edge; a row without edges is all 0
  z: Float64Array; // [H, T, valueDim] mixture
  update: Float64Array; // [T, width]
  after: Float64Array; // [T, width] before + update (communication; empty for a record)
  thought: Float64Array; // [T, width] after the computation phase (empty for a record)
}
export interface Run {
  layers: LayerRun[];
  readonly logits: Float64Array | null; // [T, vocabulary] of a whole model, computed when first read
  milliseconds: number;
}

/** The three forms of one head's edge: the same logit and the same message, computed three ways. */
export interface Forms {
  standard: { q: Float64Array; k: Float64Array; v: Float64Array; logit: number; message: Float64Array };
  factored: { pattern: Float64Array; message: Float64Array; logit: number }; // pattern = (x_dst W_Q) W_K^T, never W_P
  merged: { pattern: Float64Array; message: Float64Array; logit: number }; // pattern = x_dst W_P, W_P = W_Q W_K^T formed
}

export interface Engine {
  readonly data: PageData;
  readonly whole: boolean; // every layer is computed anew
  readonly size: number; // of the masks: tokens and room
  /** Runs the given tokens (those of the page, unless it has written further) over mask number `mask` with these edits. */
  run(options: { mask: number; edits: Edit[]; tokenIds?: number[] }): Run;
  /** What the edge carries before the weight, in model space [width]: v W_O. */
  message(run: Run, layer: number, head: number, src: number): Float64Array;
  forms(run: Run, layer: number, head: number, src: number, dst: number): Forms | null; // null for a record without states
  /** Likeliest next tokens of a token, with probabilities. */
  next(run: Run, token: number, count: number): { id: number; text: string; chance: number }[];
  /** The next token: the likeliest at temperature 0, else drawn from softmax(logits / temperature) by a number in [0, 1). */
  pick(run: Run, token: number, temperature: number, random: number): number;
  /** The update along a token's unembedding: what this edge adds to that logit, before the last norm. Throws for a record. */
  contribution(run: Run, layer: number, head: number, src: number, dst: number, tokenId: number): number;
  /** reach[l][t]: 1 if token t of the start is within the reach of `token` after l + 1 layers of this mask and edits (any head). The
   *  token itself always is. Layers that the model does not have take the edits of layer "all". */
  reach(options: { mask: number; edits: Edit[]; token: number; layers: number; size: number }): Uint8Array[];
  /** Whether mask number `mask` has the edge, in that layer: the own masks of a record may vary by layer. */
  has(mask: number, src: number, dst: number, layer: number): boolean;
  /** Whether mask number `mask` varies by layer. */
  varies(mask: number): boolean;
  /** The text of a token of the vocabulary ("" for a record). */
  text(id: number): string;
  /** The tokens of a text, as Python's tokenizer cuts it. Throws for a lone surrogate, and for a record. */
  encode(text: string): number[];
  /** The text of tokens ("" for a record). */
  decode(tokens: number[]): string;
}
// engine.ts exports: function makeEngine(data: PageData): Engine
