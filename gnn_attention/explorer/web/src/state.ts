// What is being looked at and what was changed: one plain object, and pure functions from one to the next.

import type { Edit } from "./types";

export type Mode = "listen" | "reach" | "write";
export type Form = "standard" | "factored" | "merged";
export type Scope = "head" | "layer" | "everywhere";
export const STEPS = 7;

/** What undo takes back: the graph, its edits, the tokens that were written. */
export interface Work {
  mask: number;
  edits: Edit[];
  written: number[];
}

export interface State {
  work: Work;
  past: Work[];
  future: Work[];
  mode: Mode;
  layer: number;
  head: number;
  allHeads: boolean;
  token: number; // the receiver
  sender: number | null; // null: the one to which it attends most
  step: number;
  view: string;
  form: Form;
  scope: Scope;
  reachToken: number;
  reachLayers: number;
  reachMask: number | null; // null: the chosen graph, or a window in the place of the causal one
}

/** The sizes that a state must stay within. */
export interface Limits {
  tokens: number; // given ones
  room: number;
  layers: number;
  heads: number;
  masks: number;
  start: number; // the mask to begin with
  vocabulary: number; // 0 where nothing can be written
  views: string[];
}

export type Action =
  | {
      type: "look";
      change: Partial<
        Pick<State, "mode" | "layer" | "head" | "allHeads" | "view" | "form" | "scope" | "reachToken" | "reachLayers" | "reachMask">
      >;
    }
  | { type: "receiver"; token: number }
  | { type: "sender"; token: number | null }
  | { type: "select"; src: number; dst: number; head: number }
  | { type: "step"; step: number }
  | { type: "mask"; mask: number }
  | { type: "edge"; src: number; dst: number; head: number; present: boolean; given: boolean }
  | { type: "show"; work: Work; change: Partial<State> }
  | { type: "drop"; index: number }
  | { type: "write"; token: number }
  | { type: "unwrite" }
  | { type: "reset" }
  | { type: "undo" }
  | { type: "redo" };

const REMEMBERED = 200;

/** Where everybody starts: the last token of the text, in the last layer. */
export function initial(limits: Limits): State {
  return {
    work: { mask: limits.start, edits: [], written: [] },
    past: [],
    future: [],
    mode: "listen",
    layer: Math.max(0, limits.layers - 1),
    head: 0,
    allHeads: true,
    token: Math.max(0, limits.tokens - 1),
    sender: null,
    step: 0,
    view: limits.views[0] ?? "",
    form: "standard",
    scope: "layer",
    reachToken: Math.max(0, limits.tokens - 1),
    reachLayers: 1,
    reachMask: null,
  };
}

/** The state after an action; the same object where nothing changes. */
export function reduce(state: State, action: Action, limits: Limits): State {
  switch (action.type) {
    case "look":
      return within({ ...state, ...action.change }, limits);
    case "receiver":
      return action.token === state.token ? state : within({ ...state, token: action.token, sender: null }, limits);
    case "sender":
      return within({ ...state, sender: action.token }, limits);
    case "select":
      return within({ ...state, token: action.dst, sender: action.src, head: action.head }, limits);
    case "step":
      return within({ ...state, step: action.step }, limits);
    case "undo":
      return moved(state, state.past, "past", limits);
    case "redo":
      return moved(state, state.future, "future", limits);
    default:
      return within(changed(state, worked(state, action)), limits);
  }
}

/** What an action does to the work. */
function worked(state: State, action: Action): Partial<State> & { work: Work } {
  const work = state.work;
  switch (action.type) {
    case "mask":
      return { work: { ...work, mask: action.mask }, reachMask: null };
    case "edge":
      return { work: { ...work, edits: edited(work.edits, action, scoped(state, action.head)) }, sender: action.src };
    case "show":
      return { ...action.change, work: action.work };
    case "drop":
      return { work: { ...work, edits: work.edits.filter((_, index) => index !== action.index) } };
    case "write":
      return { work: { ...work, written: [...work.written, action.token] }, token: Number.MAX_SAFE_INTEGER, sender: null };
    case "unwrite":
      return { work: { ...work, written: work.written.slice(0, -1) }, token: Number.MAX_SAFE_INTEGER, sender: null };
    case "reset":
      return { work: { mask: 0, edits: [], written: [] } };
    default:
      return { work };
  }
}

function scoped(state: State, head: number): Pick<Edit, "layer" | "head"> {
  if (state.scope === "everywhere") return { layer: "all", head: "all" };
  return { layer: state.layer, head: state.scope === "layer" ? "all" : head };
}

/** The list of edits with one more for a pair: what it covers is forgotten, and it too if nothing is left to override. */
function edited(
  edits: Edit[],
  action: { src: number; dst: number; present: boolean; given: boolean },
  scope: Pick<Edit, "layer" | "head">,
): Edit[] {
  const { src, dst, present } = action;
  const left = edits.filter((edit) => edit.src !== src || edit.dst !== dst || !covers(scope, edit));
  const others = left.some((edit) => edit.src === src && edit.dst === dst);
  return !others && present === action.given ? left : [...left, { ...scope, src, dst, present }];
}

function covers(scope: Pick<Edit, "layer" | "head">, edit: Edit): boolean {
  return (scope.layer === "all" || scope.layer === edit.layer) && (scope.head === "all" || scope.head === edit.head);
}

function changed(state: State, change: Partial<State> & { work: Work }): State {
  if (same(state.work, change.work)) return { ...state, ...change, work: state.work };
  return { ...state, ...change, past: [...state.past, state.work].slice(-REMEMBERED), future: [] };
}

function moved(state: State, from: Work[], side: "past" | "future", limits: Limits): State {
  const work = from[from.length - 1];
  if (!work) return state;
  const rest = from.slice(0, -1);
  const past = side === "past" ? rest : [...state.past, state.work];
  const future = side === "past" ? [...state.future, state.work] : rest;
  const token = work.written.length === state.work.written.length ? state.token : Number.MAX_SAFE_INTEGER;
  return within({ ...state, work, past, future, token }, limits);
}

function same(one: Work, other: Work): boolean {
  return JSON.stringify(one) === JSON.stringify(other);
}

/** Every number moved to the nearest that there is. */
function within(state: State, limits: Limits): State {
  const written = limits.vocabulary ? state.work.written.slice(0, limits.room) : [];
  const tokens = limits.tokens + written.length;
  const work = written.length === state.work.written.length ? state.work : { ...state.work, written };
  return {
    ...state,
    work,
    mode: limits.vocabulary || state.mode !== "write" ? state.mode : "listen",
    layer: clamped(state.layer, limits.layers),
    head: clamped(state.head, limits.heads),
    token: clamped(state.token, tokens),
    sender: state.sender === null ? null : clamped(state.sender, tokens),
    step: clamped(state.step, STEPS),
    reachToken: clamped(state.reachToken, limits.tokens + limits.room),
    reachLayers: Math.max(0, state.reachLayers),
    reachMask: state.reachMask === null ? null : clamped(state.reachMask, limits.masks),
  };
}

function clamped(value: number, count: number): number {
  return Math.max(0, Math.min(value, count - 1));
}

// -- in the address ----------------------------------------------------------------------------------------------------

const MODES: Mode[] = ["listen", "reach", "write"];
const FORMS: Form[] = ["standard", "factored", "merged"];
const SCOPES: Scope[] = ["head", "layer", "everywhere"];

/** The state as the part of an address after `#`. */
export function toHash(state: State): string {
  const { mask, edits, written } = state.work;
  const parts = new URLSearchParams({
    at: [state.mode, state.layer, state.allHeads ? "all" : state.head, state.token, state.sender ?? "", state.step].join("."),
    reach: [state.reachToken, state.reachLayers, state.reachMask ?? ""].join("."),
    as: [state.view.replaceAll(" ", "_"), state.form, state.scope].join("."),
  });
  parts.set("graph", String(mask));
  if (edits.length) parts.set("edits", edits.map((e) => [e.layer, e.head, e.src, e.dst, e.present ? 1 : 0].join(".")).join("_"));
  if (written.length) parts.set("written", written.join("."));
  return parts.toString();
}

/** The state that an address tells of; whatever in it is not understood is left as it is at the start. */
export function fromHash(hash: string, limits: Limits): State {
  const start = initial(limits);
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const [mode, layer, head, token, sender, step] = (parts.get("at") ?? "").split(".");
  const [reachToken, reachLayers, reachMask] = (parts.get("reach") ?? "").split(".");
  const [view, form, scope] = (parts.get("as") ?? "").split(".");
  const work: Work = {
    mask: clamped(count(parts.get("graph"), limits.start), limits.masks),
    edits: (parts.get("edits") ?? "").split("_").flatMap((text) => edit(text, limits)),
    written: (parts.get("written") ?? "")
      .split(".")
      .filter(Boolean)
      .map((text) => count(text, -1))
      .filter((id) => id >= 0 && id < limits.vocabulary),
  };
  const read: State = {
    ...start,
    work,
    mode: MODES.find((known) => known === mode) ?? start.mode,
    layer: count(layer, start.layer),
    head: count(head, start.head),
    allHeads: head === undefined || head === "" || head === "all",
    token: count(token, start.token),
    sender: sender ? count(sender, 0) : null,
    step: count(step, start.step),
    view: limits.views.find((known) => known.replaceAll(" ", "_") === view) ?? start.view,
    form: FORMS.find((known) => known === form) ?? start.form,
    scope: SCOPES.find((known) => known === scope) ?? start.scope,
    reachToken: count(reachToken, start.reachToken),
    reachLayers: count(reachLayers, start.reachLayers),
    reachMask: reachMask ? count(reachMask, 0) : null,
  };
  return within(read, limits);
}

function edit(text: string, limits: Limits): Edit[] {
  const match = /^(all|\d{1,4})\.(all|\d{1,4})\.(\d{1,5})\.(\d{1,5})\.([01])$/.exec(text);
  if (!match) return [];
  const [, layer, head, src, dst, present] = match;
  const size = limits.tokens + limits.room;
  const found: Edit = { layer: all(layer), head: all(head), src: Number(src), dst: Number(dst), present: present === "1" };
  const inside = (found.layer === "all" || found.layer < limits.layers) && (found.head === "all" || found.head < limits.heads);
  return inside && found.src < size && found.dst < size ? [found] : [];
}

function all(text: string): number | "all" {
  return text === "all" ? "all" : Number(text);
}

function count(text: string | null | undefined, otherwise: number): number {
  return text && /^\d{1,9}$/.test(text) ? Number(text) : otherwise;
}
