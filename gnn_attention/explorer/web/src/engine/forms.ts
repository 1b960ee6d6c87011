// One edge of one head in the three forms of its weights: standard, factored and merged give the same logit and message.

import type { Forms, LayerRun } from "../types";
import { addProduct, dot, product, transposed } from "./linear";
import type { Model } from "./model";

/** The product matrices of each head, formed when they are first asked for. */
export class FormsOf {
  private readonly formed = new Map<string, { W_P: Float64Array; W_M: Float64Array }>();

  constructor(private readonly model: Model) {}

  edge(run: LayerRun, layer: number, head: number, src: number, dst: number): Forms {
    const weights = this.model.layers[layer];
    const { width, dim, valueDim, scale } = weights;
    const bias = weights.bias(head, dst, src);
    const receiver = run.heard.slice(dst * width, (dst + 1) * width);
    const sender = run.heard.slice(src * width, (src + 1) * width);
    const logitOf = (pattern: Float64Array) => scale * dot(pattern, 0, sender, 0, width) + bias;

    const q = times(receiver, weights.W_Q, head, dim);
    const k = times(sender, weights.W_K, head, dim);
    const v = times(sender, weights.W_V, head, valueDim);
    const message = times(v, weights.output, head, width);
    const turned = transposed(weights.W_K.slice(head * width * dim, (head + 1) * width * dim), width, dim);
    const pattern = times(q, turned, 0, width);
    const { W_P, W_M } = this.matrices(layer, head);
    const merged = times(receiver, W_P, 0, width);
    return {
      standard: { q, k, v, logit: scale * dot(q, 0, k, 0, dim) + bias, message },
      factored: { pattern, message: times(v, weights.output, head, width), logit: logitOf(pattern) },
      merged: { pattern: merged, message: times(sender, W_M, 0, width), logit: logitOf(merged) },
    };
  }

  /** W_P = W_Q W_K^T and W_M = W_V W_O of a head, [width, width]. */
  private matrices(layer: number, head: number): { W_P: Float64Array; W_M: Float64Array } {
    const key = `${layer} ${head}`;
    let found = this.formed.get(key);
    if (!found) {
      const { W_Q, W_K, W_V, output, width, dim, valueDim } = this.model.layers[layer];
      const turned = transposed(W_K.slice(head * width * dim, (head + 1) * width * dim), width, dim);
      found = {
        W_P: product(W_Q, head * width * dim, width, dim, turned, 0, width),
        W_M: product(W_V, head * width * valueDim, width, valueDim, output, head * valueDim * width, width),
      };
      this.formed.set(key, found);
    }
    return found;
  }
}

/** A row times the matrix number `head` of a stack, with so many columns. */
function times(row: Float64Array, stack: Float64Array, head: number, columns: number): Float64Array {
  const result = new Float64Array(columns);
  addProduct(row, 0, row.length, stack, head * row.length * columns, columns, result, 0);
  return result;
}
