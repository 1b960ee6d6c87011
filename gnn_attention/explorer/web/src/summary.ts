// One sentence that says what is seen, and the notes that a reader must not miss.

import { attendedMost, layerNumber, looksAhead, rowOf, type Scene } from "./scene";
import { clipped, counted, named, percent, rounded, visible } from "./words";

/** The sentence under the figure, read aloud after every change. */
export function summary(scene: Scene): string {
  const { state, layer, tokens } = scene;
  const senders = attendedMost(layer, state.head, state.token);
  const { weights } = rowOf(layer, state.head, state.token);
  const who = `token ${named(state.token, tokens[state.token].text)}`;
  const where = `In layer ${layerNumber(scene.data, state.layer)}, head ${state.head}, `;
  if (!senders.length) return `${where}${who} attends to no token: its update from this head is exactly 0.${expected(scene)}`;
  const [first, second] = senders;
  const then = second === undefined ? "" : `, then to ${named(second, tokens[second].text)} (${rounded(weights[second])})`;
  const attends = `${where}${who} attends most to ${named(first, tokens[first].text)} (${rounded(weights[first])})${then}`;
  return `${attends}, out of ${counted(senders.length, "edge")}.${expected(scene)}`;
}

function expected(scene: Scene): string {
  if (!scene.engine.whole) return "";
  const [now] = scene.engine.next(scene.run, scene.state.token, 1);
  const [before] = scene.engine.next(scene.base, scene.state.token, 1);
  const text = `\u2068‘${clipped(visible(now.text), 24)}’\u2069`;
  if (!scene.edited) return ` The model predicts ${text} next (${percent(now.chance)}).`;
  const old =
    now.id === before.id
      ? `${percent(before.chance)} before`
      : `before: \u2068‘${clipped(visible(before.text), 24)}’\u2069, ${percent(before.chance)}`;
  return ` The model now predicts ${text} next (${percent(now.chance)}; ${old}).`;
}

/** What must be said aloud of this graph and this model. */
export function notes(scene: Scene): string[] {
  const said: string[] = [];
  if (!scene.engine.whole)
    said.push(
      "This page shows a recording of one run of a larger model. A cut or added edge changes the weights and the update of its own layer, while later layers stay as recorded, so the page makes no predictions.",
    );
  if (scene.engine.whole && looksAhead(scene))
    said.push(
      "In this graph some tokens attend to later ones. The model was trained to attend only to earlier tokens, so it now sees the tokens that it should predict.",
    );
  return said;
}
