// The page: which view the address names, and what happens when runs grow on disk.

import { follow, getDifferences, getHealth, getRun, getRuns } from "./api.js";
import { completionsView } from "./completions.js";
import { curvesView } from "./curves_view.js";
import { ago, el, message, number, safeText, sentence, verdict } from "./dom.js";
import { findingCard, health } from "./findings.js";

const view = document.getElementById("view");
const crumbs = document.getElementById("crumbs");
// The view on the screen: what to do when runs change, and what to end when it is left.
let current = { changed: () => {}, close: () => {} };
// Counts the views: an answer for a view that was left meanwhile must not take its place.
let shownViews = 0;
const chosen = new Set();

const VIEWS = [
  [/^#\/run\/([0-9a-f]+)(?:\/(\w+))?$/, showRun],
  [/^#\/compare\/([0-9a-f,]+)$/, (isShown, ids) => showComparison(isShown, ids.split(","))],
  [/^/, showList],
];

async function route() {
  current.close();
  current = { changed: () => {}, close: () => {} };
  const [pattern, show] = VIEWS.find(([one]) => one.test(location.hash));
  const number = ++shownViews;
  const isShown = () => number === shownViews;
  try {
    await show(isShown, ...location.hash.match(pattern).slice(1));
  } catch (error) {
    if (isShown()) view.replaceChildren(message(error.message));
  }
}

async function showList(isShown) {
  crumbs.textContent = "";
  document.title = "homeostat";
  const rows = new Map();
  const body = el("tbody", {});
  const compare = el("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare/${[...chosen].join()}`; } });
  const tell = () => { compare.disabled = chosen.size < 2; compare.textContent = chosen.size < 2 ? "mark two runs to compare them" : `compare ${chosen.size} runs`; };

  const columns = ["", "health", "run", "framework", "step", "reward or loss", "changed", "what was found"];
  const load = async (run) => {
    const row = rows.get(run.id);
    try {
      fill(row, await getRun(run.id));
      judge(row, await getHealth(run.id));
    } catch (error) {
      row.cells[7].textContent = error.message;
    }
  };
  const list = async () => {
    const runs = await getRuns();
    if (!isShown()) return;
    rows.clear();
    for (const id of chosen) if (!runs.some((run) => run.id === id)) chosen.delete(id);
    tell();
    body.replaceChildren(...runs.map((run) => {
      const box = el("input", {
        type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.id),
        onchange: () => { box.checked ? chosen.add(run.id) : chosen.delete(run.id); tell(); },
      });
      const row = el("tr", { "data-run": run.id }, el("td", {}, box), el("td", {}, el("span", { class: "badge plain" }, "...")),
        el("td", {}, el("a", { href: `#/run/${run.id}`, title: run.path }, run.name)), el("td", {}), el("td", { class: "num" }),
        el("td", { class: "num" }), el("td", {}, ago(run.modified)), el("td", { class: "wide" }));
      rows.set(run.id, row);
      return row;
    }));
    if (!runs.length) body.append(el("tr", {}, el("td", { colspan: "8" }, "There are no runs in these folders yet.")));
    // Two at a time: reading a run takes a processor.
    const waiting = [...runs];
    const work = async () => { for (let run; isShown() && (run = waiting.shift());) await load(run); };
    await Promise.all([work(), work()]);
  };
  tell();
  view.replaceChildren(el("div", { class: "bar" }, el("h1", {}, "Runs"), compare),
    el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, columns.map((name) => el("th", {}, name)))), body)));
  current = {
    changed: async (ids) => {
      const now = await getRuns();
      const isSame = now.length === rows.size && now.every((run) => rows.has(run.id));
      if (isSame) ids.forEach((id) => load({ id }));
      else await list();
    },
    close: () => {},
  };
  await list();
}

function fill(row, run) {
  const { latest } = run;
  const [, , , framework, step, value] = row.cells;
  framework.textContent = `${run.framework} ${run.kind === "unknown" ? "" : run.kind}`;
  step.textContent = run.last_step === null ? "-" : `${number(run.last_step)}${run.total_steps ? ` of ${number(run.total_steps)}` : ""}`;
  row.cells[6].textContent = ago(run.modified);
  value.textContent = number(latest.reward ?? latest["train/loss"] ?? latest["eval/loss"]);
}

function judge(row, doctor) {
  row.cells[1].replaceChildren(verdict(doctor.verdict));
  const first = doctor.findings.find((one) => one.level !== "info") ?? doctor.findings[0];
  row.cells[7].textContent = safeText(first ? `${first.code} ${first.message}` : vitals(doctor.vital_signs));
}

const vitals = (signs) => sentence([signs.words, signs.course].filter(Boolean).join("; "));

async function showRun(isShown, id, tab) {
  view.replaceChildren(el("p", { class: "soft" }, "reading ..."));
  let run = await getRun(id), doctor = null, inner = null;
  if (!isShown()) return;
  // The log of a run that died at its start has no curves.
  tab ??= run.metrics.length ? "curves" : "health";
  document.title = `${run.name} - homeostat`;
  crumbs.textContent = safeText(run.name);
  const head = el("div", {}), body = el("div", {});

  const header = () => {
    const tabs = {
      curves: `Curves (${run.metrics.length})`, health: doctor ? `Health (${doctor.findings.length})` : "Health",
      completions: `Completions (${run.completion_steps.length} steps)`, settings: "Settings",
    };
    head.replaceChildren(
      el("div", { class: "bar" }, el("h1", {}, run.name), doctor ? verdict(doctor.verdict) : null,
        el("small", { class: "soft" }, `${run.framework}, ${run.path}, changed ${ago(run.modified)}`)),
      el("p", { class: "words" }, doctor ? vitals(doctor.vital_signs) : "being judged ..."),
      el("div", { class: "tabs", role: "tablist" }, Object.entries(tabs).map(([name, text]) =>
        el("a", { href: `#/run/${id}/${name}`, role: "tab", "aria-selected": String(name === tab) }, text))));
  };
  const nothing = () => {};
  const content = {
    curves: () => curvesView([{ ...run, findings: [] }], run.metrics),
    health: () => {
      const root = el("div", {});
      return { root, refresh: nothing, close: nothing, mark: () => root.replaceChildren(health(doctor)) };
    },
    completions: () => completionsView(run),
    settings: () => ({ root: settings(run.settings), refresh: nothing, close: nothing }),
  };
  const judged = async () => {
    doctor = await getHealth(id);
    if (!isShown()) return;
    header();
    inner.mark?.(id, doctor.findings);
  };
  header();
  inner = (content[tab] ?? content.curves)();
  body.replaceChildren(inner.root);
  view.replaceChildren(head, body);
  current = {
    changed: async (ids) => {
      if (!ids.includes(id)) return;
      try {
        run = await getRun(id);
        if (!isShown()) return;
        inner.refresh(run.metrics);
        await judged();
      } catch (error) {
        // The run may come back, so what was shown of it stays.
        if (isShown()) head.replaceChildren(message(error.message));
      }
    },
    close: () => inner.close(),
  };
  await judged();
}

// More of them than this are folded, so that the curves are in sight.
const FEW_SETTINGS = 12;

async function showComparison(isShown, ids) {
  crumbs.textContent = `${ids.length} runs`;
  document.title = "comparison - homeostat";
  view.replaceChildren(el("p", { class: "soft" }, "reading ..."));
  const [runs, differences] = await Promise.all([Promise.all(ids.map((id) => getRun(id))), getDifferences(ids)]);
  if (!isShown()) return;
  const metrics = new Map(runs.map((run) => [run.id, run.metrics]));
  const names = () => [...new Set([...metrics.values()].flat())].sort();
  const inner = curvesView(runs.map((run) => ({ ...run, findings: [] })), names());
  const badges = new Map(ids.map((id) => [id, el("span", {})]));
  const columns = new Map(ids.map((id) => [id, el("div", {}, el("p", { class: "soft" }, "being judged ..."))]));
  const judged = (id) => getHealth(id).then((doctor) => {
    badges.get(id).replaceChildren(verdict(doctor.verdict));
    const cards = doctor.findings.map((one) => findingCard(one));
    columns.get(id).replaceChildren(...(cards.length ? cards : [el("p", { class: "soft" }, "nothing")]));
    inner.mark(id, doctor.findings);
  });
  const gone = el("div", {});
  view.replaceChildren(gone,
    el("div", { class: "bar" }, el("h1", {}, "Comparison"), ...runs.map((run) =>
      el("a", { class: "chip", href: `#/run/${run.id}` }, run.name, " ", badges.get(run.id)))),
    el("details", { class: "section", open: differences.length <= FEW_SETTINGS },
      el("summary", {}, "Settings that differ ", el("small", {}, `${differences.length}`)), table(differences, runs)),
    el("details", { class: "section" }, el("summary", {}, "Findings"),
      el("div", { class: "columns" }, runs.map((run) => el("div", {}, el("h3", {}, run.name), columns.get(run.id))))),
    inner.root);
  current = {
    changed: async (changed) => {
      const grown = changed.filter((id) => ids.includes(id));
      if (!grown.length) return;
      try {
        for (const id of grown) metrics.set(id, (await getRun(id)).metrics);
        if (!isShown()) return;
        inner.refresh(names());
        await Promise.all(grown.map(judged));
      } catch (error) {
        if (isShown()) gone.replaceChildren(message(error.message));
      }
    },
    close: () => inner.close(),
  };
  await Promise.all(ids.map(judged));
}

function table(differences, runs) {
  if (!differences.length) return el("p", { class: "soft" }, "None.");
  return el("div", { class: "scroll" }, el("table", { class: "settings" },
    el("thead", {}, el("tr", {}, el("th", {}, "setting"), runs.map((run) => el("th", {}, run.name)))),
    el("tbody", {}, differences.map((row) => el("tr", {}, keyCell(row.key), row.values.map((value) => el("td", {}, shown(value))))))));
}

function settings(values) {
  const rows = Object.entries(values);
  if (!rows.length) return el("p", { class: "soft" }, "The run's files do not say.");
  return el("div", { class: "scroll" }, el("table", { class: "settings" },
    el("tbody", {}, rows.map(([key, value]) => el("tr", {}, keyCell(key), el("td", {}, shown(value)))))));
}

// A long key is broken between its parts, not within a word.
const keyCell = (key) => el("td", { class: "key" }, key.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]));

const shown = (value) => (value === null || value === undefined ? "-" : typeof value === "object" ? JSON.stringify(value) : String(value));

addEventListener("hashchange", route);
const live = document.getElementById("live");
follow((ids) => current.changed(ids), (state) => { live.textContent = state; live.dataset.state = state; });
route();
