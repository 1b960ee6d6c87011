// In a page of live figures: click each cell of each mask, and press Enter on it. The body becomes what happened: the
// cell, the arcs that the click changed, the cells and arcs that light up, and whether Enter restored the arcs.
const drawn = (root) => [...root.querySelectorAll(".live-arc.is-edge")].map((arc) => arc.dataset.edge).sort();
const lit = (root, kind) => [...root.querySelectorAll(`${kind}.is-lit`)].map((node) => node.dataset.edge);

function clickCell(root, key) {
  const cell = () => root.querySelector(`.live-cell[data-edge="${key}"]`);
  const before = drawn(root);
  cell().dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const after = drawn(root);
  const changed = [...before.filter((arc) => !after.includes(arc)), ...after.filter((arc) => !before.includes(arc))];
  cell().dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  const restored = drawn(root).join() === before.join();
  if (!before.includes(key)) cell().dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const point = (node) => node.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
  point(root.querySelector(`.live-arc.is-edge[data-edge="${key}"]`));
  const cells = lit(root, ".live-cell");
  point(cell());
  const arcs = lit(root, ".live-arc");
  if (!before.includes(key)) cell().dispatchEvent(new MouseEvent("click", { bubbles: true }));
  return [key, changed, cells, arcs, restored];
}

addEventListener("load", () => {
  const keys = (root) => [...root.querySelectorAll(".live-cell[data-edge]")].map((cell) => cell.dataset.edge);
  const clicks = [...document.querySelectorAll(".live")].map((root) => keys(root).map((key) => clickCell(root, key)));
  document.body.textContent = JSON.stringify(clicks);
});
