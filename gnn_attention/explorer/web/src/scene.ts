// What a state means: the tokens that are there, the run over the graph as edited, and the run it is compared with.

import type { Edit, Engine, LayerRun, PageData, Run } from "./types";
import type { Limits, State, Work } from "./state";

export interface Scene {
  data: PageData;
  engine: Engine;
  limits: Limits;
  state: State;
  tokens: { id: number; text: string }[];
  run: Run; // over the chosen graph and its edits
  base: Run; // over the model's own graph, unedited
  edited: boolean;
  layer: LayerRun;
  was: LayerRun; // the same layer of `base`
  sender: number; // the sender under study
}

/** What gives a view the scene of the state as it is now. The scene that the view has drawn may be older. */
export interface SceneHost {
  scene(): Scene | null;
}

/** How much one receiver attends to each sender in one head: rows of the run, not copies. */
export interface Row {
  logits: Float64Array;
  weights: Float64Array;
  edges: Uint8Array;
}

/** Makes scenes, and remembers the last runs: looking elsewhere computes nothing again. */
export class Scenes {
  private runs = new Map<string, Run>();
  private tokens: { key: string; list: Scene["tokens"] } = { key: "", list: [] };

  constructor(
    readonly data: PageData,
    readonly engine: Engine,
    readonly limits: Limits,
  ) {}

  at(state: State): Scene {
    const { data, engine, limits } = this;
    const tokens = this.tokensOf(state.work.written);
    const own: Work = { mask: 0, edits: [], written: state.work.written };
    const run = this.run(state.work, tokens);
    const base = this.run(own, tokens);
    const layer = run.layers[state.layer];
    const edited = state.work.mask !== 0 || state.work.edits.length > 0;
    const scene = { data, engine, limits, state, tokens, run, base, edited, layer, was: base.layers[state.layer], sender: 0 };
    scene.sender = state.sender ?? strongest(scene);
    return scene;
  }

  /** The same list as long as nothing is written: whoever shows it need not show it again. */
  private tokensOf(written: number[]): Scene["tokens"] {
    const key = written.join();
    if (key !== this.tokens.key || !this.tokens.list.length) {
      this.tokens = { key, list: [...this.data.tokens, ...written.map((id) => ({ id, text: this.engine.text(id) }))] };
    }
    return this.tokens.list;
  }

  private run(work: Work, tokens: { id: number }[]): Run {
    const key = JSON.stringify(work);
    const known = this.runs.get(key);
    if (known) return known;
    const run = this.engine.run({ mask: work.mask, edits: work.edits, tokenIds: tokens.map((token) => token.id) });
    if (this.runs.size > 5) this.runs.delete(this.runs.keys().next().value as string);
    this.runs.set(key, run);
    return run;
  }
}

/** The row of a receiver in one head. */
export function rowOf(layer: LayerRun, head: number, dst: number): Row {
  const start = (head * layer.tokens + dst) * layer.tokens;
  const end = start + layer.tokens;
  return {
    logits: layer.overlap.subarray(start, end),
    weights: layer.weights.subarray(start, end),
    edges: layer.edges.subarray(start, end),
  };
}

/** One head's vector of one token, out of [H, T, size]. */
export function vectorOf(all: Float64Array, layer: LayerRun, head: number, token: number): Float64Array {
  const size = all.length / (layer.heads * layer.tokens);
  const start = (head * layer.tokens + token) * size;
  return all.subarray(start, start + size);
}

/** A token's state, out of [T, width]. */
export function stateOf(all: Float64Array, layer: LayerRun, token: number): Float64Array {
  return all.subarray(token * layer.width, (token + 1) * layer.width);
}

export function isEdge(layer: LayerRun, head: number, src: number, dst: number): boolean {
  return layer.edges[(head * layer.tokens + dst) * layer.tokens + src] === 1;
}

/** The heads that are drawn. */
export function headsShown(scene: Scene): number[] {
  return scene.state.allHeads ? Array.from({ length: scene.layer.heads }, (_, head) => head) : [scene.state.head];
}

/** The sender to which the receiver attends most in the head under study; itself if it has no edges. */
function strongest(scene: Scene): number {
  const { layer, state } = scene;
  if (!layer || layer.tokens === 0) return 0;
  const { weights, edges } = rowOf(layer, state.head, state.token);
  let best = -1;
  for (let src = 0; src < weights.length; src++) if (edges[src] && (best < 0 || weights[src] > weights[best])) best = src;
  return best < 0 ? state.token : best;
}

/** The senders of a receiver in one head, those of the largest weight first. */
export function attendedMost(layer: LayerRun, head: number, dst: number): number[] {
  const { weights, edges } = rowOf(layer, head, dst);
  const senders = Array.from(edges.keys()).filter((src) => edges[src] === 1);
  return senders.sort((one, other) => weights[other] - weights[one] || one - other);
}

/** The length of a vector. */
export function norm(vector: Float64Array): number {
  let sum = 0;
  for (const value of vector) sum += value * value;
  return Math.sqrt(sum);
}

export function dot(one: Float64Array, other: Float64Array): number {
  let sum = 0;
  for (let index = 0; index < one.length; index++) sum += one[index] * other[index];
  return sum;
}

const lengths = new WeakMap<Run, Map<string, number>>();

/** The length of a sender's message in one head, computed once for each run. */
export function messageLength(scene: Scene, run: Run, head: number, src: number): number {
  const known = lengths.get(run) ?? new Map<string, number>();
  lengths.set(run, known);
  const key = `${scene.state.layer}.${head}.${src}`;
  const length = known.get(key) ?? norm(scene.engine.message(run, scene.state.layer, head, src));
  known.set(key, length);
  return length;
}

/** The number of a layer in its model: a record may hold some of them only. */
export function layerNumber(data: PageData, layer: number): number {
  return data.model.kind === "record" ? data.model.layers[layer].number : layer;
}

/** Whether the mask without edits has an edge, in the layer that is shown. */
export function given(scene: Scene, src: number, dst: number): boolean {
  return scene.engine.has(scene.state.work.mask, src, dst, scene.state.layer);
}

/** `partial`: an edge in some of the heads that are drawn; `none`: the graph has no such edge. */
export type CellKind = "edge" | "cut" | "added" | "partial" | "none";

/** Whether a pair is an edge in the heads that are drawn, and the mean of its weights. */
export function cellOf(scene: Scene, heads: number[], src: number, dst: number): { kind: CellKind; weight: number } {
  let [present, weight] = [0, 0];
  for (const head of heads) {
    if (!isEdge(scene.layer, head, src, dst)) continue;
    present += 1;
    weight += rowOf(scene.layer, head, dst).weights[src] / heads.length;
  }
  const expected = given(scene, src, dst);
  if (present === 0) return { kind: expected ? "cut" : "none", weight: 0 };
  if (present < heads.length) return { kind: "partial", weight };
  return { kind: expected ? "edge" : "added", weight };
}

/** The edits of pairs that end at a receiver and touch a layer and head. */
export function editsAt(edits: Edit[], layer: number, head: number, dst: number): Edit[] {
  return edits.filter((e) => e.dst === dst && (e.layer === "all" || e.layer === layer) && (e.head === "all" || e.head === head));
}

/** True if some token attends to a later one: in the mask, over the tokens there are, or by an edge that was added. */
export function looksAhead(scene: Scene): boolean {
  const count = scene.tokens.length;
  if (scene.state.work.edits.some((edit) => edit.present && edit.src > edit.dst && edit.src < count)) return true;
  if (scene.data.masks[scene.state.work.mask].causal) return false;
  for (let dst = 0; dst < count; dst++) for (let src = dst + 1; src < count; src++) if (given(scene, src, dst)) return true;
  return false;
}

/** The last of a list that is as asked for: later edits win. */
export function lastOf<T>(list: T[], asked: (item: T) => boolean): T | undefined {
  for (let index = list.length - 1; index >= 0; index--) if (asked(list[index])) return list[index];
  return undefined;
}
