// Products of rows and matrices in flat arrays, and the norm of a row. Matrices are [in, out]: y = x W.

/** Adds the row x[at .. at + rows] times a [rows, columns] matrix, which begins at `first`, to out[to .. to + columns]. */
export function addProduct(
  x: Float64Array,
  at: number,
  rows: number,
  matrix: Float64Array,
  first: number,
  columns: number,
  out: Float64Array,
  to: number,
): void {
  let i = 0;
  for (; i + 3 < rows; i += 4) {
    const a = x[at + i];
    const b = x[at + i + 1];
    const c = x[at + i + 2];
    const d = x[at + i + 3];
    let p = first + i * columns;
    let q = p + columns;
    let r = q + columns;
    let s = r + columns;
    for (let j = 0; j < columns; j++) out[to + j] += a * matrix[p++] + b * matrix[q++] + c * matrix[r++] + d * matrix[s++];
  }
  for (; i < rows; i++) {
    const a = x[at + i];
    const p = first + i * columns;
    for (let j = 0; j < columns; j++) out[to + j] += a * matrix[p + j];
  }
}

/** [count, rows] times a [rows, columns] matrix that begins at `first`, added to out [count, columns]. Two rows at a time read
 *  the matrix once: twice as fast as one by one. */
export function addProducts(
  x: Float64Array,
  count: number,
  rows: number,
  matrix: Float64Array,
  first: number,
  columns: number,
  out: Float64Array,
): void {
  let row = 0;
  if (rows % 4 === 0) {
    for (; row + 1 < count; row += 2) addTwo(x, row * rows, rows, matrix, first, columns, out, row * columns);
  }
  for (; row < count; row++) addProduct(x, row * rows, rows, matrix, first, columns, out, row * columns);
}

/** The products of the row at `at` and of the next one; `rows` is a multiple of 4. */
function addTwo(
  x: Float64Array,
  at: number,
  rows: number,
  matrix: Float64Array,
  first: number,
  columns: number,
  out: Float64Array,
  to: number,
): void {
  const next = at + rows;
  for (let i = 0; i < rows; i += 4) {
    const [a, b, c, d] = [x[at + i], x[at + i + 1], x[at + i + 2], x[at + i + 3]];
    const [e, f, g, h] = [x[next + i], x[next + i + 1], x[next + i + 2], x[next + i + 3]];
    const from = first + i * columns;
    for (let j = 0; j < columns; j++) {
      const u = from + j;
      const p = matrix[u];
      const q = matrix[u + columns];
      const r = matrix[u + 2 * columns];
      const s = matrix[u + 3 * columns];
      out[to + j] += a * p + b * q + c * r + d * s;
      out[to + columns + j] += e * p + f * q + g * r + h * s;
    }
  }
}

/** The chosen rows of an [all, columns] array, one after the other. */
export function gathered(x: Float64Array, columns: number, chosen: number[]): Float64Array {
  const result = new Float64Array(chosen.length * columns);
  chosen.forEach((row, place) => result.set(x.subarray(row * columns, (row + 1) * columns), place * columns));
  return result;
}

/** The dot product of `count` numbers from x[at] and y[from] on. */
export function dot(x: Float64Array, at: number, y: Float64Array, from: number, count: number): number {
  let a = 0;
  let b = 0;
  let i = 0;
  for (; i + 1 < count; i += 2) {
    a += x[at + i] * y[from + i];
    b += x[at + i + 1] * y[from + i + 1];
  }
  return i < count ? a + b + x[at + i] * y[from + i] : a + b;
}

/** Adds a times the `count` numbers from y[from] on to those from out[to] on. */
export function addScaled(a: number, y: Float64Array, from: number, count: number, out: Float64Array, to: number): void {
  for (let i = 0; i < count; i++) out[to + i] += a * y[from + i];
}

/** RMSNorm of one row, x / sqrt(mean x^2 + epsilon) * weight, written to out[to ..]. */
export function normRow(
  x: Float64Array,
  at: number,
  weight: Float64Array,
  epsilon: number,
  out: Float64Array,
  to: number,
): void {
  const width = weight.length;
  const factor = 1 / Math.sqrt(dot(x, at, x, at, width) / width + epsilon);
  for (let i = 0; i < width; i++) out[to + i] = x[at + i] * factor * weight[i];
}

/** A [rows, columns] matrix turned round. */
export function transposed(matrix: Float64Array, rows: number, columns: number): Float64Array {
  const result = new Float64Array(matrix.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) result[j * rows + i] = matrix[i * columns + j];
  return result;
}

/** A [rows, inner] matrix times an [inner, columns] one; they begin at `first` and `second`. */
export function product(
  left: Float64Array,
  first: number,
  rows: number,
  inner: number,
  right: Float64Array,
  second: number,
  columns: number,
): Float64Array {
  const result = new Float64Array(rows * columns);
  for (let i = 0; i < rows; i++) addProduct(left, first + i * inner, inner, right, second, columns, result, i * columns);
  return result;
}

/** Softmax of the numbers divided by the temperature, in a new array. */
export function softmax(numbers: Float64Array, temperature = 1): Float64Array {
  let highest = -Infinity;
  for (const number of numbers) if (number > highest) highest = number;
  const shares = numbers.map((number) => Math.exp((number - highest) / temperature));
  let sum = 0;
  for (const share of shares) sum += share;
  return shares.map((share) => share / sum);
}
