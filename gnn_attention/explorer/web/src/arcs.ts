// Edges as arcs from sender to receiver: their curves, which of them are drawn, and which one is under the pointer.

import { cellOf, editsAt, headsShown, isEdge, lastOf, rowOf, type Scene } from "./scene";
import { MOST_WORDS, type Layout } from "./layout";

export type ArcKind = "edge" | "cut" | "added" | "candidate";

export interface Arc {
  src: number;
  dst: number;
  head: number;
  weight: number;
  kind: ArcKind;
  width: number;
  curve: Curve;
}

/** A cubic Bezier curve that begins and ends on the line of the tokens. */
export interface Curve {
  x1: number;
  x2: number;
  c1: number; // x of the two control points
  c2: number;
  top: number; // their height above the line
}

const SVG_ROOM = 10;
const FAINT = 0.03; // of several heads that draw the same edge, those with a smaller weight than this leave it to the strongest
const UNSEEN = 0.002; // among many tokens, an edge of less weight leaves no trace on the canvas

/** The curve of an edge; `lane` spreads the arcs of several heads, from -1 to 1. */
export function curveOf(layout: Layout, src: number, dst: number, lane: number): Curve {
  const from = layout.x[src];
  const entry = Math.min(9, layout.slot / 4) * (src > dst ? 1 : -1);
  const to = layout.x[dst] + entry;
  if (src === dst) return ownLoop(layout, from, to, lane);
  const span = Math.max(1, layout.x[layout.x.length - 1] - layout.x[0]);
  const share = Math.pow(Math.abs(layout.x[dst] - from) / span, 0.6);
  const top = ((layout.height - SVG_ROOM) / 0.75) * share * (0.9 + 0.09 * lane);
  return { x1: from, x2: to, c1: from, c2: to, top };
}

function ownLoop(layout: Layout, from: number, to: number, lane: number): Curve {
  const reach = loopReach(layout) * (1 + 0.25 * lane);
  return { x1: from, x2: to, c1: from + reach, c2: to - reach, top: Math.min(layout.height * 0.4, 2.4 * reach + 8) };
}

function loopReach(layout: Layout): number {
  return Math.min(24, Math.max(5, layout.slot * 0.5));
}

/** From -1 to 1 by head; 0 if one head alone is drawn. */
export function laneOf(head: number, heads: number[]): number {
  return heads.length < 2 ? 0 : (2 * heads.indexOf(head)) / (heads.length - 1) - 1;
}

/** The stroke of a weight: a hair for none, the widest for 1. */
export function strokeOf(layout: Layout, weight: number): number {
  const widest = Math.max(3, Math.min(13, layout.slot * 0.6));
  return 0.8 + (widest - 0.8) * weight;
}

function widthOf(layout: Layout, src: number, dst: number, weight: number): number {
  const width = strokeOf(layout, weight);
  return src === dst ? Math.min(width, Math.max(1, loopReach(layout) * 0.3)) : width;
}

/** A place on a curve, `y` downwards with the line of the tokens at `base`. */
export function pointOf(curve: Curve, t: number, base: number): [number, number] {
  const s = 1 - t;
  const x = s * s * s * curve.x1 + 3 * s * s * t * curve.c1 + 3 * s * t * t * curve.c2 + t * t * t * curve.x2;
  return [x, base - 3 * s * t * curve.top];
}

export function pathOf(curve: Curve, base: number): string {
  const [x1, c1, c2, x2, top] = [curve.x1, curve.c1, curve.c2, curve.x2, base - curve.top].map((value) => value.toFixed(1));
  return `M${x1} ${base}C${c1} ${top} ${c2} ${top} ${x2} ${base}`;
}

/** The edges into the receiver, those cut from it, and the candidate that is looked at. */
export function arcsInto(scene: Scene, layout: Layout, looked: number | null): Arc[] {
  const dst = scene.state.token;
  const heads = headsShown(scene);
  const many = scene.tokens.length > MOST_WORDS;
  const arcs: Arc[] = [];
  const most = scene.tokens.map((_, src) => strongestHead(scene, heads, src, dst));
  for (const head of heads) {
    const row = rowOf(scene.layer, head, dst);
    const edits = editsAt(scene.state.work.edits, scene.state.layer, head, dst);
    const lane = laneOf(head, heads);
    row.edges.forEach((edge, src) => {
      const edit = lastOf(edits, (found) => found.src === src);
      if (!edge && !edit && src !== looked && src !== scene.sender) return;
      if (many && edge && !edit && src !== looked && src !== scene.sender && row.weights[src] < UNSEEN) return;
      const chosen = src === scene.sender && head === scene.state.head;
      if (edge && !edit && src !== looked && row.weights[src] < FAINT && head !== most[src] && !chosen) return;
      if (!edge && head !== scene.state.head && !isSingle(heads)) return;
      const kind: ArcKind = edge ? (edit?.present ? "added" : "edge") : edit ? "cut" : "candidate";
      const weight = row.weights[src];
      arcs.push({
        src,
        dst,
        head,
        weight,
        kind,
        width: edge ? widthOf(layout, src, dst, weight) : 1.5,
        curve: curveOf(layout, src, dst, lane),
      });
    });
  }
  return arcs.sort((one, other) => one.weight - other.weight);
}

/** The head in which an edge has its largest weight. */
function strongestHead(scene: Scene, heads: number[], src: number, dst: number): number {
  const weight = (head: number) => rowOf(scene.layer, head, dst).weights[src];
  return heads.reduce((best, head) => (weight(head) > weight(best) ? head : best), heads[0]);
}

/** The arc of any pair, of a receiver that is not the chosen one. */
export function arcOf(scene: Scene, layout: Layout, { src, dst }: { src: number; dst: number }): Arc {
  const { kind, weight } = cellOf(scene, headsShown(scene), src, dst);
  const arcKind: ArcKind = kind === "none" ? "candidate" : kind === "partial" ? "edge" : kind;
  const present = arcKind === "edge" || arcKind === "added";
  const width = present ? Math.max(2, widthOf(layout, src, dst, weight)) : 1.5;
  return { src, dst, head: scene.state.head, weight, kind: arcKind, width, curve: curveOf(layout, src, dst, 0) };
}

function isSingle(heads: number[]): boolean {
  return heads.length === 1;
}

/** The edges of everybody that carry at least `least`, one for each pair: its mean weight over the heads that are drawn. */
export function arcsBehind(scene: Scene, layout: Layout, least: number): Arc[] {
  const { layer, state } = scene;
  const heads = headsShown(scene);
  const arcs: Arc[] = [];
  for (let dst = 0; dst < layer.tokens; dst++) {
    const rows = heads.map((head) => rowOf(layer, head, dst));
    for (let src = 0; src < layer.tokens; src++) {
      if (!rows.some((row) => row.edges[src])) continue;
      const weight = rows.reduce((sum, row) => sum + row.weights[src], 0) / heads.length;
      if (weight < least) continue;
      const curve = curveOf(layout, src, dst, 0);
      arcs.push({ src, dst, head: state.head, weight, kind: "edge", width: widthOf(layout, src, dst, weight), curve });
    }
  }
  return arcs;
}

const SAMPLES = 24;
const NEAR = 9;

/** The arc nearest to a place, if any is near. */
export function arcAt(arcs: Arc[], x: number, y: number, base: number): Arc | null {
  let best: Arc | null = null;
  let least = NEAR;
  for (const arc of arcs) {
    const distance = distanceTo(arc.curve, x, y, base) - arc.width / 2;
    if (distance < least) [best, least] = [arc, distance];
  }
  return best;
}

function distanceTo(curve: Curve, x: number, y: number, base: number): number {
  let least = Infinity;
  let [fromX, fromY] = pointOf(curve, 0, base);
  for (let step = 1; step <= SAMPLES; step++) {
    const [toX, toY] = pointOf(curve, step / SAMPLES, base);
    least = Math.min(least, distanceToLine(x, y, fromX, fromY, toX, toY));
    [fromX, fromY] = [toX, toY];
  }
  return least;
}

function distanceToLine(x: number, y: number, x1: number, y1: number, x2: number, y2: number): number {
  const [dx, dy] = [x2 - x1, y2 - y1];
  const along = Math.max(0, Math.min(1, ((x - x1) * dx + (y - y1) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(x - x1 - along * dx, y - y1 - along * dy);
}

/** How much a receiver attends to each sender, over the heads that are drawn: the mean weight, and whether there is an edge. */
export function portsOf(scene: Scene): { weight: number; edge: boolean }[] {
  const heads = headsShown(scene);
  const dst = scene.state.token;
  return scene.tokens.map((_, src) => {
    const weight = heads.reduce((sum, head) => sum + rowOf(scene.layer, head, dst).weights[src], 0) / heads.length;
    return { weight, edge: heads.some((head) => isEdge(scene.layer, head, src, dst)) };
  });
}
