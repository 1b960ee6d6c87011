// What the page must not do, looked for in its sources: make markup of text, run text, or ask for anything.

import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const SOURCES = fileURLToPath(new URL("src", import.meta.url));
const FORBIDDEN = [
  /\b(innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|srcdoc)\b/,
  /\bdocument\.write/,
  /\beval\b|\bnew Function\b|\bimport\(/,
  /\bsetAttribute\(\s*["'`](style|on\w+)/,
  /\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts|Worker)\b/,
  /https?:\/\/(?!www\.w3\.org\/(2000\/svg|1999\/xhtml))/,
];

const files = readdirSync(SOURCES, { recursive: true }).filter((name) => /\.(ts|css|html)$/.test(name));
let found = 0;
for (const name of files.sort()) {
  const lines = readFileSync(join(SOURCES, name), "utf8").split("\n");
  lines.forEach((line, number) => {
    const code = line.replace(/^\s*(\/\/|\*|\/\*\*).*$/, "");
    for (const pattern of FORBIDDEN) {
      const match = pattern.exec(code);
      if (!match) continue;
      console.error(`src/${name}:${number + 1}: ${match[0]} is not allowed in the page`);
      found++;
    }
  });
}
console.log(`${files.length} sources, ${found} forbidden words`);
process.exit(found ? 1 : 0);
