// Runs scenarios in one browser: { chromium or firefox, jobs: [{ scenario, ... }] } comes in on stdin, a list of results goes out.

import { readFileSync } from "node:fs";

import * as access from "./access.mjs";
import { launch } from "./browser.mjs";
import * as controls from "./controls.mjs";
import * as mask from "./mask.mjs";
import * as numbers from "./numbers.mjs";
import * as viewport from "./viewport.mjs";

const scenarios = { ...access, ...controls, ...mask, ...numbers, ...viewport };
const { jobs, ...which } = JSON.parse(readFileSync(0, "utf8"));
const browser = await launch(which);
const results = [];
for (const job of jobs) {
  const start = Date.now();
  try {
    results.push({ result: await scenarios[job.scenario](browser, job), milliseconds: Date.now() - start });
  } catch (error) {
    results.push({ error: String(error?.stack ?? error), milliseconds: Date.now() - start });
  }
  for (const context of browser.contexts()) await context.close();
}
await browser.close();
process.stdout.write(JSON.stringify(results));
