// The page: one state, one scene made from it, and the views that show the scene.

import { Controls } from "./controls";
import { Writer } from "./decode_view";
import { Dock } from "./dock";
import { button, fill, h, set, write } from "./dom";
import { makeEngine } from "./engine";
import { Glance } from "./glance";
import { Hearers } from "./hearers";
import { undoKeys } from "./keys";
import { Panel } from "./panel";
import { Predict } from "./predict";
import { strong } from "./prose";
import { Reach } from "./reach";
import { given, Scenes, type Scene } from "./scene";
import { Stage } from "./stage";
import { fromHash, reduce, toHash, type Action, type Limits, type State } from "./state";
import { notes, summary } from "./summary";
import { EdgeTable } from "./table";
import { Themes } from "./theme";
import { Tour } from "./tour";
import type { Engine, PageData } from "./types";
import { fromAddress, typed, Typing } from "./typing";
import { WordGraph } from "./word_graph";
import { USUAL, visible } from "./words";

const SETTLE = 90; // milliseconds after the last move of a drag until the rest of the page follows
const LONG = 128; // tokens; a longer text takes its time
const SAY = 350;

class Page {
  state: State;
  readonly data: PageData;
  private engine: Engine;
  scene: Scene | null = null;
  private limits: Limits;
  private scenes: Scenes;
  private asked = 0;
  private later = 0;
  private saying = 0;
  private dragging = false;
  private mode = "";
  private ownHash = "";
  private controls: Controls;
  private stage: Stage;
  private panel: Panel;
  private predict: Predict;
  private dock: Dock;
  private glance: Glance;
  private hearers: Hearers;
  private words: WordGraph;
  private tour: Tour;
  private table = new EdgeTable((src, dst, head) => this.toggle(src, dst, head));
  private reach = new Reach({ scene: () => this.current(), reach: (change) => this.dispatch({ type: "look", change }) });
  private writer = new Writer({
    scene: () => this.current(),
    write: (token) => this.dispatch({ type: "write", token }),
    unwrite: () => this.dispatch({ type: "unwrite" }),
  });
  private notes = h("div", { class: "notes" });
  private summary = h("p", { class: "summary main-summary" });
  private live = h("p", { class: "sr-only", role: "status", "aria-live": "polite" });
  private life = new AbortController();
  private themes = new Themes(() => this.redraw(), this.life.signal);
  private typing: Typing;
  private width = new ResizeObserver(() => this.resized());
  private widthNow = 0;

  /** The page of its own text (`first`), or of tokens that were typed; `like` is the engine of the page before it. */
  constructor(
    private first: PageData,
    private root: HTMLElement,
    private text: number[] | null,
    hash: string,
    like?: Engine,
  ) {
    const known = like ?? makeEngine(first);
    const data = (this.data = text ? typed(first, known, text) : first);
    const engine = (this.engine = data === known.data ? known : makeEngine(data, known));
    this.limits = limitsOf(data);
    this.scenes = new Scenes(data, engine, this.limits);
    const host = this.host();
    this.tour = new Tour(data, { show: (work, change) => this.dispatch({ type: "show", work, change }) });
    this.state = fromHash(hash, this.limits);
    if (!hash && this.tour.opening) Object.assign(this.state, this.tour.opening);
    this.ownHash = hash && this.hash();
    this.stage = new Stage(host);
    this.controls = new Controls(this.limits, (action) => this.dispatch(action), this.stage.figure.element);
    this.panel = new Panel(host);
    this.glance = new Glance(data, this.limits, { look: (layer, head) => this.dispatch({ type: "look", change: { layer, head, allHeads: false } }) });
    this.hearers = new Hearers(host);
    this.words = new WordGraph(host);
    this.predict = new Predict({ drop: (index) => this.dispatch({ type: "drop", index }) });
    this.dock = new Dock(host, this.tour.element, this.writer.player);
    this.typing = new Typing(data, engine, { read: (tokens) => this.read(tokens) }, text === null);
    fill(root, this.header(), this.main(), footer(data));
    undoKeys((type) => this.dispatch({ type }), this.life.signal);
    this.watch();
  }

  /** Another text in the place of this one: a page of its own, of the same model. */
  private read(text: number[] | null, hash = ""): void {
    this.life.abort();
    this.width.disconnect();
    cancelAnimationFrame(this.asked);
    for (const timer of [this.later, this.saying]) window.clearTimeout(timer);
    this.reach.stop();
    this.writer.stop();
    const page = opened(this.first, this.root, text, hash, this.engine);
    page.stage.focusToken();
    window.scrollTo(0, 0);
  }

  dispatch(action: Action, dragging = false): void {
    const next = reduce(this.state, action, this.limits);
    if (next === this.state) return;
    this.state = next;
    this.dragging = dragging;
    if (!this.asked) this.asked = requestAnimationFrame(() => this.render());
  }

  /** The scene of the state as it is now. A key may come before the frame that draws what the key before it asked for. */
  private current(): Scene | null {
    return this.scene && this.scene.state !== this.state ? this.scenes.at(this.state) : this.scene;
  }

  /** Draws now what is asked for. */
  render(): void {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
    if (!this.scenesReady()) return;
    this.scene = this.scenes.at(this.state);
    window.clearTimeout(this.later);
    if (!this.dragging) return this.settle();
    this.stage.update(this.scene, true);
    this.later = window.setTimeout(() => this.settle(), this.scene.tokens.length > LONG ? 4 * SETTLE : SETTLE);
  }

  private redraw(): void {
    this.stage.redraw();
    this.glance.redraw();
  }

  /** Everything that may wait until the pointer rests. */
  private settle(): void {
    const { scene } = this;
    if (!scene) return;
    window.clearTimeout(this.later);
    this.show();
    this.controls.update(scene);
    this.fillNotes(scene);
    if (this.state.mode !== "reach") this.stage.update(scene, false);
    if (this.state.mode === "listen") for (const view of this.listening) view.update(scene);
    if (this.state.mode !== "reach") for (const view of [this.tour, this.dock]) view.update(scene);
    if (this.state.mode === "reach") this.reach.update(scene);
    if (this.state.mode === "write") this.writer.update(scene);
    this.say(scene);
    this.remember();
  }

  private get listening() {
    return [this.glance, this.hearers, this.words, this.panel, this.predict, this.table];
  }

  private scenesReady(): boolean {
    if (this.limits.tokens + this.state.work.written.length > 0) return true;
    fill(this.notes, h("p", { class: "note" }, "This text has no tokens, so there is nothing to show."));
    return false;
  }

  private show(): void {
    if (this.mode === this.state.mode) return;
    this.mode = this.state.mode;
    document.documentElement.dataset["mode"] = this.mode;
    if (this.mode !== "reach") this.reach.stop();
    if (this.mode !== "write") this.writer.stop();
  }

  private fillNotes(scene: Scene): void {
    const said = notes(scene);
    if (this.notes.textContent === said.join("")) return;
    fill(this.notes, ...said.map((text) => h("p", { class: "note", role: "note" }, text)));
  }

  private say(scene: Scene): void {
    const text = summary(scene);
    write(this.summary, text);
    window.clearTimeout(this.saying);
    if (this.state.mode === "listen") this.saying = window.setTimeout(() => write(this.live, text), SAY);
  }

  // -- what the views may do ---------------------------------------------------------------------------------------------

  private host() {
    return {
      scene: () => this.current(),
      receive: (token: number, dragging: boolean) => this.dispatch({ type: "receiver", token }, dragging),
      study: (token: number | null) => this.dispatch({ type: "sender", token }),
      toggle: (src: number, dst: number, head: number) => this.toggle(src, dst, head),
      select: (src: number, dst: number, head: number) => this.dispatch({ type: "select", src, dst, head }),
      head: (head: number) => this.dispatch({ type: "look", change: { head } }),
      words: (view: string) => this.dispatch({ type: "look", change: { view } }),
      scope: (scope: State["scope"]) => this.dispatch({ type: "look", change: { scope } }),
      reset: () => this.dispatch({ type: "reset" }),
      steps: () => this.panel.element.scrollIntoView(),
      form: (form: State["form"]) => this.dispatch({ type: "look", change: { form } }),
      step: (step: number) => this.dispatch({ type: "step", step }),
      released: () => this.release(),
    };
  }

  private release(): void {
    this.dragging = false;
    this.render();
    this.stage.focusToken();
  }

  /** Cuts the edge if it is there in this layer and head, else adds it, as far as the chosen scope goes. */
  private toggle(src: number, dst: number, head: number): void {
    const scene = this.current();
    if (!scene) return;
    const present = scene.layer.edges[(head * scene.layer.tokens + dst) * scene.layer.tokens + src] === 0;
    this.dispatch({ type: "edge", src, dst, head, present, given: given(scene, src, dst) });
  }

  // -- around ------------------------------------------------------------------------------------------------------------

  private header(): HTMLElement {
    const tools = h("div", { class: "tools" }, this.typing.opener, this.controls.undo, this.controls.redo, this.themes.element);
    const title = h("h1", {}, visible(this.data.title).replaceAll("␣", " "));
    const seen = this.engine.whole ? "what the model predicts instead" : "which tokens the receiver attends to instead";
    const lead = h(
      "p",
      { class: "lead" },
      ...["An attention ", strong("mask"), " is a graph: each filled cell is an edge", wide(", drawn as an arc"), ". "],
      ...[strong("Message passing"), " moves information along the edges", h("span", { class: "narrow" }, ", and the "), wide(" from senders to receivers, and the ")],
      ...[strong("softmax"), h("span", { class: "narrow" }, " sets their weights."), wide(` turns the scores of a receiver’s edges into weights. Cut an edge to see ${seen}.`)],
    );
    return h("header", {}, h("div", { class: "top" }, title, tools), lead);
  }

  private main(): HTMLElement {
    const listen = h(
      "div",
      { class: "listen-only" },
      this.summary,
      h("div", { class: "columns" }, this.glance.element, this.hearers.element),
      this.words.element,
      h("div", { class: "columns" }, this.panel.element, this.predict.element),
      this.table.element,
    );
    return h(
      "main",
      {},
      this.typing.element,
      this.typing.hint,
      this.controls.element,
      this.notes,
      this.stage.element,
      this.dock.element,
      listen,
      this.reach.element,
      this.writer.element,
      this.live,
    );
  }

  private watch(): void {
    this.width.observe(document.body);
    const { signal } = this.life;
    window.addEventListener("hashchange", () => this.goTo(readHash()), { signal });
  }

  private resized(): void {
    const now = this.stage.element.clientWidth || this.reach.element.clientWidth;
    if (now === this.widthNow || !this.scene) return;
    this.widthNow = now;
    if (this.state.mode === "reach") this.reach.update(this.scene);
    else this.stage.update(this.scene, false);
  }

  private goTo(hash: string): void {
    if (hash.slice(1) === this.ownHash) return;
    const text = fromAddress(hash, this.first);
    if (text?.join() !== this.text?.join()) return this.read(text, hash);
    this.state = fromHash(hash, this.limits);
    this.render();
  }

  /** The state and the typed text, as an address tells of them. */
  private hash(): string {
    return toHash(this.state) + (this.text ? `&text=${this.text.join(".")}` : "");
  }

  /** The state goes into the address, where the page is allowed to: not in every frame of a notebook. */
  private remember(): void {
    const hash = this.hash();
    if (hash === this.ownHash) return;
    this.ownHash = hash;
    try {
      history.replaceState(null, "", `#${hash}`);
    } catch {
      // without an address of its own the page works the same
    }
  }
}

/** Words for which a phone has no room. */
function wide(words: string): HTMLElement {
  return h("span", { class: "wide" }, words);
}

function readHash(): string {
  try {
    return location.hash;
  } catch {
    return "";
  }
}

function limitsOf(data: PageData): Limits {
  const { model } = data;
  const whole = model.kind === "model";
  return {
    tokens: data.tokens.length,
    room: data.room,
    layers: whole ? model.layers : model.layers.length,
    heads: whole ? model.heads : (model.layers[0]?.q.shape[0] ?? 1),
    masks: data.masks.length,
    start: data.start,
    vocabulary: whole ? model.vocabulary.length : 0,
    views: [USUAL, ...data.views],
  };
}

function footer(data: PageData): HTMLElement {
  const keys = [
    ["← →", "select another receiver"],
    ["Shift + ← →", "select another sender"],
    ["x", "cut or add the edge between them"],
    ["in the mask: arrow keys, Enter", "move to a cell; cut or add its edge"],
    ["Tab, then ← →", "move along the senders; x cuts or adds the edge of the selected one"],
    ["Ctrl + Z, Ctrl + Shift + Z", "undo, redo"],
  ];
  const list = h("dl", { class: "keys" }, ...keys.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
  const help = h("details", {}, h("summary", {}, "Keyboard shortcuts while a token has the focus"), list);
  const trained = data.model.kind === "model" && data.model.trained ? ", a small transformer that was trained on Python source code" : "";
  const about = `Model: ${visible(data.model.name).replaceAll("␣", " ")}${trained}. Everything is computed on this page, and nothing leaves it.`;
  return h("footer", {}, help, h("p", { class: "aside" }, about));
}

function opened(first: PageData, root: HTMLElement, text: number[] | null, hash: string, like?: Engine): Page {
  const page = new Page(first, root, text, hash, like);
  set(document.documentElement, "data-mode", page.state.mode);
  Object.assign(window, { explorer: page });
  // One picture of the page first: a long text takes a moment to compute.
  if (!text && first.tokens.length > LONG) requestAnimationFrame(() => setTimeout(() => page.render()));
  else page.render();
  return page;
}

function start(): void {
  const root = document.getElementById("root") as HTMLElement;
  try {
    const text = document.getElementById("data")?.textContent ?? "";
    // as it is built, before Python puts the data of a text into it
    if (text.startsWith("__")) throw new Error("it is only a template. The command gnn-attention explore writes a page of a text.");
    const data = JSON.parse(text) as PageData;
    opened(data, root, fromAddress(readHash(), data), readHash());
  } catch (error) {
    fill(
      root,
      h(
        "p",
        { class: "note", role: "alert" },
        `This page could not be started: ${error instanceof Error ? error.message : String(error)}`,
      ),
      button("Reload without the state in the address", () => location.replace(location.pathname)),
    );
    throw error;
  }
}

start();
