// A text of one's own: cut into tokens while it is typed, then read by the model in place of the page's.

import { bdi, button, fill, freshId, h, set, write } from "./dom";
import type { Engine, PageData } from "./types";
import { strong } from "./prose";
import { clipped, counted, visible } from "./words";

export interface TypingHost {
  /** Reads these tokens; null is the page's own text. */
  read(tokens: number[] | null): void;
}

const ROOM = 16; // tokens that may be written after the longest text
const TITLE = 80;
const PIECES = 2; // tokens for each word: more of them, and the text is not of the kind that the model has read
const EXAMPLES = [
  "if x is not None:\n    x = str(x)\nif y is not",
  "def __init__(self, name):\n        self.name =",
  "for key in keys:\n    print(key)\nfor key in",
];

/** The most tokens that a typed text may have; 0 where nothing can be typed. */
export function longest(data: PageData): number {
  return data.typed ? data.typed.size - ROOM : 0;
}

/** The page of other tokens, over the graphs that fit them. */
export function typed(data: PageData, engine: Engine, tokens: number[]): PageData {
  const { size, start, masks } = data.typed as NonNullable<PageData["typed"]>;
  const lines = engine.decode(tokens).split("\n").map((one) => one.split(/\s+/).filter(Boolean).join(" "));
  const line = lines.filter(Boolean).join(" ⏎ ");
  return {
    ...data,
    title: line ? clipped(line, TITLE) : data.model.name,
    tokens: tokens.map((id) => ({ id, text: engine.text(id) })),
    ...{ room: size - tokens.length, masks, start },
  };
}

/** The typed tokens that an address tells of. */
export function fromAddress(hash: string, data: PageData): number[] | null {
  const text = new URLSearchParams(hash.replace(/^#/, "")).get("text");
  if (!text || data.model.kind !== "model" || !/^\d{1,6}(\.\d{1,6})*$/.test(text)) return null;
  const [tokens, known] = [text.split(".").map(Number), data.model.vocabulary.length];
  return tokens.length <= longest(data) && tokens.every((token) => token < known) ? tokens : null;
}

/** A button for each text that the model continues well, named by its last line. */
function offered(take: (text: string) => void): HTMLElement[] {
  return EXAMPLES.map((text) => button(`${text.slice(text.lastIndexOf("\n") + 1).trim()} …`, () => take(text), { class: "small", title: text }));
}

export class Typing {
  readonly opener = button("", () => this.turn(), { class: "type-opener", "aria-label": "Type your own text" });
  readonly element = h("section", { class: "typing", "aria-label": "Your own text", hidden: true });
  readonly hint = h("div", { class: "hint" });
  private text: HTMLTextAreaElement;
  private told = h("p", { class: "typing-told", role: "status" });
  private pieces = h("p", { class: "typing-pieces", "aria-hidden": "true" });
  private go = button("Read it", () => this.read(), { class: "primary" });
  private tokens: number[] = [];

  constructor(
    private data: PageData,
    private engine: Engine,
    private host: TypingHost,
    own: boolean,
  ) {
    const id = freshId("typing");
    this.text = h("textarea", { id, rows: 3, spellcheck: "false", autocapitalize: "off", maxlength: 4000 });
    const label = h("label", { for: id }, "Your own text");
    const back = button("Back to the first text", () => this.host.read(null));
    set(back, "hidden", own);
    const knows = h("p", {}, strong("This small model knows Python, not English."), " It was trained on Python source code.");
    const limits =
      `Its vocabulary has ${this.known()} pieces of text. Characters without a piece are read byte by byte, one token ` +
      `for each byte. The text may have at most ${counted(longest(data), "token")}. Nothing leaves this page.`;
    const examples = offered((text) => this.take(text));
    const others = h("div", { class: "typing-row" }, h("span", { class: "aside" }, "Texts that work:"), ...examples);
    const row = h("div", { class: "typing-row" }, this.go, back, button("Cancel", () => this.turn()), this.told);
    this.element.append(knows, label, this.text, others, this.pieces, row, h("p", { class: "aside" }, limits));
    const sign = h("span", { class: "narrow", "aria-hidden": "true" }, "✎");
    fill(this.opener, sign, h("span", { class: "wide" }, "Type your own text"));
    set(this.opener, "hidden", longest(data) === 0);
    set(this.opener, "aria-expanded", "false");
    this.warn();
    this.text.addEventListener("input", () => this.cut());
    this.text.addEventListener("keydown", (event) => this.key(event));
  }

  /** Says of an English text what the model knows, and offers texts that it can continue. */
  private warn(): void {
    const { model, tokens } = this.data;
    const words = tokens.map((token) => token.text).join("").split(/\s+/).filter(Boolean);
    const prose = words.length > 2 && tokens.length > PIECES * words.length && !/[=(:[{]/.test(words.join(""));
    set(this.hint, "hidden", !(model.kind === "model" && model.trained && prose && longest(this.data)));
    const examples = offered((text) => this.host.read(this.engine.encode(text)));
    const why = ` It reads these ${words.length} words as ${tokens.length} pieces. Texts that work:`;
    fill(this.hint, h("span", {}, strong("This small model knows Python, not English."), why), ...examples);
  }

  private known(): string {
    return this.data.model.kind === "model" ? this.data.model.vocabulary.length.toLocaleString("en") : "0";
  }

  private turn(): void {
    const open = this.element.hidden;
    set(this.element, "hidden", !open);
    set(this.opener, "aria-expanded", String(open));
    if (!open) return this.opener.focus();
    if (!this.text.value) this.text.value = this.engine.decode(this.data.tokens.map((token) => token.id));
    this.cut();
    this.text.focus();
    this.text.select();
  }

  private take(text: string): void {
    this.text.value = text;
    this.cut();
  }

  private key(event: KeyboardEvent): void {
    if (event.key === "Escape") this.turn();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.read();
  }

  /** Shows the pieces of what is typed so far, or why it cannot be read. */
  private cut(): void {
    const most = longest(this.data);
    let wrong = "";
    try {
      this.tokens = this.engine.encode(this.text.value);
    } catch (error) {
      [this.tokens, wrong] = [[], (error as Error).message];
    }
    const count = this.tokens.length;
    if (count > most) wrong = `${count} tokens, ${count - most} too many`;
    set(this.go, "disabled", count === 0 || wrong !== "");
    write(this.told, wrong || `${counted(count, "token")} of at most ${most}`);
    this.told.classList.toggle("wrong", wrong !== "");
    fill(this.pieces, ...this.tokens.slice(0, most).map((token) => bdi(clipped(visible(this.engine.text(token)), 18))));
  }

  private read(): void {
    if (!this.go.disabled) this.host.read(this.tokens);
  }
}
