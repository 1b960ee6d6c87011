// Keys that work anywhere on the page; those of tokens and ports are with them.

/** Ctrl + Z and Ctrl + Shift + Z (or Ctrl + Y), with Command on a Mac. */
export function undoKeys(act: (type: "undo" | "redo") => void, signal: AbortSignal): void {
  const listen = (event: KeyboardEvent) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const key = event.key.toLowerCase();
    if (key !== "z" && key !== "y") return;
    if (event.target instanceof HTMLTextAreaElement) return;
    event.preventDefault();
    act(key === "y" || event.shiftKey ? "redo" : "undo");
  };
  window.addEventListener("keydown", listen, { signal });
}
