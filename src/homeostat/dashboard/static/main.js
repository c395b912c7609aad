// The page: which view the address names, and what happens when runs grow on disk.

import { follow, getDifferences, getHealth, getRun, getRuns } from "./api.js";
import { completionsView } from "./completions.js";
import { curvesView } from "./curves_view.js";
import { ago, el, message, number, sentence, verdict } from "./dom.js";
import { findingCard, health } from "./findings.js";

const view = document.getElementById("view");
const crumbs = document.getElementById("crumbs");
// The view on the screen: what to do when runs change, and what to end when it is left.
let current = { changed: () => {}, close: () => {} };
const chosen = new Set();

const VIEWS = [
  [/^#\/run\/([0-9a-f]+)(?:\/(\w+))?$/, (id, tab) => showRun(id, tab)],
  [/^#\/compare\/([0-9a-f,]+)$/, (ids) => showComparison(ids.split(","))],
  [/^/, () => showList()],
];

async function route() {
  current.close();
  current = { changed: () => {}, close: () => {} };
  const [pattern, show] = VIEWS.find(([one]) => one.test(location.hash));
  try {
    await show(...location.hash.match(pattern).slice(1));
  } catch (error) {
    view.replaceChildren(message(error.message));
  }
}

async function showList() {
  crumbs.textContent = "";
  document.title = "homeostat";
  const rows = new Map();
  const body = el("tbody", {});
  const compare = el("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare/${[...chosen].join()}`; } });
  const tell = () => { compare.disabled = chosen.size < 2; compare.textContent = chosen.size < 2 ? "mark two runs to compare them" : `compare ${chosen.size} runs`; };

  const columns = ["", "health", "run", "framework", "step", "reward or loss", "changed", "what was found"];
  const load = async (run) => {
    try {
      fill(rows.get(run.id), await getRun(run.id));
      judge(rows.get(run.id), await getHealth(run.id));
    } catch (error) {
      rows.get(run.id).cells[7].textContent = error.message;
    }
  };
  const list = async () => {
    const runs = await getRuns();
    rows.clear();
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
    const work = async () => { for (let run; (run = waiting.shift());) await load(run); };
    await Promise.all([work(), work()]);
  };
  tell();
  view.replaceChildren(el("div", { class: "bar" }, el("h1", {}, "Runs"), compare),
    el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, columns.map((name) => el("th", {}, name)))), body)));
  current = {
    changed: (ids) => (ids.every((id) => rows.has(id)) ? ids.forEach((id) => load({ id })) : list()),
    close: () => {},
  };
  await list();
}

function fill(row, run) {
  const { latest } = run;
  const [, , , framework, step, value] = row.cells;
  framework.textContent = `${run.framework} ${run.kind === "unknown" ? "" : run.kind}`;
  step.textContent = run.last_step === null ? "-" : `${number(run.last_step)}${run.total_steps ? ` of ${number(run.total_steps)}` : ""}`;
  value.textContent = number(latest.reward ?? latest["train/loss"] ?? latest["eval/loss"]);
}

function judge(row, doctor) {
  row.cells[1].replaceChildren(verdict(doctor.verdict));
  const first = doctor.findings.find((one) => one.level !== "info") ?? doctor.findings[0];
  row.cells[7].textContent = first ? `${first.code} ${first.message}` : vitals(doctor.vital_signs);
}

const vitals = (signs) => sentence([signs.words, signs.course].filter(Boolean).join("; "));

async function showRun(id, tab) {
  view.replaceChildren(el("p", { class: "soft" }, "reading ..."));
  let run = await getRun(id), doctor = null, inner = null, isOpen = true;
  // The log of a run that died at its start has no curves.
  tab ??= run.metrics.length ? "curves" : "health";
  document.title = `${run.name} - homeostat`;
  crumbs.textContent = run.name;
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
    if (!isOpen) return;
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
      run = await getRun(id);
      inner.refresh();
      await judged();
    },
    close: () => { isOpen = false; inner.close(); },
  };
  await judged();
}

// More of them than this are folded, so that the curves are in sight.
const FEW_SETTINGS = 12;

async function showComparison(ids) {
  crumbs.textContent = `${ids.length} runs`;
  document.title = "comparison - homeostat";
  view.replaceChildren(el("p", { class: "soft" }, "reading ..."));
  const [runs, differences] = await Promise.all([Promise.all(ids.map((id) => getRun(id))), getDifferences(ids)]);
  const names = [...new Set(runs.flatMap((run) => run.metrics))].sort();
  const inner = curvesView(runs.map((run) => ({ ...run, findings: [] })), names);
  const badges = new Map(ids.map((id) => [id, el("span", {})]));
  const columns = new Map(ids.map((id) => [id, el("div", {}, el("p", { class: "soft" }, "being judged ..."))]));
  const judged = (id) => getHealth(id).then((doctor) => {
    badges.get(id).replaceChildren(verdict(doctor.verdict));
    const cards = doctor.findings.map((one) => findingCard(one));
    columns.get(id).replaceChildren(...(cards.length ? cards : [el("p", { class: "soft" }, "nothing")]));
    inner.mark(id, doctor.findings);
  });
  view.replaceChildren(
    el("div", { class: "bar" }, el("h1", {}, "Comparison"), ...runs.map((run) =>
      el("a", { class: "chip", href: `#/run/${run.id}` }, run.name, " ", badges.get(run.id)))),
    el("details", { class: "section", open: differences.length <= FEW_SETTINGS },
      el("summary", {}, "Settings that differ ", el("small", {}, `${differences.length}`)), table(differences, runs)),
    el("details", { class: "section" }, el("summary", {}, "Findings"),
      el("div", { class: "columns" }, runs.map((run) => el("div", {}, el("h3", {}, run.name), columns.get(run.id))))),
    inner.root);
  current = {
    changed: (changed) => {
      const grown = changed.filter((id) => ids.includes(id));
      if (grown.length) inner.refresh();
      grown.forEach(judged);
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
