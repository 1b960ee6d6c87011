// Live figures of the book: a reader changes a graph, a receiver or a slider, and some numbers of the chapter are computed again.
// Each kind of figure is a pure function (figure, state) -> {name: number}. docs/live.py writes the figures, node tests the functions.
"use strict";

// ---- masks

/** Whether the rule of a figure lets dst attend to src. */
function isEdge(figure, state, dst, src) {
  const back = dst - src;
  return back >= 0 && (back < state.window || src < (state.sinks ?? 0));
}

/** The mask of a figure at its sliders, without what clicks have changed: mask[receiver][sender]. */
function mask(figure, state) {
  const cells = figure.graphs ? figure.graphs[state.graph] : figure.cells;
  if (cells) return cells.map((row) => row.slice());
  const row = (dst) => Uint8Array.from({ length: figure.size }, (_, src) => Number(isEdge(figure, state, dst, src)));
  return Array.from({ length: figure.size }, (_, dst) => row(dst));
}

/** The state in which a figure starts. */
function start(figure) {
  const state = { row: figure.row ?? figure.size - 1 };
  for (const slider of figure.sliders ?? []) state[slider.name] = slider.value;
  state.mask = figure.size ? mask(figure, state) : [];
  return state;
}

/** The logit of a pair; a slider can set some. A pair without one, null, can never be an edge. */
function logit(figure, state, dst, src) {
  const name = figure.set?.[`${dst},${src}`];
  return name ? state[name] : figure.logits[dst][src];
}

/** How the logits of a receiver's in-edges, in the order of the senders, become weights. */
const NORMALISERS = {
  softmax(logits) {
    const largest = Math.max(...logits);
    const mass = logits.map((one) => Math.exp(one - largest));
    return mass.map((one) => one / sum(mass));
  },
  sparsemax(logits) {
    const sorted = [...logits].sort((one, other) => other - one);
    const thresholds = sorted.map((_, index) => (sum(sorted.slice(0, index + 1)) - 1) / (index + 1));
    const threshold = thresholds[sorted.filter((one, index) => one > thresholds[index]).length - 1];
    return logits.map((one) => Math.max(0, one - threshold));
  },
  sigmoid: (logits) => logits.map((one) => 1 / (1 + Math.exp(-one))),
  "stick-breaking"(logits) {
    let rest = 1;
    const shares = NORMALISERS.sigmoid(logits).reverse().map((share) => {
      const weight = share * rest;
      rest -= weight;
      return weight;
    });
    return shares.reverse();
  },
};

/** The weights of a receiver's senders. An isolated receiver has weights of 0. */
function weights(figure, state, dst) {
  const from = senders(state.mask[dst]);
  const normalise = NORMALISERS[figure.normalisers?.[state.normaliser] ?? "softmax"];
  const row = new Array(figure.size).fill(0);
  normalise(from.map((src) => logit(figure, state, dst, src))).forEach((weight, index) => (row[from[index]] = weight));
  return row;
}

/** The senders of a row of the mask. */
function senders(row) {
  return Array.from(row.keys()).filter((src) => row[src]);
}

/** The nodes that reach dst along at most so many edges, dst itself among them. */
function reaching(cells, dst, layers) {
  let found = new Set([dst]);
  for (let layer = 0; layer < layers; layer++) {
    const more = new Set(found);
    for (const middle of found) senders(cells[middle]).forEach((src) => more.add(src));
    if (more.size === found.size) break;
    found = more;
  }
  return found;
}

/** The number of walks of exactly so many edges between each pair: a power of the mask. */
function walks(cells, length) {
  let counts = cells.map((_, dst) => cells.map((_, src) => Number(dst === src)));
  for (let edge = 0; edge < length; edge++)
    counts = cells.map((row) => cells.map((_, src) => sum(senders(row).map((middle) => counts[middle][src]))));
  return counts;
}

function sum(numbers) {
  return numbers.reduce((total, one) => total + one, 0);
}

// ---- numbers

const KINDS = {
  /** Attention of a receiver along its in-edges; `column` sums the weights of a sender over all receivers. */
  attention(figure, state) {
    const row = weights(figure, state, state.row);
    const numbers = { largest: Math.max(...row), edges: sum(state.mask.flat()), total: sum(row) };
    row.forEach((weight, src) => (numbers[`w${src}`] = weight));
    numbers.mass = sum(senders(state.mask[state.row]).map((src) => Math.exp(logit(figure, state, state.row, src))));
    (figure.values?.[0] ?? []).forEach((_, channel) => {
      numbers[`z${channel}`] = sum(row.map((weight, src) => weight * figure.values[src][channel]));
      numbers[`m${channel}`] = numbers.mass * numbers[`z${channel}`];
    });
    if (figure.sender !== undefined) numbers.column = sum(figure.logits.map((_, dst) => weights(figure, state, dst)[figure.sender]));
    return numbers;
  },

  /** Edges, and what reaches what through so many layers. A token keeps its own state between layers (the residual stream). */
  graph(figure, state) {
    const size = figure.size;
    const edges = sum(state.mask.map((row) => sum(row)));
    const numbers = { edges, each: edges / size, share: edges / ((size * (size + 1)) / 2) };
    if (state.layers === undefined) return numbers;
    const sets = state.mask.map((_, dst) => (size <= 64 || dst === state.row ? reaching(state.mask, dst, state.layers) : new Set()));
    numbers.reach = sets[state.row].size;
    numbers.back = state.row - Math.min(...sets[state.row]);
    if (size <= 64) {
      numbers.hops = sum(walks(state.mask, state.layers).map((row) => row.filter(Boolean).length));
      numbers.pairs = sum(sets.map((set) => set.size - 1));
      numbers.leaks = sum(sets.map((set, dst) => [...set].filter((src) => src > dst).length));
    }
    let layers = 0;
    while (layers < size && !reaching(state.mask, size - 1, layers).has(0)) layers++;
    numbers.first = layers < size ? layers : Infinity;
    // The model knows the answer if the needle reaches it, and guesses one of the classes otherwise.
    if (figure.classes) numbers.best = (numbers.reach + (size - numbers.reach) / figure.classes) / size;
    return numbers;
  },

  /** Shares of the senders in the last token's state, by distance, in a text longer than all walks. */
  influence(figure, state) {
    const shares = influence(state);
    const mean = sum(shares.map((share, back) => share * back));
    const far = sum(shares.slice(figure.far + 1));
    const peak = shares.reduce((best, share, back) => (share > shares[best] ? back : best), 0);
    return { home: shares[0], peak, mean, far, longest: shares.length - 1 };
  },

  /** How different the states of the nodes are after so many layers of averaging over in-edges. */
  smoothing(figure, state) {
    const states = smoothed(figure, state);
    const pairs = states.flatMap((one, i) => states.slice(0, i).map((other) => [one, other]));
    const length = (one) => Math.sqrt(sum(one.map((value) => value * value)));
    const distance = (one, other) => length(one.map((value, channel) => value - other[channel]));
    const directions = states.map((one) => one.map((value) => value / length(one)));
    const center = states[0].map((_, channel) => sum(directions.map((one) => one[channel])) / states.length);
    return {
      distance: sum(pairs.map(([one, other]) => distance(one, other))) / pairs.length,
      spread: sum(directions.map((one) => distance(one, center))) / states.length,
    };
  },

  /** One formula of the sliders for each number. */
  formula(figure, state) {
    const names = (figure.sliders ?? []).map((slider) => slider.name);
    const values = names.map((name) => state[name]);
    const compute = (text) => new Function(...names, `return ${text}`)(...values);
    return Object.fromEntries(Object.entries(figure.formulas).map(([name, text]) => [name, compute(text)]));
  },

  /** The measured point at which the slider stands. */
  points(figure, state) {
    return { ...figure.points[state.point] };
  },

  /** Singular values of a matrix: the effective rank, and the error if only the largest are kept. */
  spectrum(figure, state) {
    const squares = figure.spectra[state.matrix].map((value) => value * value);
    const total = sum(squares);
    const shares = squares.map((one) => one / total).filter((share) => share > 0);
    const entropy = -sum(shares.map((share) => share * Math.log(share)));
    return { effective: Math.exp(entropy), error: Math.sqrt(sum(squares.slice(state.rank)) / total) };
  },
};

/** One row of (a I + (1 - a) W)^layers by distance, where W averages over a window: the last token of a long text. */
function influence(state) {
  let shares = [1];
  for (let layer = 0; layer < state.layers; layer++) {
    const next = new Array(shares.length + state.window - 1).fill(0);
    shares.forEach((share, back) => {
      next[back] += state.residual * share;
      for (let step = 0; step < state.window; step++) next[back + step] += ((1 - state.residual) * share) / state.window;
    });
    shares = next;
  }
  return shares;
}

/** The states after some layers x <- a x + (1 - a) mean of x over the in-edges. An isolated node keeps its state. */
function smoothed(figure, state) {
  const a = state.residual ?? 0;
  let states = figure.states;
  for (let layer = 0; layer < state.layers; layer++)
    states = states.map((own, dst) => {
      const from = senders(state.mask[dst]);
      const mean = (channel) => sum(from.map((src) => states[src][channel])) / from.length;
      return from.length ? own.map((value, channel) => a * value + (1 - a) * mean(channel)) : own;
    });
  return states;
}

/** The numbers of a figure in a state. */
function numbers(figure, state) {
  return KINDS[figure.kind](figure, state);
}

/** A number as a figure writes it; digits "e" stand for a power of ten. */
function written(value, digits) {
  if (value === Infinity) return "never";
  if (digits === "%") return `${(100 * value).toFixed(1)} %`;
  if (digits === "e") return value && value < 0.001 ? value.toExponential(1) : value.toFixed(3);
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// ---- the page

const MOST_CELLS = 16; // a mask of more tokens is painted, and its cells cannot be clicked
const LETTER = 6.7; // width of a letter of a label

function made(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function element(name, attributes = {}, ...children) {
  return made(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return made(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function between(least, value, most) {
  return Math.max(least, Math.min(value, most));
}

/** The figure of an element: sliders, pictures, numbers. */
function live(root) {
  const figure = JSON.parse(root.dataset.figure);
  const [stage, hint] = [element("div", { class: "live-stage" }), element("p", { class: "live-hint" })];
  const view = { figure, state: start(figure), stage, hint };
  const table = element("dl", { class: "live-numbers", "aria-live": "polite" });
  const inputs = allSliders(figure).map((slider) => input(view, slider));
  const reset = element("button", { type: "button", class: "live-reset" }, "Reset");
  view.render = () => {
    table.replaceChildren(...rows(figure, numbers(figure, view.state)));
    inputs.forEach((one) => one.show());
    draw(view);
  };
  reset.addEventListener("click", () => {
    Object.assign(view.state, start(figure));
    view.render();
  });
  const controls = element("div", { class: "live-controls" }, ...inputs.map((one) => one.label));
  root.append(element("figcaption", {}, figure.say), controls, stage, table, reset);
  view.render();
  follow(view);
  let width = root.clientWidth;
  const redraw = () => draw(view);
  new ResizeObserver(() => width !== (width = root.clientWidth) && redraw()).observe(root);
  new MutationObserver(redraw).observe(document.body, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

/** The sliders of a figure; a painted mask has one more, for its receiver. */
function allSliders(figure) {
  const receiver = { name: "row", label: "receiver", least: 0, most: figure.size - 1 };
  return [...(figure.sliders ?? []), ...(figure.size > MOST_CELLS && figure.kind !== "influence" ? [receiver] : [])];
}

function input(view, slider) {
  const { name, least, most, step = 1 } = slider;
  const range = element("input", { type: "range", min: least, max: most, step });
  const output = element("output");
  range.addEventListener("input", () => {
    view.state[name] = Number(range.value);
    if (slider.graph) view.state.mask = mask(view.figure, view.state);
    view.render();
  });
  const show = () => {
    const value = view.state[name];
    range.value = value;
    range.style.setProperty("--filled", `${(100 * (value - least)) / (most - least || 1)}%`);
    output.textContent = slider.names ? slider.names[value] : value.toLocaleString("en-US");
    range.setAttribute("aria-valuetext", output.textContent);
  };
  const label = element("label", slider.names ? { class: "is-named" } : {}, element("span", {}, slider.label), range, output);
  return { label, show };
}

/** The rows of the table of numbers; a share has a bar. */
function rows(figure, found) {
  return figure.shows.flatMap(([name, label, digits]) => {
    const share = digits === "%" && found[name] >= 0 && found[name] <= 1 ? { style: `--share: ${found[name]}`, class: "has-bar" } : {};
    return [element("dt", {}, label), element("dd", share, written(found[name], digits))];
  });
}

/** Draw the mask beside its arcs, and the picture of a figure that has one. */
function draw(view) {
  const { figure, stage } = view;
  const focused = stage.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const width = stage.clientWidth || 320;
  const panels = [];
  if (figure.size) panels.push(...graphPanels(view, width), view.hint);
  if (figure.picture) panels.push(...PICTURES[figure.picture.kind](view, Math.min(width, 440)));
  stage.replaceChildren(...panels);
  if (figure.size) view.hint.textContent = usage(view);
  if (focused) stage.querySelector(`[data-key="${focused}"]`)?.focus();
}

function panel(title, note, ...children) {
  return element("div", { class: "live-panel" }, element("p", {}, element("b", {}, title), ` ${note}`), ...children);
}

// ---- a graph: mask and arcs

/** The edges to draw: those of the mask, and those that a reader has cut. Each has a weight and a kind. */
function edgesOf(figure, state, rows = state.mask.keys()) {
  const before = figure.size > MOST_CELLS ? null : mask(figure, state);
  const edges = [];
  for (const dst of rows) {
    const shares = figure.logits ? weights(figure, state, dst) : null;
    state.mask[dst].forEach((edge, src) => {
      if (edge || before?.[dst][src]) edges.push({ dst, src, weight: shares ? shares[src] : 1, kind: edge ? "edge" : "cut" });
    });
  }
  return edges;
}

/** Whether a pair can be an edge. */
function isPair(figure, dst, src) {
  return !figure.logits || figure.logits[dst][src] !== null;
}

/** The token as a label: blanks and ends of lines are made visible. */
function token(figure, index) {
  const text = figure.tokens?.[index];
  if (text === undefined) return String(index);
  return text.replaceAll("\n", "⏎").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length));
}

/** The token in a sentence. */
function named(figure, index) {
  return figure.tokens ? `${token(figure, index)} (${index})` : `${index}`;
}

function describe(view, dst, src) {
  const { figure, state } = view;
  const pair = `${named(figure, src)} → ${named(figure, dst)}`;
  if (!state.mask[dst][src]) return `${pair}: no edge`;
  return figure.logits ? `${pair}: weight ${written(weights(figure, state, dst)[src], "%")}` : `${pair}: an edge`;
}

function usage(view) {
  if (view.figure.size > MOST_CELLS) return "Point at the mask to see an arc. Click a row to choose its receiver.";
  const shades = view.figure.logits ? " Dark cells and thick arcs have large weights." : "";
  return `Point at a cell to see its arc. Click it to cut the edge or to add one. Click a token to choose the receiver.${shades}`;
}

/** The mask and its arcs, side by side if both fit. */
function graphPanels(view, width) {
  const { figure, state } = view;
  const large = figure.size > MOST_CELLS;
  const space = width >= 560 ? Math.min(380, width / 2 - 14) : width;
  const found = large ? edgesOf(figure, state, [state.row]) : edgesOf(figure, state);
  const table = large ? painted(view, Math.min(space, 380)) : matrix(view, found, Math.min(space, 380));
  const left = width - Math.max(230, parseFloat(table.getAttribute("width") ?? table.style.width)) - 32;
  const panels = [
    panel("Mask", "rows: receivers, columns: senders", table),
    panel("Graph", "an arc leads from the sender to the receiver", arcs(view, found, Math.min(width >= 560 ? left : width, 460))),
  ];
  if (figure.power) panels.push(panel(`Walks of ${state.layers} edges`, "how many lead from a sender to a receiver", powers(view, space)));
  return panels;
}

/** An empty table with its labels: a row for each receiver and a column for each sender that some pair has. */
function grid(figure, space, attributes) {
  const all = Array.from({ length: figure.size }, (_, index) => index);
  const rows = all.filter((dst) => all.some((src) => isPair(figure, dst, src)));
  const columns = all.filter((src) => all.some((dst) => isPair(figure, dst, src)));
  const letters = Math.max(...all.map((index) => token(figure, index).length)) * LETTER;
  const room = Math.ceil(letters) + 8;
  const side = between(12, Math.floor((space - room - 2) / columns.length), 30);
  const turned = letters > side;
  const top = turned ? room : 18;
  const [width, height] = [room + side * columns.length + 2, top + side * rows.length + 2];
  const box = (dst, src) => {
    const [x, y] = [room + columns.indexOf(src) * side + 1, top + rows.indexOf(dst) * side + 1];
    return { x, y, width: side - 2, height: side - 2 };
  };
  const middle = (index) => (index + 0.5) * side;
  const receivers = rows.map((dst, index) => label(room - 6, top + middle(index) + 4, token(figure, dst), "end", { "data-row": dst }));
  const place = (index, src) => [room + middle(index), top - 5, token(figure, src)];
  const names = columns.map((src, index) => {
    return turned ? upright(...place(index, src), "start", { "data-column": src }) : label(...place(index, src), "middle", { "data-column": src });
  });
  return { box, rows, columns, svg: svg("svg", { width, height, class: "live-matrix", ...attributes }, ...receivers, ...names) };
}

/** The mask as a table of cells. A cell is a checkbox; arrow keys lead from one to the next. */
function matrix(view, found, space) {
  const { figure, state } = view;
  const words = "Mask: rows are receivers, columns are senders. Arrow keys move, Enter cuts or adds an edge.";
  const { box, rows, columns, svg: drawn } = grid(figure, space, { role: "group", "aria-label": words });
  const at = new Map(found.map((edge) => [`${edge.dst},${edge.src}`, edge]));
  view.focus ??= `${state.row},${columns[0]}`;
  for (const dst of rows) {
    const pairs = columns.filter((src) => isPair(figure, dst, src));
    drawn.append(...pairs.map((src) => cell(view, box(dst, src), dst, src, at.get(`${dst},${src}`))));
  }
  const [first, last] = [box(state.row, columns[0]), box(state.row, columns.at(-1))];
  const wide = last.x + last.width - first.x + 3;
  if (rows.includes(state.row)) drawn.append(rectangle(first.x - 1.5, first.y - 1.5, wide, first.height + 3, "live-band"));
  view.litCell = svg("rect", { class: "live-lit", visibility: "hidden", rx: 3 });
  view.box = box;
  drawn.append(view.litCell);
  return drawn;
}

function cell(view, box, dst, src, edge) {
  const kind = edge?.kind ?? "none";
  const key = `${dst},${src}`;
  const focus = view.focus === key ? 0 : -1;
  const words = describe(view, dst, src);
  const access = { role: "checkbox", "aria-checked": String(kind === "edge"), "aria-label": words, tabindex: focus };
  const shade = kind === "edge" ? `--weight: ${0.18 + 0.82 * edge.weight}` : "";
  const parts = [svg("title", {}, words), svg("rect", { ...box, rx: 3 })];
  const [x, y, cross] = [box.x + 4, box.y + 4, box.width - 8];
  if (kind === "cut") parts.push(svg("path", { d: `M${x} ${y}l${cross} ${cross}m0 ${-cross}l${-cross} ${cross}` }));
  return svg("g", { ...access, class: `live-cell is-${kind}`, style: shade, "data-edge": key, "data-key": `c${key}` }, ...parts);
}

/** The power of the mask: the number of walks in each cell. */
function powers(view, space) {
  const { figure, state } = view;
  const words = `Number of walks of ${state.layers} edges for each pair`;
  const { box, svg: drawn } = grid(figure, space, { role: "img", "aria-label": words });
  walks(state.mask, state.layers).forEach((row, dst) =>
    row.forEach((count, src) => {
      const { x, y, width, height } = box(dst, src);
      const kind = `live-cell is-fixed is-${count ? "edge" : "none"}`;
      drawn.append(svg("g", { class: kind, style: "--weight: 0.3" }, rectangle(x, y, width, height, "")));
      if (count) drawn.append(label(x + width / 2, y + height / 2 + 4, String(count), "middle", { class: "live-count" }));
    }),
  );
  return drawn;
}

/** Tokens on a line, with arcs from senders to receivers. Arcs of the receiver are drawn last, on top. */
function arcs(view, found, space) {
  const { figure, state } = view;
  const all = figure.size > 64 ? found : edgesOf(figure, state);
  const places = line(figure, space, Math.max(1, ...all.map(({ dst, src }) => Math.abs(dst - src))));
  const { x, y, width, height } = places;
  const active = activeReceivers(figure, state);
  const role = figure.size > MOST_CELLS ? "img" : "radiogroup";
  const words = "Graph: an arc leads from the sender to the receiver. A token is chosen as the receiver.";
  const drawn = svg("svg", { width, height, class: "live-arcs", role, "aria-label": words });
  if (figure.size > MOST_CELLS) drawn.append(...background(view, places));
  const ordered = [...found].sort((one, other) => Number(active.has(one.dst)) - Number(active.has(other.dst)));
  drawn.append(...ordered.map((edge) => arc(view, places, edge, active.has(edge.dst))));
  view.litArc = svg("path", { class: "live-lit", visibility: "hidden" });
  view.path = (dst, src) => curve(places, dst, src);
  drawn.append(view.litArc, ...nodes(view, places));
  if (figure.size > MOST_CELLS) drawn.append(segment(x(0), y, x(figure.size - 1), y, "live-axis"));
  return drawn;
}

/** The receivers whose in-edges matter to the chosen receiver: itself, and in later layers those that reach it. */
function activeReceivers(figure, state) {
  if (state.layers === undefined || figure.kind !== "graph" || figure.size > 64) return new Set([state.row]);
  return reaching(state.mask, state.row, state.layers - 1);
}

/** Where the tokens are on their line, under arcs that span at most `far` tokens. */
function line(figure, space, far) {
  const count = figure.size;
  const large = count > MOST_CELLS;
  const longest = Math.max(...(large ? [1] : Array.from({ length: count }, (_, index) => token(figure, index).length)));
  const spread = (side) => Math.min(80, (space - 2 * side) / (count - 1));
  const level = !large && longest * LETTER + 8 <= spread((longest * LETTER) / 2 + 2);
  const side = level ? Math.max(16, (longest * LETTER) / 2 + 2) : 14;
  const step = large ? (space - 2 * side) / (count - 1) : spread(side);
  const top = between(34, far * step * 0.45, 150);
  const y = top + 12;
  const height = y + (large ? 22 : level ? 26 : longest * LETTER + 16);
  return { x: (index) => side + index * step, y, top, step, far, count, width: 2 * side + step * (count - 1), height, level };
}

/** The path of an arc: half an ellipse over the line, or a small loop. */
function curve({ x, y, top, count, step, far }, dst, src) {
  const gap = count > MOST_CELLS ? 0 : 5;
  if (dst === src) return gap ? `M${x(src) - 3} ${y - gap}c-11 -20 17 -20 6 0` : `M${x(src)} ${y}c-6 -11 6 -11 0 0`;
  const back = dst < src;
  const offset = count > MOST_CELLS ? 0 : back ? -2.5 : 2.5;
  const [from, to] = [x(src) + offset, x(dst) - offset];
  const share = Math.min(1, Math.abs(dst - src) / far);
  const rise = Math.max(Math.min(18, step * 4), top * (0.1 + 0.88 * share)) * (back ? 0.82 : 1);
  return `M${from} ${y - gap}A${Math.abs(to - from) / 2} ${rise} 0 0 ${back ? 0 : 1} ${to} ${y - gap}`;
}

function arc(view, places, { dst, src, weight, kind }, active) {
  const path = curve(places, dst, src);
  const back = dst < src && view.figure.causal !== false;
  const names = ["live-arc", `is-${kind}`, active ? "is-active" : "", back ? "is-back" : ""].filter(Boolean);
  const heads = dst === src || view.figure.size > MOST_CELLS ? [] : [head(places, dst, src)];
  const width = view.figure.logits ? 0.8 + 4.2 * weight : view.figure.size > MOST_CELLS ? 1 : 1.6;
  return svg(
    "g",
    { class: names.join(" "), style: `--width: ${width}`, "data-edge": `${dst},${src}` },
    svg("title", {}, describe(view, dst, src)),
    svg("path", { class: "live-touch", d: path }),
    svg("path", { class: "live-line", d: path }),
    ...heads,
  );
}

/** The head of an arrow, at the receiver. */
function head({ x, y }, dst, src) {
  const tip = x(dst) + (dst < src ? 2.5 : -2.5);
  return svg("path", { class: "live-head", d: `M${tip - 3.5} ${y - 11.5}h7L${tip} ${y - 4}z` });
}

/** The tokens: buttons that choose the receiver. */
function nodes(view, { x, y, level, count }) {
  const { figure, state } = view;
  if (count > MOST_CELLS) return marks(view, x, y);
  const reach = state.layers !== undefined && figure.kind === "graph" ? reaching(state.mask, state.row, state.layers) : new Set();
  return Array.from({ length: count }, (_, index) => {
    const chosen = index === state.row;
    const names = ["live-node", chosen ? "is-chosen" : "", reach.has(index) ? "is-reaching" : ""].filter(Boolean).join(" ");
    const both = { "data-row": index, "data-column": index };
    const text = token(figure, index);
    const words = level ? label(x(index), y + 20, text, "middle", both) : upright(x(index), y + 11, text, "end", both);
    const access = { role: "radio", "aria-checked": String(chosen), "aria-label": `receiver ${named(figure, index)}` };
    const keys = { tabindex: chosen ? 0 : -1, "data-node": index, "data-key": `n${index}` };
    return svg("g", { ...access, ...keys, class: names }, dot(x(index), y, 5, ""), words);
  });
}

/** The ends of the line and the receiver, where there are too many tokens for labels. */
function marks(view, x, y) {
  const { figure, state } = view;
  const near = (one, other) => Math.abs(x(one) - x(other)) < 34;
  const ends = [0, figure.size - 1].filter((end) => !near(end, state.row) || end === state.row);
  const shown = [...new Set([...ends, state.row])];
  const anchor = (index) => (index === 0 ? "start" : index === figure.size - 1 ? "end" : "middle");
  const names = shown.map((index) => label(x(index), y + 18, index.toLocaleString("en-US"), anchor(index)));
  return [dot(x(state.row), y, 4.5, "live-receiver"), ...names];
}

/** All edges of a painted graph as one faint path, where they are few enough. */
function background(view, places) {
  const { figure, state } = view;
  if (figure.size > 64) return []; // too many arcs
  const all = edgesOf(figure, state).filter(({ dst, src }) => dst !== src);
  return [svg("path", { class: "live-others", d: all.map(({ dst, src }) => curve(places, dst, src)).join("") })];
}

/** A large mask as a picture; a pixel is as dark as the share of edges among its pairs. */
function painted(view, space) {
  const { figure, state } = view;
  const pixels = Math.min(figure.size, 256);
  const side = Math.min(space - 2, 260);
  const canvas = element("canvas", { width: pixels, height: pixels, style: `width: ${side}px; height: ${side}px` });
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(view.stage).getPropertyValue("--live-edge") || "#0072B2";
  const counts = new Float32Array(pixels * pixels);
  const to = Uint16Array.from({ length: figure.size }, (_, index) => Math.floor((index * pixels) / figure.size));
  state.mask.forEach((row, dst) => {
    for (let src = 0; src < row.length; src++) if (row[src]) counts[to[dst] * pixels + to[src]]++;
  });
  const most = (figure.size / pixels) ** 2;
  counts.forEach((count, index) => {
    if (!count) return;
    context.globalAlpha = Math.min(1, 0.3 + (0.7 * count) / most);
    context.fillRect(index % pixels, Math.floor(index / pixels), 1, 1);
  });
  const cell = side / figure.size;
  view.box = (dst, src) => ({ x: src * cell, y: dst * cell, width: Math.max(cell, 4), height: Math.max(cell, 4) });
  view.litCell = svg("rect", { class: "live-lit", visibility: "hidden" });
  const band = svg("rect", { class: "live-band", x: 0, y: state.row * cell, width: side, height: Math.max(cell, 2) });
  const words = `Mask of ${figure.size} tokens: rows are receivers, columns are senders`;
  const over = drawing("live-over", words, side, side, band, view.litCell);
  return element("div", { class: "live-painted", style: `width: ${side}px; height: ${side}px` }, canvas, over);
}

// ---- pointer and keys

/** Light an edge in the mask and among the arcs, and say what it is. */
function light(view, dst, src) {
  const { figure, state, stage } = view;
  const edge = state.mask[dst][src];
  for (const [key, value] of Object.entries(view.box(dst, src))) view.litCell.setAttribute(key, value);
  view.litArc.setAttribute("d", view.path(dst, src));
  view.litArc.classList.toggle("is-absent", !edge);
  [view.litCell, view.litArc].forEach((node) => node.setAttribute("visibility", "visible"));
  stage.querySelectorAll("[data-row], [data-column]").forEach((node) => {
    node.classList.toggle("is-lit", node.dataset.row === String(dst) || node.dataset.column === String(src));
  });
  stage.querySelectorAll("[data-edge]").forEach((node) => node.classList.toggle("is-lit", node.dataset.edge === `${dst},${src}`));
  const act = figure.size > MOST_CELLS ? "" : edge ? ". Click to cut it." : ". Click to add it.";
  view.hint.textContent = describe(view, dst, src) + act;
}

function dim(view) {
  view.stage.querySelectorAll(".is-lit").forEach((node) => node.classList.remove("is-lit"));
  [view.litCell, view.litArc].forEach((node) => node.setAttribute("visibility", "hidden"));
  view.hint.textContent = usage(view);
}

/** Cut an edge, or add it. Exactly one cell of the mask changes. */
function toggle(view, dst, src) {
  view.state.mask[dst][src] = view.state.mask[dst][src] ? 0 : 1;
  view.state.row = dst;
  view.focus = `${dst},${src}`;
  view.render();
  light(view, dst, src);
}

function pairOf(view, event) {
  const edge = event.target.closest?.("[data-edge]");
  if (edge) return edge.dataset.edge.split(",").map(Number);
  const over = event.target.closest?.(".live-over");
  if (!over || event.clientX === undefined) return null;
  const bounds = over.getBoundingClientRect();
  const index = (offset, length) => between(0, Math.floor((offset / length) * view.figure.size), view.figure.size - 1);
  return [index(event.clientY - bounds.top, bounds.height), index(event.clientX - bounds.left, bounds.width)];
}

/** Follow the pointer, clicks and keys on the pictures of a graph. */
function follow(view) {
  const { figure, stage } = view;
  if (!figure.size) return;
  const choose = (row) => {
    view.state.row = row;
    view.render();
  };
  stage.addEventListener("pointermove", (event) => {
    const pair = event.pointerType === "touch" ? null : pairOf(view, event);
    if (pair) light(view, ...pair);
    else if (event.pointerType !== "touch") dim(view);
  });
  stage.addEventListener("pointerleave", () => dim(view));
  stage.addEventListener("focusin", (event) => {
    const pair = event.target.matches(":focus-visible") ? pairOf(view, event) : null;
    if (pair) light(view, ...pair);
  });
  stage.addEventListener("click", (event) => {
    const pair = pairOf(view, event);
    const node = event.target.closest("[data-node]");
    const label = event.target.closest(".live-matrix [data-row]");
    if (pair && figure.size > MOST_CELLS) choose(pair[0]);
    else if (pair) toggle(view, ...pair);
    else if (node) choose(Number(node.dataset.node));
    else if (label) choose(Number(label.dataset.row));
  });
  stage.addEventListener("keydown", (event) => press(view, event, choose));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function press(view, event, choose) {
  const { stage } = view;
  const { edge, node } = event.target.dataset ?? {};
  const step = STEPS[event.key];
  if (edge && (event.key === "Enter" || event.key === " ")) toggle(view, ...edge.split(",").map(Number));
  else if (edge && step) {
    const [dst, src] = edge.split(",").map(Number);
    const next = stage.querySelector(`.live-cell[data-edge="${dst + step[0]},${src + step[1]}"]`);
    if (!next) return;
    event.target.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    view.focus = next.dataset.edge;
    next.focus();
  } else if (node && step) {
    const next = between(0, Number(node) + step[0] + step[1], view.figure.size - 1);
    choose(next);
    stage.querySelector(`[data-node="${next}"]`).focus();
  } else return;
  event.preventDefault();
}

// ---- pictures of formulas and measurements

const PICTURES = {
  /** A number against a slider, or measured points. A dot marks the values of the sliders. */
  curve(view, space) {
    const { picture } = view.figure;
    const { lines, dots } = CURVES[picture.from](view);
    const named = lines.length > 1 ? [legend(lines)] : [];
    return [panel(picture.title, picture.note ?? "", plot(picture, lines, dots, space), ...named)];
  },

  /** Singular values, the kept ones blue. */
  spectrum(view, space) {
    const { figure, state } = view;
    const values = figure.spectra[state.matrix];
    const high = 140;
    const step = (space - 8) / values.length;
    const bars = values.map((value, index) => {
      const tall = Math.max(1, (value / values[0]) * high);
      const kind = index < state.rank ? "is-kept" : "is-lost";
      return rectangle(2 + index * step, high - tall + 2, Math.max(1, step - 2), tall, kind);
    });
    const drawn = drawing("live-bars", "singular values, largest first", space, high + 6, ...bars);
    return [panel("Singular values", "largest first; blue: kept", drawn)];
  },

  /** The matrices of two forms, to scale. */
  shapes(view, space) {
    const { width, d } = view.state;
    const side = (space - 40) / (2 + d / width);
    const thin = (side * d) / width;
    const factors = [rectangle(0, 1, thin, side, "is-thin"), rectangle(thin + 8, 1, side, thin, "is-thin")];
    const square = rectangle(thin + side + 40, 1, side, side, "is-square");
    const drawn = drawing("live-shapes", "the matrices to scale", space, side + 2, ...factors, square);
    return [panel("To scale", "blue: two thin matrices, orange: one square matrix", drawn)];
  },

  /** Senders, relays and receivers in three rows. */
  relay(view, space) {
    const { relays } = view.state;
    const wide = Math.min(space, 340);
    const spots = (count, y) => Array.from({ length: count }, (_, index) => [(wide * (index + 0.5)) / count, y]);
    const [top, middle, bottom] = [spots(4, 18), spots(relays, 78), spots(4, 138)];
    const join = (from, to) => from.flatMap((one) => to.map((other) => segment(one[0], one[1] + 6, other[0], other[1] - 6)));
    const dots = (places, kind) => places.map(([x, y]) => dot(x, y, 6, kind));
    const parts = [...join(top, middle), ...join(middle, bottom), ...dots([...top, ...bottom], ""), ...dots(middle, "is-relay")];
    const words = `four senders, ${relays} relays, four receivers`;
    return [panel("Graph", "top: senders, middle: relays, bottom: receivers", drawing("live-relay", words, wide, 156, ...parts))];
  },

  /** A bar for each point; click one to choose it. */
  rows(view, space) {
    const { figure, state } = view;
    const { whole, part, note, title } = figure.picture;
    const most = Math.max(...figure.points.map((point) => point[whole]));
    const names = figure.sliders[0].names;
    const room = Math.max(...names.map((one) => one.length)) * LETTER + 10;
    const scale = (space - room - 4) / most;
    const bars = figure.points.map((point, index) => {
      const bar = (name, kind) => rectangle(room, index * 20 + 3, Math.max(1, point[name] * scale), 14, kind);
      const words = svg("title", {}, `${names[index]}: ${point[part]} of ${point[whole]}`);
      const parts = [words, label(room - 6, index * 20 + 14, names[index], "end"), bar(whole, "is-whole"), bar(part, "is-part")];
      const row = svg("g", { class: index === state.point ? "is-chosen" : "" }, ...parts);
      row.addEventListener("click", () => {
        state.point = index;
        view.render();
      });
      return row;
    });
    return [panel(title, note, drawing("live-rows", note, space, names.length * 20 + 4, ...bars))];
  },

  /** The states of the nodes in the plane, before the first layer and now, and a curve. */
  cloud(view, space) {
    const { figure, state } = view;
    const side = 200;
    const axes = [0, 1].map((axis) => figure.states.map((one) => one[axis]));
    const limits = axes.map((values) => [Math.min(...values), Math.max(...values)]);
    const scale = (side - 20) / Math.max(...limits.map(([low, high]) => high - low));
    const centered = (one, axis) => (one[axis] - (limits[axis][0] + limits[axis][1]) / 2) * scale;
    const at = (one) => [side / 2 + centered(one, 0), side / 2 - centered(one, 1)];
    const [before, now] = [figure.states.map(at), smoothed(figure, state).map(at)];
    const moves = before.map(([x, y], index) => segment(x, y, ...now[index]));
    const dots = [...before.map(([x, y]) => dot(x, y, 4, "is-before")), ...now.map(([x, y]) => dot(x, y, 5, "is-now"))];
    const drawn = drawing("live-cloud", "states of the nodes in the plane", side, side, ...moves, ...dots);
    return [panel("States", "hollow: before the first layer, filled: now", drawn), ...PICTURES.curve(view, Math.min(space, 360))];
  },
};

const CURVES = {
  /** Numbers along a slider. */
  sweep({ figure, state }) {
    const { x, y, names, logx } = figure.picture;
    const { least, most, step = 1 } = figure.sliders.find((one) => one.name === x);
    const count = Math.min(96, Math.round((most - least) / step));
    const along = (part) => (logx ? least * (most / least) ** part : least + part * (most - least));
    const xs = Array.from({ length: count + 1 }, (_, index) => Math.round(along(index / count) / step) * step);
    const found = xs.map((value) => numbers(figure, { ...state, [x]: value }));
    const here = numbers(figure, state);
    const points = (name) => xs.map((value, at) => [value, found[at][name]]);
    return { lines: y.map((name, index) => ({ name: names[index], points: points(name) })), dots: y.map((name) => [state[x], here[name]]) };
  },

  /** Measured points, a line for each group. */
  points({ figure, state }) {
    const { x, y } = figure.picture;
    const groups = new Map();
    for (const point of figure.points) groups.set(point.group, [...(groups.get(point.group) ?? []), [point[x], point[y]]]);
    const here = figure.points[state.point];
    const dots = [...groups.keys()].map((name) => (name === here.group ? [here[x], here[y]] : null));
    return { lines: Array.from(groups, ([name, points]) => ({ name, points })), dots };
  },

  /** Influence against distance. */
  influence({ state }) {
    return { lines: [{ name: "share", points: influence(state).map((share, back) => [back, share]) }], dots: [] };
  },
};

/** Lines in a frame. An axis is logarithmic if the picture says so; values below the frame are left out. */
function plot(picture, lines, dots, space) {
  const [left, top, wide, high] = [40, 8, space - 50, 150];
  const values = (axis) => lines.flatMap((one) => one.points.map((point) => point[axis]));
  const floor = picture.least ?? (picture.log ? 1e-12 : 0);
  const horizontal = axisOf(Math.min(...values(0)), Math.max(...values(0)), picture.logx);
  const vertical = axisOf(floor, picture.most ?? Math.max(...values(1)), picture.log);
  const x = (value) => left + horizontal.part(value) * wide;
  const y = (value) => top + (1 - between(0, vertical.part(value), 1)) * high;
  const drawn = drawing("live-plot", `${picture.ylabel} against ${picture.xlabel}`, space, high + 40);
  for (const tick of vertical.ticks) {
    drawn.append(segment(left, y(tick), left + wide, y(tick), "live-guide"), label(left - 6, y(tick) + 4, short(tick, picture.log), "end"));
  }
  const [low, , most] = horizontal.ticks;
  drawn.append(label(x(low), top + high + 14, short(low), "start"), label(x(most), top + high + 14, short(most), "end"));
  drawn.append(label(left + wide / 2, top + high + 28, picture.xlabel, "middle"));
  lines.forEach((one, index) => {
    const inside = one.points.filter((point) => point[1] >= floor).map(([a, b]) => [x(a), y(b)]);
    const path = inside.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
    drawn.append(svg("path", { d: `M${path}`, class: `live-series is-${index}` }));
    if (picture.from === "points") drawn.append(...inside.map(([a, b]) => dot(a, b, 2.5, `live-point is-${index}`)));
    if (dots[index]) drawn.append(dot(x(dots[index][0]), y(dots[index][1]), 5.5, `live-point is-${index} is-here`));
  });
  return drawn;
}

/** An axis: where a value is between its ends, 0 to 1, and three ticks. */
function axisOf(low, high, log = false) {
  if (!log) return { part: (value) => (value - low) / (high - low || 1), ticks: [low, (low + high) / 2, high] };
  const part = (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low);
  return { part, ticks: [low, Math.sqrt(low * high), high] };
}

function legend(lines) {
  return element("p", { class: "live-legend" }, ...lines.map((one, index) => element("span", { class: `is-${index}` }, one.name)));
}

/** A number at an axis. */
function short(value, log = false) {
  if (log && value < 0.01) return value.toExponential(0).replace("e-", "e−");
  return Number(value.toPrecision(value < 1000 ? 3 : 6)).toLocaleString("en-US");
}

// ---- shapes

function drawing(kind, words, width, height, ...children) {
  return svg("svg", { width, height, class: kind, role: "img", "aria-label": words }, ...children);
}

function rectangle(x, y, width, height, kind) {
  return svg("rect", { x, y, width, height, class: kind, rx: 2 });
}

function dot(cx, cy, r, kind) {
  return svg("circle", { cx, cy, r, class: kind });
}

function segment(x1, y1, x2, y2, kind = "") {
  return svg("line", { x1, y1, x2, y2, class: kind });
}

function label(x, y, text, anchor, attributes = {}) {
  return svg("text", { x, y, "text-anchor": anchor, ...attributes }, text);
}

/** A label that is read from below, and ends or starts at a point. */
function upright(x, y, text, anchor, attributes = {}) {
  return svg("text", { transform: `translate(${x + 4} ${y}) rotate(-90)`, "text-anchor": anchor, ...attributes }, text);
}

if (typeof module !== "undefined") module.exports = { influence, mask, numbers, smoothed, start, written };
else document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".live").forEach(live));
