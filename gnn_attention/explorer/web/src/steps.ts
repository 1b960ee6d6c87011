// The seven steps of attention for one receiver, each with the numbers of the edge under study filled into its formula.

import { largest, shares, vector, type Share } from "./bars";
import { bdi, h, number } from "./dom";
import { headColour } from "./paint";
import { aside, formula, heading, strong, sub, sup, text, type Parts } from "./prose";
import { dot, attendedMost, messageLength, norm, rowOf, stateOf, vectorOf, type Row, type Scene } from "./scene";
import type { Forms } from "./types";
import { clipped, percent, rounded, signed, term, visible } from "./words";

/** One edge (or missing edge) in one head, and all that the steps tell of it. */
export interface Pair {
  scene: Scene;
  src: number;
  dst: number;
  head: number;
  row: Row;
  was: Row;
  edge: boolean;
  forms: Forms | null;
  study: (src: number) => void;
}

const MOST_LINES = 12;
const X = "x̂"; // the normed state

export function pairOf(scene: Scene, study: (src: number) => void): Pair {
  const { layer, head, token } = scene.state;
  const row = rowOf(scene.layer, head, token);
  const forms = scene.engine.forms(scene.run, layer, head, scene.sender, token);
  return {
    scene,
    src: scene.sender,
    dst: token,
    head,
    row,
    was: rowOf(scene.was, head, token),
    edge: row.edges[scene.sender] === 1,
    forms,
    study,
  };
}

/** The words of the steps in the chosen reading. */
export function stepNames(scene: Scene): string[] {
  return ["q", "k", "overlaps", "weights", "v", "z", "update"].map((name) => word(scene, name));
}

export function stepParts(pair: Pair): Parts {
  return [pattern, key, logit, softmax, message, sum, update][pair.scene.state.step](pair);
}

// -- the steps ---------------------------------------------------------------------------------------------------------

function pattern(pair: Pair): Parts {
  const { scene, head, dst } = pair;
  const q = vectorOf(scene.layer.q, scene.layer, head, dst);
  const name = formOf(pair) === "standard" ? word(scene, "q") : "pattern";
  const told = text("From its state, ", token(pair, dst), ` computes its ${name}, which says what it looks for.`);
  const x = normed(pair, dst);
  if (formOf(pair) === "standard") return [told, ...x.told, formula(`q = ${X} W`, sub("Q")), ...x.picture, vector("q", q)];
  const { pattern: p } = formed(pair);
  const merged = formOf(pair) === "merged";
  const how = merged
    ? formula(`p = ${X} W`, sub("P"), ",  W", sub("P"), " = W", sub("Q"), " W", sub("K"), sup("⊤"), " computed once")
    : formula(`p = (${X} W`, sub("Q"), ") W", sub("K"), sup("⊤"));
  const why = merged
    ? "One matrix for each head gives the same pattern, at the cost of more numbers to store and multiply."
    : "The receiver’s query is mapped to the space of the states; the product of the two matrices is never computed.";
  return [told, ...x.told, how, ...x.picture, vector("p", p), aside(why)];
}

function key(pair: Pair): Parts {
  const { scene, head, src } = pair;
  const x = normed(pair, src);
  if (formOf(pair) !== "standard") {
    const how = aside("In this form the sender uses its state unchanged: W", sub("K"), " is part of the receiver’s pattern.");
    return [text(token(pair, src), " can be found by its own state."), ...x.told, ...x.picture, how];
  }
  const told = text("From its state, ", token(pair, src), ` computes its ${word(scene, "k")}, by which every receiver can find it.`);
  return [told, ...x.told, formula(`k = ${X} W`, sub("K")), ...x.picture, vector("k", vectorOf(scene.layer.k, scene.layer, head, src))];
}

/** What the heads read is not the state x itself but x̂, its norm: both are told with their lengths. */
function normed({ scene }: Pair, who: number): { told: Parts; picture: Parts } {
  const { heard, before } = scene.layer;
  if (!heard.length) return { told: [], picture: [] };
  const [x, read] = [stateOf(before, scene.layer, who), stateOf(heard, scene.layer, who)];
  const lengths = [number(norm(x), "state", rounded(norm(x))), ", |x̂| ", number(norm(read), "normed", rounded(norm(read)))];
  const told = aside("Heads read x̂, the state x after normalisation. Lengths: |x| ", ...lengths, ".");
  return { told: [told], picture: [vector(X, read)] };
}

function logit(pair: Pair): Parts {
  const { scene, head, src, dst, row } = pair;
  const [q, k] = [vectorOf(scene.layer.q, scene.layer, head, dst), vectorOf(scene.layer.k, scene.layer, head, src)];
  const scale = scaleOf(scene);
  const told = text(`The ${word(scene, "overlaps")} says how well `, token(pair, src), " fits what ", token(pair, dst), " looks for. Scaled, and with any bias added, it is the logit, the score before the softmax.");
  const pictures =
    formOf(pair) === "standard"
      ? [
          vector("q", q),
          vector("k", k),
          vector(
            "q × k",
            q.map((value, index) => value * k[index]),
          ),
        ]
      : inStates(pair);
  const left = formOf(pair) === "standard" ? "q · k" : `p · ${X}`;
  const product =
    formOf(pair) === "standard" || !scene.layer.heard.length
      ? dot(q, k)
      : dot(formed(pair).pattern, stateOf(scene.layer.heard, scene.layer, src));
  const rest = row.logits[src] - product * scale;
  const bias =
    Math.abs(rest) < 1e-9
      ? []
      : [rest < 0 ? " − " : " + ", number(Math.abs(rest), "bias", rounded(Math.abs(rest))), ` (${biasName(pair)})`];
  const filled = formula(
    `${left} × scale = `,
    number(product, "product", rounded(product)),
    " × ",
    number(scale, "scale", rounded(scale)),
    ...bias,
    " = ",
    strong(number(row.logits[src], "logit", rounded(row.logits[src]))),
  );
  const mostly = Math.abs(rest) > Math.abs(product * scale) && scene.engine.whole;
  const why = mostly ? [aside("Most of this is the bias of their distance, which does not depend on the two tokens.")] : [];
  const missing = pair.edge ? [] : [aside("There is no edge between them: their score is as high as this, but no message is carried.")];
  return [told, filled, ...why, ...missing, ...pictures, heading("Logits of all possible senders"), logitLines(pair)];
}

function softmax(pair: Pair): Parts {
  const { scene, row, src } = pair;
  const senders = attendedMost(scene.layer, pair.head, pair.dst);
  const told = text(
    "The softmax turns the logits of the edges that end at ",
    token(pair, pair.dst),
    ` into shares that add up to 1: the ${word(scene, "weights")}.`,
  );
  if (!senders.length) return [told, nobody(pair), totalOf([], row)];
  const most = Math.max(...senders.map((sender) => row.logits[sender]));
  const heard = senders.reduce((total, sender) => total + row.weights[sender], 0);
  const all = senders.reduce((total, sender) => total + Math.exp(row.logits[sender] - most), 0) / (heard || 1); // with a sink, if there is one
  const mine = Math.exp(row.logits[src] - most);
  const filled = pair.edge
    ? formula(
        "e",
        sup("logit − largest"),
        " ÷ sum = ",
        number(mine, "exponential", rounded(mine)),
        " ÷ ",
        number(all, "denominator", rounded(all)),
        " = ",
        strong(number(row.weights[src], "weight", rounded(row.weights[src]))),
      )
    : formula("no edge: weight ", strong(number(row.weights[src], "weight", "0")));
  return [told, filled, weightLines(pair, senders), totalOf(senders, row)];
}

function message(pair: Pair): Parts {
  const { scene, src, head, row } = pair;
  const v = vectorOf(scene.layer.v, scene.layer, head, src);
  const m = formOf(pair) === "standard" ? scene.engine.message(scene.run, scene.state.layer, head, src) : formed(pair).message;
  const told = text("What ", token(pair, src), ` sends to every receiver in this head is its ${formOf(pair) === "standard" ? word(scene, "v") : "message"}.`);
  const how = {
    standard: formula(`v = ${X} W`, sub("V"), ",  m = v W", sub("O")),
    factored: formula(`m = (${X} W`, sub("V"), ") W", sub("O")),
    merged: formula(`m = ${X} W`, sub("M"), ",  W", sub("M"), " = W", sub("V"), " W", sub("O"), " computed once"),
  }[formOf(pair)];
  const length = norm(m);
  const carried = row.weights[src] * length;
  const filled = formula(
    "weight × |m| = ",
    number(row.weights[src], "weight", rounded(row.weights[src])),
    " × ",
    number(length, "message", rounded(length)),
    " = ",
    strong(number(carried, "carried", rounded(carried))),
  );
  return [
    told,
    how,
    ...(formOf(pair) === "standard" ? [vector("v", v)] : []),
    vector("m", m),
    heading("What this edge carries"),
    filled,
    ...effect(pair),
  ];
}

function sum(pair: Pair): Parts {
  const { scene, head, dst } = pair;
  const z = vectorOf(scene.layer.z, scene.layer, head, dst);
  const senders = attendedMost(scene.layer, head, dst);
  const told = text("Everything that arrives is added up, weighted by sender: this is the ", `${word(scene, "z")}.`);
  const lengths = senders.slice(0, MOST_LINES).map((src) => pair.row.weights[src] * messageLength(scene, scene.run, head, src));
  const longest = Math.max(...lengths, 1e-300);
  const lines = senders
    .slice(0, MOST_LINES)
    .map((src, index) => line(pair, src, lengths[index], lengths[index] / longest, "carried", null));
  const parts = senders.length
    ? [heading("Length of what each edge carries"), shares("carried", lines), more(senders.length)]
    : [nobody(pair)];
  return [told, formula("z = Σ weight × v"), vector("z", z), ...parts, ...headLines(pair)];
}

function update(pair: Pair): Parts {
  const { scene, dst } = pair;
  const u = stateOf(scene.layer.update, scene.layer, dst);
  const before = stateOf(scene.was.update, scene.was, dst);
  const change = norm(u.map((value, index) => value - before[index]));
  const told = text(
    "The sums of all heads add up to the ",
    `${word(scene, "update")}, which is added to the state of `,
    token(pair, dst),
    ".",
  );
  const compared = scene.edited
    ? [formula("difference from the update along the model’s own graph: length ", number(change, "moved", rounded(change)))]
    : [];
  if (!scene.layer.before.length) return [told, vector("update", u), ...compared];
  const [x, y] = [stateOf(scene.layer.before, scene.layer, dst), stateOf(scene.layer.after, scene.layer, dst)];
  const most = largest(x, u, y);
  const filled = formula(
    "|x| ",
    number(norm(x), "before", rounded(norm(x))),
    ",  |update| ",
    number(norm(u), "update", rounded(norm(u))),
    ",  |x + update| ",
    strong(number(norm(y), "after", rounded(norm(y)))),
  );
  return [
    told,
    filled,
    vector("x", x, most),
    vector("update", u, most),
    vector("x + update", y, most),
    ...compared,
    ...thinking(pair, y),
  ];
}

// -- parts of steps ----------------------------------------------------------------------------------------------------

function thinking(pair: Pair, heard: Float64Array): Parts {
  const { thought } = pair.scene.layer;
  if (!thought.length) return [];
  const change = norm(stateOf(thought, pair.scene.layer, pair.dst).map((value, index) => value - heard[index]));
  return [
    aside(
      "This was the communication phase. In the computation phase each token is processed alone, by an MLP, which adds an update of length ",
      number(change, "thought", rounded(change)),
      ".",
    ),
  ];
}

function inStates(pair: Pair): Node[] {
  const { layer } = pair.scene;
  const p = vector("p", formed(pair).pattern);
  return layer.heard.length ? [p, vector(`${X} of the sender`, stateOf(layer.heard, layer, pair.src))] : [p];
}

function effect(pair: Pair): Parts {
  const { scene, src, dst, head } = pair;
  if (!scene.engine.whole || !pair.edge) return [];
  const [likeliest] = scene.engine.next(scene.run, dst, 1);
  const change = scene.engine.contribution(scene.run, scene.state.layer, head, src, dst, likeliest.id);
  return [
    aside(
      "In the direction of the likeliest next token ",
      bdi(`‘${visible(likeliest.text)}’`),
      " this edge adds ",
      number(change, "contribution", signed(change)),
      " (before the last normalisation).",
    ),
  ];
}

function headLines(pair: Pair): Parts {
  const { scene, dst } = pair;
  const { layer } = scene;
  if (layer.tokens * layer.heads > 1024) return [];
  const sums = Array.from({ length: layer.heads }, (_, head) => norm(resultOf(scene, head, dst)));
  const most = Math.max(...sums, 1e-300);
  const lines = sums.map((value, head): Share => ({
    index: null,
    text: `head ${head}`,
    value,
    shown: rounded(value),
    part: value / most,
    before: null,
    name: "head-result",
    colour: headColour(head),
    chosen: head === pair.head,
  }));
  return [heading("Each head’s sum, in the space of the states"), shares("heads", lines)];
}

/** What one head adds to a receiver: the sum of weight times message. */
function resultOf(scene: Scene, head: number, dst: number): Float64Array {
  const total = new Float64Array(scene.layer.width);
  const { weights, edges } = rowOf(scene.layer, head, dst);
  weights.forEach((weight, src) => {
    if (!edges[src] || weight === 0) return;
    const m = scene.engine.message(scene.run, scene.state.layer, head, src);
    for (let index = 0; index < total.length; index++) total[index] += weight * m[index];
  });
  return total;
}

function logitLines(pair: Pair): HTMLElement {
  const { row } = pair;
  const every = Array.from(row.logits.keys());
  const chosen =
    every.length <= MOST_LINES
      ? every
      : [...new Set([pair.src, ...attendedMost(pair.scene.layer, pair.head, pair.dst)])].slice(0, MOST_LINES);
  const low = Math.min(...chosen.map((src) => row.logits[src]));
  const high = Math.max(...chosen.map((src) => row.logits[src]));
  const part = (src: number) => 0.04 + (0.96 * (row.logits[src] - low)) / (high - low || 1);
  const lines = chosen
    .sort((one, other) => one - other)
    .map((src) => ({ ...line(pair, src, row.logits[src], part(src), "logit", null), aside: row.edges[src] ? "" : "no edge" }));
  return h("div", {}, shares("logits", lines), more(every.length));
}

function weightLines(pair: Pair, senders: number[]): HTMLElement {
  const { scene, row, was } = pair;
  const shown = [...new Set([pair.src, ...senders])].slice(0, MOST_LINES);
  if (scene.layer.tokens <= MOST_LINES) scene.tokens.forEach((_, src) => shown.includes(src) || shown.push(src));
  const before = (src: number) => (scene.edited ? was.weights[src] : null);
  const lines = shown
    .sort((one, other) => one - other)
    .map((src) => ({
      ...line(pair, src, row.weights[src], row.weights[src], "weight", before(src)),
      aside: row.edges[src] ? "" : "no edge",
    }));
  return h("div", {}, shares("weights", lines), more(senders.length));
}

function totalOf(senders: number[], row: Row): HTMLElement {
  const total = senders.reduce((all, src) => all + row.weights[src], 0);
  return formula(
    "sum of the weights = ",
    strong(number(total, "total", rounded(total))),
    senders.length && total < 1 - 1e-6 ? ` (a sink takes the other ${percent(1 - total)})` : "",
  );
}

function line(pair: Pair, src: number, value: number, part: number, name: string, before: number | null): Share {
  const open = !pair.row.edges[src];
  const press = () => pair.study(src);
  return {
    index: src,
    text: pair.scene.tokens[src].text,
    value,
    shown: rounded(value),
    part,
    before,
    name,
    open,
    chosen: src === pair.src,
    colour: headColour(pair.head),
    press,
  };
}

function more(count: number): HTMLElement | string {
  return count > MOST_LINES ? aside(`The ${MOST_LINES} with the largest weights of ${count}; the table below lists all.`) : "";
}

function nobody(pair: Pair): HTMLElement {
  return text(token(pair, pair.dst), " attends to no token in this head: its sum is exactly 0.");
}

function formOf(pair: Pair): "standard" | "factored" | "merged" {
  return pair.forms ? pair.scene.state.form : "standard";
}

function formed(pair: Pair): { pattern: Float64Array; message: Float64Array } {
  const forms = pair.forms as Forms;
  return formOf(pair) === "merged" ? forms.merged : forms.factored;
}

function scaleOf(scene: Scene): number {
  const { model } = scene.data;
  return model.kind === "record" ? model.layers[scene.state.layer].scale : 1 / Math.sqrt(model.headDim);
}

function biasName(pair: Pair): string {
  return pair.scene.engine.whole ? `bias of distance ${pair.dst - pair.src}` : "bias";
}

function word(scene: Scene, name: string): string {
  return term(scene.data, scene.state.view, name);
}

function token(pair: Pair, index: number): HTMLElement {
  return h(
    "span",
    { class: "mention" },
    h("span", { class: "index" }, `${index} `),
    bdi(clipped(visible(pair.scene.tokens[index].text), 20)),
  );
}
