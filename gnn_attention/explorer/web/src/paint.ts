// Two painters of arcs, SVG and canvas, and the colours of the heads.

import { fill, svg } from "./dom";
import { pathOf, type Arc } from "./arcs";
import { MOST_WORDS, type Layout } from "./layout";

/** Everything that is drawn for one receiver. */
export interface Picture {
  layout: Layout;
  base: number; // the height of the line of the tokens in the picture
  arcs: Arc[];
  ports: { weight: number; edge: boolean }[];
  receiver: number;
  looked: { src: number; dst: number; head: number | null } | null;
  selected: Arc | null;
  sender: number; // of the selected edge
  colourOf: (head: number) => string;
}

export interface Painter {
  readonly element: Element;
  paint(picture: Picture): void;
}

const NAMED = 8;
const HALO = 7; // pixels around the selected arc

/** A head's colour as a CSS value, in either theme. */
export function headColour(head: number): string {
  return head < NAMED ? `var(--head-${head})` : `hsl(${Math.round((head * 137.5) % 360)} 52% var(--head-lightness))`;
}

/** How strongly an edge is drawn: the more edges there are, the fainter those that carry little. */
function opacityOf(layout: Layout, weight: number): number {
  const count = layout.x.length;
  const least = count <= 16 ? 0.75 : count <= MOST_WORDS ? 4 / count + 0.12 : 0.02;
  return Math.min(0.95, least + (count <= MOST_WORDS ? 1.2 : 2.2) * Math.pow(weight, 0.7));
}

/** The radius of a sender's port: its area is its weight. */
export function portRadius(layout: Layout, weight: number, edge: boolean): number {
  const most = Math.max(2.2, Math.min(9, layout.slot * 0.42));
  return edge ? 1.8 + (most - 1.8) * Math.sqrt(weight) : Math.min(3, most);
}

/** Draws with SVG elements, which are kept and moved. */
export class SvgPainter implements Painter {
  readonly element = svg("svg", { class: "layer arcs", "aria-hidden": "true" });
  private edges = svg("g", { class: "edges" });
  private ports = svg("g", { class: "ports" });
  private halo = svg("path", { class: "halo" });
  private arrow = svg("path", { class: "arrow" });

  constructor() {
    this.element.append(this.halo, this.edges, this.arrow, this.ports);
  }

  paint(picture: Picture): void {
    const { layout, base, arcs } = picture;
    while (this.edges.childElementCount < arcs.length) this.edges.append(svg("path"));
    const paths = this.edges.children as unknown as ArrayLike<SVGPathElement>;
    for (let index = 0; index < this.edges.childElementCount; index++) this.arc(paths[index], arcs[index], picture);
    while (this.ports.childElementCount < picture.ports.length) this.ports.append(svg("circle"));
    if (this.ports.childElementCount > picture.ports.length) fill(this.ports, ...picture.ports.map(() => svg("circle")));
    picture.ports.forEach((port, src) => this.port(this.ports.children[src], port, src, picture));
    this.halo.setAttribute("d", picture.selected ? pathOf(picture.selected.curve, base) : "");
    this.halo.style.strokeWidth = `${((picture.selected?.width ?? 0) + HALO).toFixed(1)}px`;
    this.arrow.setAttribute("d", picture.ports.length ? arrowPath(layout, picture.receiver, base) : "");
  }

  private arc(path: SVGPathElement, arc: Arc | undefined, picture: Picture): void {
    path.style.display = arc ? "" : "none";
    if (!arc) return path.removeAttribute("class");
    path.setAttribute("d", pathOf(arc.curve, picture.base));
    path.setAttribute("class", `arc ${arc.kind} dash-${arc.head % 4}${isLooked(arc, picture) ? " looked" : ""}`);
    path.style.stroke = arc.kind === "edge" || arc.kind === "added" ? picture.colourOf(arc.head) : "";
    path.style.strokeWidth = `${arc.width.toFixed(2)}px`;
    path.style.strokeOpacity = arc.kind === "edge" ? opacityOf(picture.layout, arc.weight).toFixed(3) : "1";
  }

  private port(circle: Element, port: { weight: number; edge: boolean }, src: number, picture: Picture): void {
    circle.setAttribute("cx", picture.layout.x[src].toFixed(1));
    circle.setAttribute("cy", String(picture.base));
    circle.setAttribute("r", portRadius(picture.layout, port.weight, port.edge).toFixed(2));
    circle.setAttribute("class", `${port.edge ? "port" : "port open"}${picture.looked?.src === src || picture.sender === src ? " looked" : ""}`);
  }
}

function isLooked(arc: Arc, picture: Picture): boolean {
  const { looked } = picture;
  return looked !== null && looked.src === arc.src && looked.dst === arc.dst && (looked.head === null || looked.head === arc.head);
}

/** A small arrow down into the receiver, at the side where its edges arrive. */
function arrowPath(layout: Layout, receiver: number, base: number): string {
  const size = Math.max(2.5, Math.min(5, layout.slot / 5));
  const x = layout.x[receiver] - Math.min(9, layout.slot / 4);
  return `M${(x - size).toFixed(1)} ${base - size}L${x.toFixed(1)} ${base + size * 0.7}L${(x + size).toFixed(1)} ${base - size}Z`;
}

/** Draws on a canvas: for the faint arcs behind, and for more tokens than elements are good for. */
export class CanvasPainter implements Painter {
  readonly element = document.createElement("canvas");
  private colours = new Map<string, string>();
  private probe: HTMLElement;

  constructor(probe: HTMLElement, className: string) {
    this.probe = probe;
    this.element.className = `layer ${className}`;
    this.element.setAttribute("aria-hidden", "true");
  }

  /** Another theme: colours are asked for again. */
  forget(): void {
    this.colours.clear();
  }

  paint(picture: Picture): void {
    const pen = this.begin(picture.layout, picture.base);
    if (!pen) return;
    if (picture.selected) this.halo(pen, picture.selected, picture.base);
    for (const arc of picture.arcs) this.arc(pen, arc, picture.base, this.opacity(arc, picture), picture);
    pen.globalAlpha = 1;
    pen.fillStyle = this.colour("var(--ink)");
    picture.ports.forEach((port, src) => {
      if (!port.edge || port.weight < 0.004) return;
      pen.beginPath();
      pen.arc(picture.layout.x[src], picture.base, portRadius(picture.layout, port.weight, true), 0, 2 * Math.PI);
      pen.fill();
    });
    if (picture.ports.length) pen.fill(new Path2D(arrowPath(picture.layout, picture.receiver, picture.base)));
  }

  /** The faint arcs of everybody. */
  paintBehind(picture: Picture): void {
    const pen = this.begin(picture.layout, picture.base);
    if (!pen) return;
    const most = picture.layout.x.length > MOST_WORDS ? 0.07 : 0.12;
    for (const arc of picture.arcs) this.arc(pen, arc, picture.base, most * (0.4 + 0.6 * arc.weight), picture);
  }

  private opacity(arc: Arc, picture: Picture): number {
    const own = arc.kind === "edge" ? opacityOf(picture.layout, arc.weight) : 1;
    if (picture.looked === null) return own;
    return isLooked(arc, picture) ? 1 : own * 0.4;
  }

  private begin(layout: Layout, base: number): CanvasRenderingContext2D | null {
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    const [width, height] = [Math.round(layout.width * ratio), Math.round((base + 12) * ratio)];
    if (this.element.width !== width) this.element.width = width;
    if (this.element.height !== height) this.element.height = height;
    const pen = this.element.getContext("2d");
    pen?.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen?.clearRect(0, 0, layout.width, base + 12);
    return pen;
  }

  private arc(pen: CanvasRenderingContext2D, arc: Arc, base: number, opacity: number, picture: Picture): void {
    pen.globalAlpha = opacity;
    pen.setLineDash(arc.kind === "edge" || arc.kind === "added" ? [] : [4, 4]);
    pen.strokeStyle = this.colour(arc.kind === "cut" || arc.kind === "candidate" ? "var(--muted)" : picture.colourOf(arc.head));
    stroke(pen, arc, base, arc.width);
  }

  private halo(pen: CanvasRenderingContext2D, arc: Arc, base: number): void {
    pen.globalAlpha = 0.35;
    pen.setLineDash([]);
    pen.strokeStyle = this.colour("var(--accent)");
    stroke(pen, arc, base, arc.width + HALO);
  }

  private colour(value: string): string {
    let known = this.colours.get(value);
    if (known === undefined) {
      this.probe.style.color = value;
      known = getComputedStyle(this.probe).color;
      this.colours.set(value, known);
    }
    return known;
  }
}

function stroke(pen: CanvasRenderingContext2D, arc: Arc, base: number, width: number): void {
  const { x1, x2, c1, c2, top } = arc.curve;
  pen.lineWidth = width;
  pen.beginPath();
  pen.moveTo(x1, base);
  pen.bezierCurveTo(c1, base - top, c2, base - top, x2, base);
  pen.stroke();
}
