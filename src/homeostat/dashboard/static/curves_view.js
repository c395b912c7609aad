// The curves of one or several runs: a filter, sections of charts, and the way back from a zoom.

import { Board, colour, sections } from "./charts.js";
import { el, message, number } from "./dom.js";

export function curvesView(runs, names) {
  const board = new Board(runs);
  const grid = el("div", {});
  const zoomed = el("button", { type: "button", hidden: true, onclick: () => board.zoom(null) });
  const filter = el("input", {
    type: "search", placeholder: "filter metrics", "aria-label": "filter metrics",
    oninput: () => show(filter.value),
  });
  const keys = runs.length < 2 ? null : el("div", { class: "keys" }, runs.map((run, place) => {
    const dot = el("i", {});
    dot.style.background = colour(place);
    return el("span", {}, dot, run.name);
  }));
  const figures = new Map(names.map((name) => [name, board.figure(name)]));
  board.onzoom = (range) => {
    zoomed.hidden = range === null;
    if (range) zoomed.textContent = `steps ${number(Math.round(range[0]))} to ${number(Math.round(range[1]))}: show all`;
  };
  board.onerror = (error) => grid.prepend(message(error.message));

  function show(text, isKept = false) {
    const wanted = names.filter((name) => name.toLowerCase().includes(text.toLowerCase()));
    const folds = new Map([...grid.querySelectorAll("details")].map((one) => [one.dataset.title, one.open]));
    grid.replaceChildren(...sections(wanted).map(([title, list], place) =>
      el("details", { class: "section", "data-title": title, open: isKept && folds.has(title) ? folds.get(title) : Boolean(text) || place < 3 },
        el("summary", {}, `${title} `, el("small", {}, `${list.length}`)),
        el("div", { class: "plots" }, list.map((name) => figures.get(name))))));
    const nothing = names.length ? "No metric has such a name." : "No metrics were logged.";
    if (!wanted.length) grid.append(el("p", { class: "soft" }, nothing));
  }
  // Show the newest values, and the metrics that have been logged since.
  function refresh(now) {
    if (now && now.join() !== names.join()) {
      names = now;
      for (const name of names) if (!figures.has(name)) figures.set(name, board.figure(name));
      show(filter.value, true);
    }
    board.refresh();
  }
  show("");
  const root = el("section", { class: "curves" },
    el("div", { class: "bar" }, filter, keys, zoomed,
      el("small", { class: "soft" }, "drag to zoom, double click for everything")),
    grid);
  return {
    root, refresh, close: () => board.close(), mark: (id, findings) => board.mark(id, findings),
  };
}
