// Elements of the page. Text is only ever set as textContent: whatever a token holds, it stays text.

type Child = Node | string | null;
type Attributes = Record<string, string | number | boolean | null>;

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes (null and false leave one out) and children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return filled(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.filter((child): child is Node | string => child !== null));
  return element;
}

/** Sets an attribute if it changes; null and false remove it, true is the empty attribute. */
export function set(element: Element, name: string, value: string | number | boolean | null): void {
  if (value === null || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Sets the text if it changes. */
export function write(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** The children become these. */
export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren(...children.filter((child): child is Node | string => child !== null));
}

/** Text between `<bdi>`, so that no direction mark in it turns what stands around. */
export function bdi(text: string, className = "token-text"): HTMLElement {
  return h("bdi", { class: className }, text);
}

/** A number's element: rounded to read, in full for whoever checks (`data-value`). */
export function number(value: number, name: string, text: string): HTMLElement {
  return h("data", { class: "number", value: value, "data-name": name }, text);
}

let serial = 0;

/** An id that no other element has. */
export function freshId(stem: string): string {
  serial += 1;
  return `${stem}-${serial}`;
}

export interface Choice {
  value: string;
  label: string;
  colour?: string;
  title?: string;
}

export interface Chooser {
  readonly element: HTMLElement;
  update(choices: Choice[], chosen: string): void;
}

/** A row of native radio buttons under a legend. */
export function radios(legend: string, choose: (value: string) => void, className = ""): Chooser {
  const group = freshId("radios");
  const row = h("div", { class: "segments" });
  const element = h("fieldset", { class: `field ${className}` }, h("legend", {}, legend), row);
  let shown = "";
  row.addEventListener("change", (event) => choose((event.target as HTMLInputElement).value));
  return {
    element,
    update(choices, chosen) {
      const key = JSON.stringify(choices);
      if (key !== shown) fill(row, ...choices.map((choice) => radio(group, choice)));
      shown = key;
      for (const input of row.querySelectorAll("input")) input.checked = input.value === chosen;
    },
  };
}

function radio(group: string, choice: Choice): HTMLElement {
  const input = h("input", { type: "radio", name: group, value: choice.value, title: choice.title ?? null });
  const label = h("span", { class: "segment" }, choice.label);
  if (choice.colour) label.style.setProperty("--swatch", choice.colour);
  if (choice.colour) label.classList.add("with-swatch");
  return h("label", {}, input, label);
}

/** A native list to choose from, under a label. */
export function select(label: string, choose: (value: string) => void, className = ""): Chooser {
  const id = freshId("select");
  const list = h("select", { id });
  const element = h("div", { class: `field ${className}` }, h("label", { for: id }, label), list);
  let shown = "";
  let last: Choice[] | null = null;
  list.addEventListener("change", () => choose(list.value));
  return {
    element,
    update(choices, chosen) {
      const key = choices === last ? shown : JSON.stringify(choices);
      if (key !== shown) fill(list, ...choices.map((choice) => h("option", { value: choice.value }, choice.label)));
      [shown, last] = [key, choices];
      list.value = chosen;
    },
  };
}

/** A button; `label` is read aloud where its text is only a sign. */
export function button(text: string, press: () => void, attributes: Attributes = {}): HTMLButtonElement {
  const element = h("button", { type: "button", ...attributes }, text);
  element.addEventListener("click", press);
  return element;
}
