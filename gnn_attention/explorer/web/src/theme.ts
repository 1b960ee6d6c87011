// Light or dark: as the system has it, until somebody chooses.

import { button, set } from "./dom";

const KEY = "gnn-attention-theme";
type Theme = "light" | "dark";

export class Themes {
  readonly element = button("◐", () => this.turn(), { class: "icon" });
  private system = window.matchMedia("(prefers-color-scheme: dark)");
  private chosen: Theme | null = remembered();

  constructor(
    private changed: () => void,
    signal: AbortSignal,
  ) {
    this.apply();
    this.system.addEventListener("change", () => this.follow(), { signal });
  }

  private get now(): Theme {
    return this.chosen ?? (this.system.matches ? "dark" : "light");
  }

  private turn(): void {
    this.chosen = this.now === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, this.chosen);
    } catch {
      // a page without storage forgets the theme when it closes
    }
    this.follow();
  }

  private follow(): void {
    this.apply();
    this.changed();
  }

  private apply(): void {
    set(document.documentElement, "data-theme", this.now);
    set(this.element, "aria-label", this.now === "dark" ? "Change to the light theme" : "Change to the dark theme");
  }
}

function remembered(): Theme | null {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null;
  }
}
