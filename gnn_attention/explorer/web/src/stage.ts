// The figure: tokens on a line, arcs above, their streams below down to the token that each predicts, and the mask beside.

import { arcAt, arcOf, arcsBehind, arcsInto, portsOf, type Arc } from "./arcs";
import { bdi, fill, h, radios, set, write } from "./dom";
import { lay, nearest, MOST_WORDS, TURNED_SLOT, type Layout } from "./layout";
import { MaskView, type Cell } from "./mask";
import { CanvasPainter, headColour, SvgPainter, type Painter, type Picture } from "./paint";
import { messageLength, rowOf, type Scene, type SceneHost } from "./scene";
import { Streams } from "./streams";
import { clipped, named, rounded, visible } from "./words";

export interface StageHost extends SceneHost {
  receive(token: number, dragging: boolean): void;
  study(src: number | null): void;
  select(src: number, dst: number, head: number): void;
  toggle(src: number, dst: number, head: number): void;
  released(): void;
}

const LINE = 14; // from the line of the tokens to the end of the picture
const LONGEST = 18;
const MASK_SIDE = { wide: 240, narrow: 192 }; // pixels
const MASK_COLUMN = 334; // with the gap before it, as in style.css
const STACKED = 836; // a narrower figure shows arcs or mask
const NARROW = 560; // of the figure
const IDLE = "Arcs lead from senders to the receiver. Colour: head. Width: weight. Click an arc to select it, click again to cut it.";

export class Stage {
  readonly element: HTMLElement;
  private picture = h("div", { class: "picture" });
  private portRow = h("div", {
    class: "port-row",
    role: "toolbar",
    "aria-label": "Edges into the selected token: press one to select it, x to cut or add it",
  });
  private tokenRow = h("div", { class: "token-row", role: "radiogroup", "aria-label": "Receiver: the token that attends to others" });
  private ruler = h("div", { class: "ruler" });
  private readout = h("p", { class: "readout" });
  private names = h("div", { class: "row-names", "aria-hidden": "true" });
  private streams = new Streams();
  private mask: MaskView;
  readonly figure = radios("Figure", (value) => this.turn(value), "figure-choice");
  private behind: CanvasPainter;
  private front: { svg: SvgPainter; canvas: CanvasPainter };
  private layout: Layout = lay([], 800);
  private scene: Scene | null = null;
  private arcs: Arc[] = [];
  private hovered: { src: number; dst: number; head: number | null } | null = null;
  private dragging = false;
  private shades: string[] = [];
  private shown = { texts: "", behind: "", theme: "" };
  private measurer = document.createElement("canvas").getContext("2d");

  constructor(private host: StageHost) {
    const probe = h("span", { class: "probe", "aria-hidden": "true" });
    this.behind = new CanvasPainter(probe, "behind");
    this.front = { svg: new SvgPainter(), canvas: new CanvasPainter(probe, "front") };
    this.picture.append(this.behind.element, this.front.svg.element, this.front.canvas.element, this.portRow, probe);
    this.mask = new MaskView(host, (cell) => this.hover(cell && { ...cell, head: null }));
    const body = h("div", { class: "stage-body" }, this.readout, this.picture, this.ruler, this.tokenRow, this.streams.element, this.names);
    this.element = h("figure", { class: "stage", "aria-label": "Who attends to whom" }, body, this.mask.element);
    this.turn("arcs");
    this.listen();
  }

  /** Draws a scene; `quickly` leaves out what only screen readers and the streams need, while the pointer is being dragged. */
  update(scene: Scene, quickly: boolean): void {
    this.scene = scene;
    this.place(scene);
    this.select(scene);
    this.paint(scene);
    const narrow = this.element.clientWidth < NARROW;
    this.mask.update(scene, narrow ? MASK_SIDE.narrow : MASK_SIDE.wide, quickly);
    if (quickly) return;
    this.label(scene);
    this.streams.update(scene, this.layout);
    this.name(scene);
    this.tell();
    if (this.layout.kind === "ticks") this.reveal(scene.state.token);
  }

  /** After the page changed its width or its theme. */
  redraw(): void {
    this.behind.forget();
    this.front.canvas.forget();
    this.mask.redraw();
    this.shown = { texts: "", behind: "", theme: "" };
    if (this.scene) this.update(this.scene, false);
  }

  /** Arcs or mask, where there is no room for both. */
  private turn(view: string): void {
    this.figure.update(["arcs", "mask"].map((value) => ({ value, label: value })), view);
    this.element.dataset["view"] = view;
    this.redraw();
  }

  /** The names of the rows, at the left of each. */
  private name(scene: Scene): void {
    const { gutter, height, kind } = this.layout;
    const top = this.picture.offsetTop;
    const rows: [string, number, string][] = [["weights", top + height, "The larger the dot, the more the receiver attends to the token, averaged over the heads that are drawn."]];
    if (kind === "words") rows.push(["tokens", this.tokenRow.offsetTop + 22, "Each token is a node of the graph."]);
    if (gutter) rows.push(...this.streams.names(scene).map(([name, y, title]): [string, number, string] => [name, this.streams.element.offsetTop + y, title]));
    set(this.names, "hidden", !gutter);
    const spans = rows.map(([name, y, title]) => {
      const span = h("span", { title }, name);
      span.style.top = `${y.toFixed(1)}px`;
      return span;
    });
    fill(this.names, ...spans);
  }

  focusToken(): void {
    if (this.scene) this.tokenButton(this.scene.state.token)?.focus({ preventScroll: true });
  }

  // -- tokens -----------------------------------------------------------------------------------------------------------

  private place(scene: Scene): void {
    const texts = scene.tokens.map((token) => clipped(visible(token.text), LONGEST));
    this.arrange(texts.length);
    const available = Math.max(280, this.picture.clientWidth || this.element.clientWidth || 800);
    const key = JSON.stringify([available, scene.data.tokens.length, texts]);
    if (key === this.shown.texts) return;
    this.shown.texts = key;
    this.shades = [];
    if (this.measurer) this.measurer.font = `16px ${getComputedStyle(this.element).fontFamily}`;
    this.layout = lay(
      texts.map((text) => this.measured(text)),
      available,
    );
    this.element.dataset["kind"] = this.layout.kind;
    this.picture.style.height = `${this.layout.height + LINE}px`;
    this.tokenRow.replaceChildren(...texts.map((text, index) => this.token(text, index, scene)));
    this.portRow.replaceChildren(...(this.layout.kind === "ticks" ? [] : texts.map((_, index) => this.port(index))));
    set(this.portRow, "hidden", this.layout.kind === "ticks");
    this.fitTurned(texts);
  }

  /** The mask stands beside the arcs, or takes turns with them where there is no room for both. */
  private arrange(count: number): void {
    const width = this.element.clientWidth;
    if (!width) return;
    const room = (width - MASK_COLUMN) / Math.max(1, count);
    const tight = count <= MOST_WORDS && room < TURNED_SLOT && width / count >= TURNED_SLOT;
    document.documentElement.dataset["figure"] = width < STACKED || tight ? "stacked" : "beside";
  }

  private measured(text: string): number {
    if (!this.measurer) return text.length * 8;
    return this.measurer.measureText(text).width;
  }

  private token(text: string, index: number, scene: Scene): HTMLButtonElement {
    const full = scene.tokens[index].text;
    const name = { "aria-label": named(index, full), "aria-checked": "false", title: visible(full) };
    const className = index < scene.data.tokens.length ? "token" : "token written";
    const element = h("button", { type: "button", role: "radio", class: className, tabindex: -1, ...name }, bdi(text));
    element.dataset["token"] = String(index);
    if (this.layout.kind !== "ticks") element.style.left = `${this.layout.x[index]}px`;
    if (this.layout.kind === "words") element.style.minWidth = `${Math.min(44, this.layout.slot - 2)}px`;
    if (this.layout.kind === "turned") element.style.width = `${this.layout.slot}px`;
    return element;
  }

  private fitTurned(texts: string[]): void {
    const longest = Math.max(24, ...texts.map((text) => this.measured(text)));
    this.tokenRow.style.height = this.layout.kind === "words" ? "44px" : this.layout.kind === "turned" ? `${longest + 18}px` : "";
  }

  private port(index: number): HTMLButtonElement {
    const size = Math.max(12, Math.min(30, this.layout.slot));
    const element = h("button", { type: "button", class: "port-button", tabindex: -1 });
    element.dataset["src"] = String(index);
    Object.assign(element.style, { left: `${this.layout.x[index]}px`, width: `${size}px`, height: `${size}px` });
    return element;
  }

  private tokenButton(index: number): HTMLButtonElement | null {
    return (this.tokenRow.children[index] as HTMLButtonElement | undefined) ?? null;
  }

  private select(scene: Scene): void {
    const old = this.tokenRow.querySelector('[aria-checked="true"]');
    const now = this.tokenButton(scene.state.token);
    if (old !== now) {
      if (old) Object.assign(old, { ariaChecked: "false", tabIndex: -1 });
      if (now) Object.assign(now, { ariaChecked: "true", tabIndex: 0 });
    }
    this.tokenRow.querySelector(".studied")?.classList.remove("studied");
    this.tokenButton(scene.sender)?.classList.add("studied");
    if (this.layout.kind === "ticks") this.shade(scene);
  }

  /** Where tokens are ticks, the text below shows by its shade how much the receiver attends to each. */
  private shade(scene: Scene): void {
    const ports = portsOf(scene);
    const most = Math.max(1e-9, ...ports.map((port) => port.weight));
    ports.forEach((port, src) => {
      const share = port.edge ? Math.sqrt(port.weight / most) : 0;
      const text = share.toFixed(2);
      if (text === this.shades[src]) return;
      this.shades[src] = text;
      this.tokenButton(src)?.style.setProperty("--heard", text);
    });
  }

  /** Scrolls the box of the tokens, and nothing else, to the chosen one. */
  private reveal(token: number): void {
    const button = this.tokenButton(token);
    if (!button) return;
    const [top, room] = [button.offsetTop, this.tokenRow.clientHeight];
    const seen = top >= this.tokenRow.scrollTop && top + button.offsetHeight <= this.tokenRow.scrollTop + room;
    if (!seen) this.tokenRow.scrollTop = top - room / 2;
  }

  private label(scene: Scene): void {
    const row = rowOf(scene.layer, scene.state.head, scene.state.token);
    for (const button of this.portRow.children) this.labelPort(button, scene, row);
    const focused = this.portRow.querySelector('[tabindex="0"]');
    if (!focused && this.portRow.firstElementChild)
      set(this.portRow.children[scene.sender] ?? this.portRow.firstElementChild, "tabindex", 0);
  }

  private labelPort(button: Element, scene: Scene, row: ReturnType<typeof rowOf>): void {
    const src = Number((button as HTMLElement).dataset["src"]);
    const edge = row.edges[src] === 1;
    const pair = `${named(src, scene.tokens[src].text)} to ${named(scene.state.token, scene.tokens[scene.state.token].text)}`;
    set(button, "aria-pressed", src === scene.sender ? "true" : "false");
    set(button, "aria-label", edge ? `edge from ${pair}, weight ${rounded(row.weights[src])}` : `no edge from ${pair}`);
  }

  // -- arcs -------------------------------------------------------------------------------------------------------------

  private get base(): number {
    return this.layout.height;
  }

  private paint(scene: Scene): void {
    const many = scene.tokens.length > MOST_WORDS;
    const { hovered } = this;
    const other = hovered !== null && hovered.dst !== scene.state.token;
    this.arcs = arcsInto(scene, this.layout, hovered && !other ? hovered.src : null);
    const extra = other && Math.max(hovered.src, hovered.dst) < scene.tokens.length ? [arcOf(scene, this.layout, hovered)] : [];
    const front: Painter = many ? this.front.canvas : this.front.svg;
    this.front.svg.element.classList.toggle("gone", many);
    this.front.canvas.element.classList.toggle("gone", !many);
    this.element.classList.toggle("looking", this.hovered !== null);
    front.paint(this.pictureOf(scene, [...this.arcs, ...extra], portsOf(scene)));
    this.paintBehind(scene, many);
  }

  private paintBehind(scene: Scene, many: boolean): void {
    const { state } = scene;
    const key = JSON.stringify([state.work, state.layer, state.allHeads || state.head, this.shown.texts, this.shown.theme]);
    if (key === this.shown.behind) return;
    this.shown.behind = key;
    const least = many ? 0.05 : 0.1;
    const picture = this.pictureOf(scene, arcsBehind(scene, this.layout, least), []);
    this.behind.paintBehind(state.allHeads ? { ...picture, colourOf: () => "var(--ink)" } : picture);
  }

  private pictureOf(scene: Scene, arcs: Arc[], ports: Picture["ports"]): Picture {
    const looked = this.hovered;
    const selected = arcs.find((arc) => arc.src === scene.sender && arc.head === scene.state.head && arc.dst === scene.state.token);
    const common = { layout: this.layout, base: this.base, receiver: scene.state.token, colourOf: headColour };
    return { ...common, arcs, ports, looked, selected: ports.length ? (selected ?? null) : null, sender: scene.sender };
  }

  private hover(next: (Cell & { head: number | null }) | null): void {
    const { hovered } = this;
    if (next?.src === hovered?.src && next?.dst === hovered?.dst && next?.head === hovered?.head) return;
    this.hovered = next;
    if (!this.scene) return;
    this.mask.light(next);
    this.paint(this.scene);
    this.tell();
  }

  /** The numbers of the edge under the pointer or the focus. */
  private tell(): void {
    const scene = this.scene;
    if (!scene || this.hovered === null || this.hovered.src >= scene.tokens.length)
      return write(this.readout, IDLE);
    const { src, dst } = this.hovered;
    if (dst >= scene.tokens.length) return write(this.readout, IDLE);
    const head = this.hovered.head ?? scene.state.head;
    const row = rowOf(scene.layer, head, dst);
    const pair = `${named(src, scene.tokens[src].text)} → ${named(dst, scene.tokens[dst].text)}, head ${head}: `;
    const logit = `logit ${rounded(row.logits[src])}`;
    if (!row.edges[src]) return write(this.readout, `${pair}no edge, so it carries nothing (${logit})`);
    const length = messageLength(scene, scene.run, head, src);
    const weight = row.weights[src];
    write(
      this.readout,
      `${pair}${logit}, weight ${rounded(weight)}, message of length ${rounded(length)}, carries ${rounded(weight * length)}`,
    );
  }

  // -- pointer and keys -------------------------------------------------------------------------------------------------

  private listen(): void {
    for (const track of [this.tokenRow, this.ruler]) this.track(track);
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.hover(null));
    this.picture.addEventListener("click", (event) => this.press(event));
    this.portRow.addEventListener("focusin", (event) => this.hover(this.sourceOf(event.target)));
    this.portRow.addEventListener("focusout", () => this.hover(null));
    this.portRow.addEventListener("keydown", (event) => this.walkPorts(event));
    this.tokenRow.addEventListener("keydown", (event) => this.walkTokens(event));
  }

  private track(element: HTMLElement): void {
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.dragging = true;
      element.setPointerCapture(event.pointerId);
      this.drag(event);
    });
    element.addEventListener("pointermove", (event) => this.dragging && this.drag(event));
    const end = () => {
      if (!this.dragging) return;
      this.dragging = false;
      this.host.released();
    };
    element.addEventListener("pointerup", end);
    element.addEventListener("pointercancel", end);
    element.addEventListener("click", (event) => event.detail === 0 && this.pressToken(event.target)); // by a screen reader
  }

  private drag(event: PointerEvent): void {
    const token = this.tokenAt(event);
    if (token !== null) this.host.receive(token, true);
  }

  private tokenAt(event: PointerEvent): number | null {
    if (!this.scene?.tokens.length) return null;
    if (this.layout.kind !== "ticks" || event.currentTarget === this.ruler) {
      return nearest(this.layout, event.clientX - this.picture.getBoundingClientRect().left);
    }
    const under = document.elementFromPoint(event.clientX, event.clientY)?.closest<HTMLElement>("[data-token]");
    return under ? Number(under.dataset["token"]) : null;
  }

  private pressToken(target: EventTarget | null): void {
    const token = (target as Element | null)?.closest<HTMLElement>("[data-token]");
    if (token) this.host.receive(Number(token.dataset["token"]), false);
  }

  private point(event: PointerEvent): void {
    this.hover(this.sourceOf(event.target) ?? this.arcUnder(event));
    this.picture.classList.toggle("pointing", this.hovered !== null);
  }

  private arcUnder(event: MouseEvent): Arc | null {
    const place = this.picture.getBoundingClientRect();
    return arcAt(this.arcs, event.clientX - place.left, event.clientY - place.top, this.base);
  }

  /** The edge of a port. */
  private sourceOf(target: EventTarget | null): (Cell & { head: null }) | null {
    const port = (target as Element | null)?.closest?.<HTMLElement>("[data-src]");
    return port && this.scene ? { src: Number(port.dataset["src"]), dst: this.scene.state.token, head: null } : null;
  }

  private press(event: MouseEvent): void {
    const scene = this.scene;
    const port = this.sourceOf(event.target);
    const found = port ?? this.arcUnder(event);
    if (!scene || !found) return;
    const { sender, token, head } = scene.state;
    if (!port && sender === found.src && head === found.head) return this.host.toggle(found.src, token, head);
    this.host.select(found.src, token, found.head ?? head);
  }

  private walkPorts(event: KeyboardEvent): void {
    const at = Array.from(this.portRow.children).indexOf(document.activeElement as Element);
    const scene = this.host.scene();
    if (isCut(event) && scene && at >= 0) return this.host.toggle(at, scene.state.token, scene.state.head);
    const next = step(event, at, this.portRow.childElementCount);
    if (next === null || at < 0) return;
    event.preventDefault();
    set(this.portRow.children[at], "tabindex", -1);
    set(this.portRow.children[next], "tabindex", 0);
    (this.portRow.children[next] as HTMLElement).focus();
    this.host.study(next);
  }

  private walkTokens(event: KeyboardEvent): void {
    const scene = this.host.scene();
    if (!scene) return;
    if (isCut(event)) return this.host.toggle(scene.sender, scene.state.token, scene.state.head);
    const from = event.shiftKey ? scene.sender : scene.state.token;
    const next = step(event, from, scene.tokens.length);
    if (next === null) return;
    event.preventDefault();
    if (event.shiftKey) return this.host.study(next);
    this.host.receive(next, false);
    this.tokenButton(next)?.focus();
  }
}

function isCut(event: KeyboardEvent): boolean {
  return !event.ctrlKey && !event.metaKey && !event.altKey && ["x", "X", "Delete", "Backspace"].includes(event.key);
}

/** Where an arrow key leads; null for another key. */
function step(event: KeyboardEvent, from: number, count: number): number | null {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const moves: Record<string, number> = {
    ArrowLeft: from - 1,
    ArrowUp: from - 1,
    ArrowRight: from + 1,
    ArrowDown: from + 1,
    Home: 0,
    End: count - 1,
  };
  const to = moves[event.key];
  return to === undefined ? null : Math.max(0, Math.min(count - 1, to));
}
