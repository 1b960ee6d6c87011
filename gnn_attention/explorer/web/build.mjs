// Builds the page: one file with the script and the style inside, and the hashes by which alone they may run. Python puts a title
// and data into it. The same sources always give the same bytes.
//
//   node build.mjs [FILE]           the page (default ../page.html)
//   node build.mjs --engine FILE    the engine alone, as a module for Node

import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const PAGE = here("../page.html");
const LARGEST = 200_000; // bytes of the page without data
const RECORDS = here("../../../tests/records/");
const LEVEL = 0.05; // of p, by Holm's correction over all heads

/** The text of a bundle. */
async function bundled(entry, options) {
  const done = await build({
    absWorkingDir: here("."),
    entryPoints: [entry],
    bundle: true,
    write: false,
    charset: "ascii",
    target: "es2022",
    legalComments: "none",
    logLevel: "warning",
    ...options,
  });
  return done.outputFiles[0].text.trim();
}

/** The template with `text` in the place of `mark`, which must be there once. */
function put(template, mark, text) {
  const parts = template.split(mark);
  if (parts.length !== 2) throw new Error(`src/index.html must hold ${mark} once, it does ${parts.length - 1} times`);
  return parts.join(text);
}

/** The policy: this script and this style, and nothing else from anywhere. */
function policy(script, style) {
  const hash = (text) => `'sha256-${createHash("sha256").update(text, "utf8").digest("base64")}'`;
  const rules = [
    "default-src 'none'",
    `script-src ${hash(script)}`,
    `style-src ${hash(style)}`,
    "base-uri 'none'",
    "form-action 'none'",
  ];
  return `<meta http-equiv="Content-Security-Policy" content="${rules.join("; ")}">`;
}

/** What is recorded of each head of the model that ships, in the form of src/readings.ts. */
function readings() {
  const newest = readdirSync(RECORDS).filter((name) => name.endsWith("-heads.json")).sort().at(-1);
  const { rows } = JSON.parse(readFileSync(RECORDS + newest, "utf8"));
  const claim = ({ claimed, control, p_holm }) => ({ claimed, control, holds: p_holm <= LEVEL });
  return rows
    .filter((row) => row.model === "trained")
    .map(({ layer, head, job, looks_for, says, looks, said }) => ({
      ...{ layer, head, job, looksFor: looks_for, says },
      ...{ looks: claim(looks), said: claim(said) },
    }));
}

async function page() {
  const define = { READINGS: JSON.stringify(readings()) };
  const script = await bundled("src/main.ts", { format: "iife", minify: true, define });
  const style = await bundled("src/style.css", { minify: true });
  for (const [name, text, ends] of [
    ["script", script, /<\/script|<!--|__TITLE__|__DATA__/i],
    ["style", style, /<\/style|<!--|__TITLE__|__DATA__|@import|url\(/i],
  ]) {
    const found = ends.exec(text);
    if (found) throw new Error(`the ${name} must not hold ${found[0]}`);
  }
  let html = readFileSync(here("src/index.html"), "utf8");
  for (const mark of ["__TITLE__", "__DATA__"]) put(html, mark, "");
  html = put(html, "<!--csp-->", policy(script, style));
  html = put(html, "/*style*/", style);
  html = put(html, "/*script*/", script);
  if (Buffer.byteLength(html) > LARGEST) throw new Error(`the page has ${Buffer.byteLength(html)} bytes, at most ${LARGEST}`);
  return html;
}

const [first, second] = process.argv.slice(2);
if (first === "--engine") {
  writeFileSync(second, (await bundled("src/engine.ts", { format: "esm" })) + "\n");
} else {
  const html = await page();
  writeFileSync(first ?? PAGE, html);
  console.log(`${first ?? PAGE}: ${Buffer.byteLength(html).toLocaleString("en")} bytes without data`);
}
