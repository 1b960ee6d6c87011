// From base64 to numbers: tensors of half, brain or single floats, and masks of bits.

import type { Stored } from "../types";

/** The bytes of a base64 text. */
export function bytesOf(base64: string): Uint8Array {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** The value of a float16, given by its 16 bits. */
export function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const SIZE = { float16: 2, bfloat16: 2, float32: 4 };
let halves: Float64Array | null = null; // the value of every float16, worked out once

/** The numbers of a tensor, exactly. Throws if there are more or fewer than its shape says. */
export function numbersOf(stored: Stored): Float64Array {
  const bytes = bytesOf(stored.data);
  const count = stored.shape.reduce((product, size) => product * size, 1);
  if (bytes.length !== count * SIZE[stored.dtype]) {
    throw new RangeError(`a tensor of shape [${stored.shape}] in ${stored.dtype} came with ${bytes.length} bytes`);
  }
  const numbers = new Float64Array(count);
  const view = new DataView(bytes.buffer);
  if (stored.dtype === "float32") {
    for (let i = 0; i < count; i++) numbers[i] = view.getFloat32(4 * i, true);
  } else if (stored.dtype === "bfloat16") {
    const wide = new DataView(new ArrayBuffer(4)); // the upper half of a float32
    for (let i = 0; i < count; i++) {
      wide.setUint16(2, view.getUint16(2 * i, true), true);
      numbers[i] = wide.getFloat32(0, true);
    }
  } else {
    halves ??= Float64Array.from({ length: 65536 }, (_, bits) => half(bits));
    for (let i = 0; i < count; i++) numbers[i] = halves[view.getUint16(2 * i, true)];
  }
  return numbers;
}

/** `count` bits of a base64 text, the most significant of each byte first: a 0 or 1 for each. */
export function bitsOf(base64: string, count: number): Uint8Array {
  const bytes = bytesOf(base64);
  if (bytes.length !== Math.ceil(count / 8)) {
    throw new RangeError(`a mask of ${count} pairs came with ${bytes.length} bytes`);
  }
  const bits = new Uint8Array(count);
  for (let i = 0; i < count; i++) bits[i] = (bytes[i >> 3] >> (7 - (i & 7))) & 1;
  return bits;
}
