// The error function, and with it GELU as torch computes it (exactly, not by tanh).

const STEP = 1 / 64; // of the table
const END = 6; // erf(6) differs from 1 by less than 1e-16
const PER_ROOT_PI = 2 / Math.sqrt(Math.PI);

/** erf(x) for 0 <= x <= 6 by its series, all of whose terms are positive: 2/sqrt(pi) e^(-x^2) sum of 2^n x^(2n+1) / (2n+1)!!. */
function series(x: number): number {
  let term = x;
  let sum = 0;
  for (let n = 0; sum + term !== sum; n++) {
    sum += term;
    term *= (2 * x * x) / (2 * n + 3);
  }
  return PER_ROOT_PI * Math.exp(-x * x) * sum;
}

const COUNT = END / STEP + 1;
const VALUES = Float64Array.from({ length: COUNT }, (_, i) => series(i * STEP));
const SLOPES = Float64Array.from({ length: COUNT }, (_, i) => PER_ROOT_PI * Math.exp(-((i * STEP) ** 2)));

/** erf(x) to about 1e-14: Taylor's polynomial of degree 5 around the nearest of 385 points, by the Hermite polynomials. */
export function erf(x: number): number {
  const size = Math.abs(x);
  if (!(size < END)) return Number.isNaN(x) ? NaN : Math.sign(x);
  const nearest = Math.round(size / STEP);
  const at = nearest * STEP;
  const d = size - at;
  const square = at * at;
  const polynomial =
    1 +
    d *
      (-at +
        d *
          ((2 * square - 1) / 3 +
            d * ((at * (3 - 2 * square)) / 6 + (d * (4 * square * square - 12 * square + 3)) / 30)));
  const value = VALUES[nearest] + SLOPES[nearest] * d * polynomial;
  return x < 0 ? -value : value;
}

/** x times the share of a normal distribution below x. */
export function gelu(x: number): number {
  return 0.5 * x * (1 + erf(x * Math.SQRT1_2));
}
