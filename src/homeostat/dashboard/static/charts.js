// Curves of one or several runs. All charts of a page share the range that the user zooms to; the
// server sends only as many points as a chart can show, anew for each range.

import { getCurves } from "./api.js";
import { el, number, tickLabels } from "./dom.js";

const HEIGHT = 184;
const WAIT_MS = 80;

// Widths of axes and their labels, in pixels.
const AXIS = 58;
const LETTER = 6.5;
// Steps are whole numbers, so their ticks are, too.
const STEPS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (place) => style(`--c${(place % 8) + 1}`);

// Metrics that people look at first, then the others by the first part of their names.
const FIRST = ["reward", "train/loss", "eval/loss", "entropy", "kl", "grad_norm", "learning_rate"];
const TITLES = { "": "most looked at" };

export function sections(names) {
  const found = new Map([["", names.filter((name) => FIRST.includes(name))]]);
  found.get("").sort((a, b) => FIRST.indexOf(a) - FIRST.indexOf(b));
  for (const name of names.filter((one) => !FIRST.includes(one))) {
    const part = name.includes("/") ? name.split("/")[0] : "others";
    if (!found.has(part)) found.set(part, []);
    found.get(part).push(name);
  }
  return [...found].filter(([, list]) => list.length).map(([part, list]) => [TITLES[part] ?? part, list]);
}

export class Board {
  // `runs`: [{id, name, findings}]; a finding is marked at its first step.
  constructor(runs) {
    this.runs = runs;
    this.range = null;
    this.charts = new Map();
    this.stale = new Set();
    this.shown = new Set();
    this.watcher = new IntersectionObserver((entries) => this.#seen(entries), { rootMargin: "200px" });
    this.resizer = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        this.charts.get(target.dataset.name)?.plot?.setSize({ width: contentRect.width, height: HEIGHT });
      }
    });
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.#rebuild();
    this.theme.addEventListener("change", this.repaint);
    this.abort = new AbortController();
  }

  figure(name) {
    const value = el("output", {});
    const body = el("div", { class: "plot-body", "data-name": name });
    const figure = el("figure", { class: "plot", "data-name": name },
      el("figcaption", {}, el("b", {}, name), value), body);
    this.charts.set(name, { body, value, plot: null });
    this.watcher.observe(body);
    this.resizer.observe(body);
    return figure;
  }

  close() {
    this.abort.abort();
    this.watcher.disconnect();
    this.resizer.disconnect();
    this.theme.removeEventListener("change", this.repaint);
    for (const { plot } of this.charts.values()) plot?.destroy();
  }

  // Show another range: [first, last], or null for everything.
  zoom(range) {
    this.range = range;
    this.refresh();
    this.onzoom?.(range);
  }

  // Mark the findings of a run, which may be known later than its curves.
  mark(id, findings) {
    this.runs.find((run) => run.id === id).findings = findings;
    for (const { plot } of this.charts.values()) plot?.redraw(false);
  }

  // Ask again for all that is on the screen; the rest follows when it is scrolled to.
  refresh() {
    this.stale = new Set(this.charts.keys());
    this.#fetch();
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const { name } = target.dataset;
      if (isIntersecting) {
        this.shown.add(name);
        if (!this.charts.get(name).plot) this.stale.add(name);
      } else this.shown.delete(name);
    }
    this.#fetch();
  }

  #fetch() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#load(), WAIT_MS);
  }

  async #load() {
    const names = [...this.stale].filter((name) => this.shown.has(name));
    if (!names.length) return;
    for (const name of names) this.stale.delete(name);
    const [first, last] = this.range ?? [null, null];
    const points = Math.max(200, Math.min(1500, this.charts.get(names[0]).body.clientWidth * 2));
    const range = this.range;
    try {
      const ids = this.runs.map((run) => run.id);
      const found = await getCurves({ run: ids, name: names, first, last, points }, this.abort.signal);
      // A newer range was asked for meanwhile.
      if (range !== this.range) return;
      for (const name of names) this.#draw(name, found[name] ?? {});
    } catch (error) {
      if (error.name !== "AbortError") this.onerror?.(error);
    }
  }

  #draw(name, byRun) {
    const chart = this.charts.get(name);
    const runs = this.runs.filter((run) => byRun[run.id]);
    const values = runs.flatMap((run) => byRun[run.id][1]);
    if (values.every((value) => value === null)) {
      chart.plot?.destroy();
      chart.plot = null;
      chart.value.textContent = "";
      chart.body.textContent = values.length ? "no finite value in this range" : "no value in this range";
      return;
    }
    const data = uPlot.join(runs.map((run) => byRun[run.id]));
    const key = runs.map((run) => run.id).join();
    if (chart.plot && chart.key === key) {
      chart.plot.setData(data, false);
      chart.plot.batch(() => this.#fit(chart.plot, data));
      return;
    }
    chart.plot?.destroy();
    chart.body.textContent = "";
    chart.key = key;
    chart.plot = new uPlot(this.#options(name, chart, runs), data, chart.body);
    this.#fit(chart.plot, data);
  }

  #fit(plot, data) {
    const steps = data[0];
    let [min, max] = this.range ?? [steps[0], steps[steps.length - 1]];
    if (min === max) [min, max] = [min - 1, max + 1];
    plot.setScale("x", { min, max });
  }

  #rebuild() {
    for (const chart of this.charts.values()) {
      chart.plot?.destroy();
      chart.plot = null;
    }
    this.refresh();
  }

  #options(name, chart, runs) {
    const axis = {
      stroke: style("--soft"),
      grid: { stroke: style("--grid"), width: 1 },
      ticks: { stroke: style("--grid"), width: 1, size: 4 },
      font: "11px system-ui, sans-serif",
    };
    const place = (run) => this.runs.indexOf(run);
    return {
      width: chart.body.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: {
        sync: { key: "steps", setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
      },
      scales: { x: { time: false }, y: { range: paddedRange } },
      axes: [
        { ...axis, size: 26, incrs: STEPS, label: "step", labelSize: 14, labelGap: 0, labelFont: axis.font,
          values: (_, ticks, place, space, increment) => tickLabels(ticks, increment) },
        { ...axis, values: (_, ticks, place, space, increment) => tickLabels(ticks, increment),
          size: (_, labels) => Math.max(AXIS, 12 + LETTER * Math.max(0, ...(labels ?? []).map((one) => one.length))) },
      ],
      series: [{}, ...runs.map((run) => ({
        label: run.name,
        stroke: colour(place(run)),
        width: 1.5,
        points: {
          show: (plot) => plot.data[0].length < 40, size: 4,
          filter: (plot, series, isShown) => (isShown ? null : lone(plot.data[series])),
        },
      }))],
      hooks: {
        draw: [(plot) => drawMarks(plot, runs)],
        setCursor: [(plot) => { chart.value.textContent = underCursor(plot, runs); }],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const first = plot.posToVal(plot.select.left, "x");
          const last = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.zoom([first, last]);
        }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.zoom(null))],
      },
    };
  }
}

function paddedRange(plot, min, max) {
  if (min === null || max === null) return [0, 1];
  if (min === max) {
    const room = Math.abs(min) * 0.1 || 0.5;
    return [min - room, max + room];
  }
  const room = (max - min) * 0.06;
  return [min - room, max + room];
}

function underCursor(plot, runs) {
  const { idx } = plot.cursor;
  if (idx === null || idx === undefined) return "";
  const told = runs.map((run, place) => {
    const near = nearest(plot.data[place + 1], idx);
    if (near === null) return `${run.name} -`;
    const value = plot.data[place + 1][near];
    const at = near === idx ? "" : ` (step ${number(plot.data[0][near])})`;
    return `${runs.length > 1 ? `${run.name} ` : ""}${value === null ? "not finite" : number(value)}${at}`;
  });
  return `step ${number(plot.data[0][idx])}: ${told.join(", ")}`;
}

// Runs have values at different steps: where one has none, the place of its nearest. null outside of the run.
function nearest(values, idx) {
  const has = (place) => values[place] !== undefined;
  let before = idx, after = idx;
  while (before >= 0 && !has(before)) before -= 1;
  while (after < values.length && !has(after)) after += 1;
  if (before < 0 || after === values.length) return null;
  return idx - before <= after - idx ? before : after;
}

// The places of values that no line shows, because both neighbours are not finite or missing.
function lone(values) {
  const places = [...values.keys()].filter((place) => values[place] !== undefined);
  const isNumber = (at) => typeof values[places[at]] === "number";
  return places.filter((_, at) => isNumber(at) && !isNumber(at - 1) && !isNumber(at + 1));
}

// A dashed line where each finding began, with its code if there is room.
function drawMarks(plot, runs) {
  const context = plot.ctx;
  const { left, top, width, height } = plot.bbox;
  context.save();
  context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  context.textAlign = "left";
  context.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
  let free = left;
  const marks = runs.flatMap((run) => run.findings)
    .filter((one) => one.first_step !== null && one.level !== "info")
    .sort((a, b) => a.first_step - b.first_step);
  for (const mark of marks) {
    const x = plot.valToPos(mark.first_step, "x", true);
    if (x < left || x > left + width) continue;
    context.strokeStyle = style(mark.level === "error" ? "--bad" : "--warn");
    context.fillStyle = context.strokeStyle;
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + height);
    context.stroke();
    const needed = context.measureText(mark.code).width;
    if (x >= free && x + needed < left + width) {
      context.fillText(mark.code, x + 3 * devicePixelRatio, top + 10 * devicePixelRatio);
      free = x + needed + 8 * devicePixelRatio;
    }
  }
  context.restore();
}
