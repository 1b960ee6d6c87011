// What each head of the model that ships looks for and says: from the newest record of `python -m examples.heads`, put in by build.mjs.

import type { PageData } from "./types";

export interface Claim {
  claimed: number; // what cutting the edges of the sentence does
  control: number; // what cutting as many random ones does
  holds: boolean; // the difference is significant, after Holm's correction
}

export interface Reading {
  layer: number;
  head: number;
  job: string;
  looksFor: string;
  says: string;
  looks: Claim;
  said: Claim;
}

declare const READINGS: Reading[];

/** What is known of a head; null for other models. */
export function readingOf(data: PageData, layer: number, head: number): Reading | null {
  if (data.model.kind !== "model" || !data.model.trained) return null;
  return READINGS.find((one) => one.layer === layer && one.head === head) ?? null;
}
