// Writing on, token by token: each new token is a new node, with the edges that the graph gives it.

import { shares } from "./bars";
import { bdi, button, fill, h, number, select, set, write } from "./dom";
import { attendedMost, layerNumber, type Scene, type SceneHost } from "./scene";
import { clipped, counted, named, percent, visible } from "./words";

export interface WriteHost extends SceneHost {
  write(token: number): void;
  unwrite(): void;
}

const BEAT = 900; // milliseconds
const SHOWN = 8;

export class Writer {
  readonly element: HTMLElement;
  readonly player: HTMLElement;
  private play = button("Play", () => this.toggle(), { class: "primary" });
  private back = button("Back", () => this.host.unwrite());
  private on = button("Step", () => this.next());
  private how = select("Next token", (value) => this.choose(value), "inline");
  private told = h("p", { class: "summary", role: "status" });
  private written = h("p", { class: "written-text" });
  private list = h("div", {});
  private temperature = 0;
  private timer = 0;

  constructor(private host: WriteHost) {
    const intro =
      "A new token is a new node, with edges from the tokens that the mask lets it attend to. No earlier token gets a new edge, so their keys and values can be kept (the KV cache).";
    this.player = h("div", { class: "player writing" }, this.back, this.play, this.on, this.how.element);
    this.element = h(
      "section",
      { class: "write card", "aria-labelledby": "write-title" },
      h("h2", { id: "write-title" }, "Continue the text, token by token"),
      h("p", { class: "aside" }, intro),
      this.written,
      this.told,
      this.list,
    );
  }

  update(scene: Scene): void {
    const last = scene.tokens.length - 1;
    const full = this.full(scene);
    this.how.update(
      [
        { value: "0", label: "the likeliest" },
        { value: "1", label: "drawn at random" },
      ],
      String(this.temperature),
    );
    set(this.back, "disabled", scene.state.work.written.length === 0);
    set(this.on, "disabled", full);
    set(this.play, "disabled", full);
    fill(
      this.written,
      ...scene.tokens.map((token, index) =>
        bdi(visible(token.text), index < scene.data.tokens.length ? "token-text given" : "token-text"),
      ),
    );
    this.tell(scene, last, full);
    const guesses = scene.engine.next(scene.run, last, SHOWN).map((guess) => ({
      index: null,
      text: guess.text,
      value: guess.chance,
      shown: percent(guess.chance),
      part: guess.chance,
      before: null,
      name: `chance-${guess.id}`,
      ...(full ? {} : { press: () => this.host.write(guess.id) }),
    }));
    fill(this.list, h("h3", {}, "Likely next tokens: choose one, or step"), shares("likely next tokens", guesses));
    if (full) this.stop();
  }

  stop(): void {
    window.clearInterval(this.timer);
    this.timer = 0;
    write(this.play, "Play");
  }

  private full(scene: Scene): boolean {
    const room = Math.min(scene.engine.size, scene.data.masks[scene.state.work.mask].tokens);
    return scene.tokens.length >= room;
  }

  private tell(scene: Scene, last: number, full: boolean): void {
    const senders = attendedMost(scene.layer, scene.state.head, last);
    const name = named(last, scene.tokens[last].text);
    const ended = full ? " This page has no room for more tokens." : "";
    const first = scene.state.work.written.length ? "The new node" : "The last node";
    fill(
      this.told,
      `${first} ${name} attends to `,
      number(senders.length, "heard", counted(senders.length, "token")),
      ` in layer ${layerNumber(scene.data, scene.state.layer)}: ${listed(senders)}.${ended}`,
    );
  }

  private choose(value: string): void {
    this.temperature = Number(value);
  }

  private next(): void {
    const scene = this.host.scene();
    if (!scene || this.full(scene)) return this.stop();
    this.host.write(scene.engine.pick(scene.run, scene.tokens.length - 1, this.temperature, Math.random()));
  }

  private toggle(): void {
    if (this.timer) return this.stop();
    write(this.play, "Pause");
    this.next();
    this.timer = window.setInterval(() => this.next(), BEAT);
  }
}

/** `0, 3–5`. */
function listed(tokens: number[]): string {
  const sorted = [...tokens].sort((one, other) => one - other);
  const runs: [number, number][] = [];
  for (const token of sorted) {
    const run = runs[runs.length - 1];
    if (run && run[1] === token - 1) run[1] = token;
    else runs.push([token, token]);
  }
  if (!runs.length) return "none";
  return clipped(
    runs.map(([from, to]) => (from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`)).join(", "),
    80,
  );
}
