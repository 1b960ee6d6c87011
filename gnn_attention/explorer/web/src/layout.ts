// Where the tokens stand: in words side by side, in turned words, or, where there is no room for words, as ticks on a line.

export type Kind = "words" | "turned" | "ticks";

export interface Layout {
  kind: Kind;
  width: number;
  height: number; // of the arcs above the line
  gutter: number; // room at the left for the names of the rows
  slot: number; // the least distance of two tokens
  x: Float64Array;
  widths: Float64Array; // of the words
}

const PADDING = 5;
const LEAST_GAP = 3;
const WIDEST_GAP = 84;
const SIDE = 14; // for the loop of the last token
export const TURNED_SLOT = 15.5;
const ROOMY = 520; // from this width on there is room for the names of the rows
export const GUTTER = 98; // for the names of the rows, at the left
export const MOST_WORDS = 64; // above, tokens are ticks and arcs are painted on a canvas

/** Places for words of these widths within `available`. */
export function lay(words: number[], available: number): Layout {
  const count = words.length;
  const widths = Float64Array.from(words, (width) => Math.max(24, width + 2 * PADDING));
  const total = widths.reduce((sum, width) => sum + width, 0);
  const height = Math.round(Math.min(206, Math.max(124, available * 0.26)));
  const common = { width: available, height };
  const room = available - GUTTER - SIDE - total - LEAST_GAP * Math.max(0, count - 1);
  if (count <= MOST_WORDS && room >= 0) return { kind: "words", ...common, gutter: GUTTER, ...sideBySide(widths, available, GUTTER) };
  const gutter = count <= MOST_WORDS && (available - GUTTER) / count >= TURNED_SLOT && available >= ROOMY ? GUTTER : 0;
  const kind = count <= MOST_WORDS && available / count >= TURNED_SLOT ? "turned" : "ticks";
  return { kind, ...common, gutter, ...evenly(widths, available, gutter) };
}

function sideBySide(widths: Float64Array, available: number, gutter: number): Pick<Layout, "x" | "widths" | "slot"> {
  const count = widths.length;
  const total = widths.reduce((sum, width) => sum + width, 0);
  const gap = count > 1 ? Math.min(WIDEST_GAP, (available - gutter - SIDE - total) / (count - 1)) : 0;
  let left = gutter + (available - gutter - SIDE - total - gap * Math.max(0, count - 1)) / 2;
  let slot = available - gutter;
  const x = new Float64Array(count);
  widths.forEach((width, index) => {
    x[index] = left + width / 2;
    left += width + gap;
    if (index) slot = Math.min(slot, x[index] - x[index - 1]);
  });
  return { x, widths, slot };
}

function evenly(widths: Float64Array, available: number, gutter: number): Pick<Layout, "x" | "widths" | "slot"> {
  const room = available - gutter;
  const side = Math.min(12, room / Math.max(1, widths.length) / 2);
  const slot = (room - 2 * side) / Math.max(1, widths.length);
  return { slot, widths, x: Float64Array.from(widths, (_, index) => gutter + side + (index + 0.5) * slot) };
}

/** The token nearest to a place on the line. */
export function nearest(layout: Layout, x: number): number {
  let low = 0;
  let high = layout.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((layout.x[middle] + layout.x[middle + 1]) / 2 < x) low = middle + 1;
    else high = middle;
  }
  return low;
}
