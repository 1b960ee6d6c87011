// Asks the engine of the explorer's page, outside of any browser: node engine.mjs ENGINE DATA QUESTIONS writes a line of JSON
// for each question. ENGINE is what `node build.mjs --engine` bundled. Float64Arrays go as base64.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [engineFile, dataFile, questionsFile] = process.argv.slice(2);
const { makeEngine, characterClasses, erf, half } = await import(pathToFileURL(engineFile));
const read = (file) => JSON.parse(readFileSync(file, "utf8"));

const packed = (_, value) =>
  ArrayBuffer.isView(value) ? Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64") : value;

const engine = makeEngine(read(dataFile));
let run = null;
const runs = [];

function answer({ ask, ...rest }) {
  if (ask === "run") {
    runs.push((run = engine.run(rest)));
    return { layers: run.layers, logits: rest.logits === false ? null : run.logits, milliseconds: run.milliseconds };
  }
  if (ask === "again") return { layers: runs[rest.number].layers, logits: runs[rest.number].logits };
  if (ask === "erf") return Float64Array.from(rest.numbers, erf);
  if (ask === "halves") return Float64Array.from({ length: 65536 }, (_, bits) => half(bits));
  if (ask === "encode") return rest.texts.map((text) => engine.encode(text));
  if (ask === "decode") return rest.lists.map((tokens) => engine.decode(tokens));
  if (ask === "classes") return characterClasses();
  if (ask === "sizes") return { size: engine.size, whole: engine.whole, texts: rest.ids.map((id) => engine.text(id)) };
  if (ask === "has") return rest.pairs.map(([mask, src, dst, layer]) => engine.has(mask, src, dst, layer ?? 0));
  if (ask === "varies") return rest.masks.map((mask) => engine.varies(mask));
  if (ask === "reach") return engine.reach(rest);
  return engine[ask](run, ...rest.with);
}

for (const question of read(questionsFile)) {
  let said;
  try {
    said = { said: answer(question) ?? null };
  } catch (error) {
    said = { error: `${error.name}: ${error.message}` };
  }
  process.stdout.write(JSON.stringify(said, packed) + "\n");
}
