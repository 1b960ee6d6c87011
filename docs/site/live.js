// Live figures of the book: a few numbers of a chapter, computed again here for the graph, row and sliders that a reader chooses.
// Each kind is a pure function (figure, state) -> {name: number}; docs/live.py writes the figures, node tests the functions.
"use strict";

/** A cell of a rule's mask: may dst attend to src? */
function ruled(figure, state, dst, src) {
  const back = dst - src;
  return back >= 0 && (back < state.window || src < (state.sinks ?? 0));
}

/** The mask of a figure with its sliders where they are, before any click: receivers in rows. */
function mask(figure, state) {
  if (figure.cells) return figure.cells.map((row) => row.slice());
  return Array.from({ length: figure.size }, (_, dst) => Uint8Array.from({ length: figure.size }, (_, src) => Number(ruled(figure, state, dst, src))));
}

/** Where a figure starts. */
function start(figure) {
  const state = { row: figure.row ?? figure.size - 1 };
  for (const slider of figure.sliders ?? []) state[slider.name] = slider.value;
  state.mask = figure.size ? mask(figure, state) : [];
  return state;
}

/** Shares of a row's in-edges: softmax of logits at a temperature, or all alike. Nobody to attend to: all 0. */
function weights(figure, state, dst) {
  const logits = figure.logits[dst].map((logit) => logit / (state.temperature ?? 1));
  const allowed = state.mask[dst];
  const largest = Math.max(...logits.filter((_, src) => allowed[src]));
  const mass = logits.map((logit, src) => (allowed[src] ? Math.exp(logit - largest) : 0));
  const total = mass.reduce((sum, one) => sum + one, 0);
  return mass.map((one) => (total ? one / total : 0));
}

/** Senders of a row of the mask. */
function senders(row) {
  return Array.from(row.keys()).filter((src) => row[src]);
}

/** Senders that reach dst along at most so many edges in a row, dst itself among them. */
function reached(cells, dst, layers) {
  let found = new Set([dst]);
  for (let layer = 0; layer < layers; layer++) {
    const more = new Set(found);
    for (const middle of found) senders(cells[middle]).forEach((src) => more.add(src));
    if (more.size === found.size) break;
    found = more;
  }
  return found;
}

const KINDS = {
  /** Attention of a receiver along the edges that are left; `column` sums what all receivers give to a sender. */
  attention(figure, state) {
    const row = weights(figure, state, state.row);
    const numbers = { largest: Math.max(...row), edges: state.mask.flat().filter(Boolean).length };
    row.forEach((weight, src) => (numbers[`w${src}`] = weight));
    (figure.values?.[0] ?? []).forEach((_, channel) => {
      numbers[`z${channel}`] = row.reduce((sum, weight, src) => sum + weight * figure.values[src][channel], 0);
    });
    if (figure.sender !== undefined)
      numbers.column = figure.logits.reduce((sum, _, dst) => sum + weights(figure, state, dst)[figure.sender], 0);
    return numbers;
  },

  /** Edges, and what can be known through so many layers; loops are always there between layers (the residual stream). */
  graph(figure, state) {
    const size = figure.size;
    const edges = state.mask.reduce((sum, row) => sum + row.reduce((some, edge) => some + edge, 0), 0);
    const numbers = { edges, each: edges / size, share: edges / ((size * (size + 1)) / 2) };
    if (state.layers === undefined) return numbers;
    const sets = state.mask.map((_, dst) => (size <= 64 || dst === state.row ? reached(state.mask, dst, state.layers) : new Set()));
    numbers.reach = sets[state.row].size;
    numbers.back = state.row - Math.min(...sets[state.row]);
    if (size <= 64) {
      // pairs with a way of exactly so many edges
      let ways = state.mask.map((_, dst) => new Set([dst]));
      for (let layer = 0; layer < state.layers; layer++)
        ways = ways.map((found) => new Set([...found].flatMap((middle) => senders(state.mask[middle]))));
      numbers.hops = ways.reduce((sum, set) => sum + set.size, 0);
      numbers.pairs = sets.reduce((sum, set) => sum + set.size - 1, 0);
      numbers.leaks = sets.reduce((sum, set, dst) => sum + [...set].filter((src) => src > dst).length, 0);
    }
    let layers = 0;
    while (layers < size && !reached(state.mask, size - 1, layers).has(0)) layers++;
    numbers.first = layers < size ? layers : Infinity;
    // a needle in reach is found, another one guessed
    if (figure.classes) numbers.best = (numbers.reach + (size - numbers.reach) / figure.classes) / size;
    return numbers;
  },

  /** A formula of the sliders for each number. */
  formula(figure, state) {
    const names = (figure.sliders ?? []).map((slider) => slider.name);
    const values = names.map((name) => state[name]);
    return Object.fromEntries(
      Object.entries(figure.formulas).map(([name, text]) => [name, new Function(...names, `return ${text}`)(...values)]),
    );
  },

  /** Measured points: those of the place where the slider is. */
  points(figure, state) {
    return { ...figure.points[state.point] };
  },

  /** Singular values of a matrix: effective rank, and what is lost when only the first are left. */
  spectrum(figure, state) {
    const squares = figure.spectra[state.matrix].map((value) => value * value);
    const total = squares.reduce((sum, one) => sum + one, 0);
    const shares = squares.map((one) => one / total).filter((share) => share > 0);
    const entropy = -shares.reduce((sum, share) => sum + share * Math.log(share), 0);
    const lost = squares.slice(state.rank).reduce((sum, one) => sum + one, 0);
    return { effective: Math.exp(entropy), error: Math.sqrt(lost / total) };
  },
};

/** The numbers of a figure in a state. */
function numbers(figure, state) {
  return KINDS[figure.kind](figure, state);
}

/** A number as a figure writes it. */
function written(value, digits) {
  if (value === Infinity) return "never";
  if (digits === "%") return `${(100 * value).toFixed(1)} %`;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// ---- the page

const MOST_CELLS = 16; // a mask with more receivers is a picture, without buttons

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function live(root) {
  const figure = JSON.parse(root.dataset.figure);
  const state = start(figure);
  const picture = element("div", { class: "live-mask" });
  const table = element("dl", { class: "live-numbers", "aria-live": "polite" });

  const render = () => {
    const found = numbers(figure, state);
    table.replaceChildren(
      ...figure.shows.flatMap(([name, label, digits]) => [
        element("dt", {}, label),
        element("dd", {}, written(found[name], digits)),
      ]),
    );
    if (figure.size) draw(figure, state, picture, render);
  };

  const inputs = (figure.sliders ?? []).map((slider) => {
    const shown = element("output", {}, name(slider, slider.value));
    const input = element("input", { type: "range", min: slider.least, max: slider.most, step: slider.step ?? 1, value: slider.value });
    input.addEventListener("input", () => {
      state[slider.name] = Number(input.value);
      shown.textContent = name(slider, state[slider.name]);
      if (slider.graph) state.mask = mask(figure, state);
      render();
    });
    return element("label", {}, `${slider.label} `, input, " ", shown);
  });
  const again = element("button", { type: "button" }, "Start again");
  again.addEventListener("click", () => {
    Object.assign(state, start(figure));
    inputs.forEach((label, at) => {
      label.querySelector("input").value = figure.sliders[at].value;
      label.querySelector("output").textContent = name(figure.sliders[at], figure.sliders[at].value);
    });
    render();
  });
  root.append(element("figcaption", {}, figure.say), ...inputs, element("div", { class: "live-row" }, picture, table), again);
  render();
}

/** What a slider says at a value. */
function name(slider, value) {
  return slider.names ? slider.names[value] : String(value);
}

function draw(figure, state, picture, render) {
  if (figure.size > MOST_CELLS) return paint(figure, state, picture);
  const focused = [...picture.querySelectorAll("button")].indexOf(document.activeElement);
  picture.style.gridTemplateColumns = `auto repeat(${figure.size}, 1.6rem)`;
  const rows = state.mask.flatMap((cells, dst) => [
    element("span", dst === state.row ? { class: "live-chosen" } : {}, figure.tokens?.[dst] ?? String(dst)),
    ...Array.from(cells, (edge, src) => cell(figure, state, dst, src, edge, render)),
  ]);
  picture.replaceChildren(...rows);
  if (focused >= 0) picture.querySelectorAll("button")[focused].focus();
}

/** An edge as a button: pressed where it is there, as dark as its weight. */
function cell(figure, state, dst, src, edge, render) {
  const weight = edge && figure.logits ? weights(figure, state, dst)[src] : edge;
  const label = `${figure.tokens?.[src] ?? src} to ${figure.tokens?.[dst] ?? dst}`;
  const button = element("button", { type: "button", "aria-pressed": String(Boolean(edge)), "aria-label": label, title: label });
  button.style.setProperty("--weight", String(edge ? 0.15 + 0.85 * weight : 0));
  button.addEventListener("click", () => {
    state.mask[dst][src] = edge ? 0 : 1;
    state.row = dst;
    render();
  });
  return button;
}

function paint(figure, state, picture) {
  const side = 220;
  let canvas = picture.querySelector("canvas");
  if (!canvas) picture.append((canvas = element("canvas", { width: side, height: side, role: "img", "aria-label": "the mask, receivers in rows" })));
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, side, side);
  context.fillStyle = getComputedStyle(canvas).color;
  const step = side / figure.size;
  state.mask.forEach((row, dst) =>
    row.forEach((edge, src) => edge && context.fillRect(src * step, dst * step, Math.max(step, 0.5), Math.max(step, 0.5))),
  );
}

if (typeof module !== "undefined") module.exports = { mask, numbers, start, written };
else document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".live").forEach(live));
