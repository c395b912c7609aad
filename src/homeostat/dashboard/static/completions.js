// Completions of a run: searched, sorted, with tokens coloured by how far trainer and engine differ.

import { getCompletions } from "./api.js";
import { el, message, number } from "./dom.js";

const PAGE = 20;
// Nats at which a token has its full colour.
const FULL = 1.0;
const ORDERS = {
  order: "as sampled", reward: "reward", advantage: "advantage", length: "length",
  difference: "largest log-prob difference",
};

export function completionsView(run) {
  const asked = { step: null, search: "", order: "order", descending: 1, offset: 0, limit: PAGE };
  const rows = el("div", { class: "completions" });
  const count = el("small", { class: "soft" });
  const pager = el("div", { class: "bar" });
  const steps = el("select", { "aria-label": "step", onchange: () => ask({ step: steps.value, offset: 0 }) });
  const search = el("input", {
    type: "search", placeholder: "search prompts and completions", "aria-label": "search",
    oninput: () => later(() => ask({ search: search.value, offset: 0 })),
  });
  const order = el("select", { "aria-label": "sort by", onchange: () => ask({ order: order.value, offset: 0 }) },
    Object.entries(ORDERS).map(([name, text]) => el("option", { value: name }, text)));
  const turn = el("button", {
    type: "button", title: "turn the order around",
    onclick: () => { ask({ descending: asked.descending ? 0 : 1, offset: 0 }); turn.textContent = asked.descending ? "highest first" : "lowest first"; },
  }, "highest first");
  let timer, abort;
  const later = (what) => { clearTimeout(timer); timer = setTimeout(what, 200); };

  async function ask(change = {}) {
    Object.assign(asked, change);
    abort?.abort();
    abort = new AbortController();
    try {
      show(await getCompletions(run.id, asked, abort.signal));
    } catch (error) {
      if (error.name !== "AbortError") rows.replaceChildren(message(error.message));
    }
  }

  function show(answer) {
    if (steps.options.length !== answer.steps.length + (answer.step === null ? 1 : 0)) {
      const all = answer.step === null ? [el("option", { value: "" }, "all steps")] : [];
      steps.replaceChildren(...all, ...answer.steps.map((step) => el("option", { value: step }, `step ${number(step)}`)));
    }
    if (answer.step !== null) steps.value = answer.step;
    count.textContent = `${number(answer.total)} completions`;
    rows.replaceChildren(...answer.rows.map(card));
    const { offset } = asked;
    pager.replaceChildren(
      el("button", { type: "button", disabled: offset === 0, onclick: () => ask({ offset: Math.max(0, offset - PAGE) }) }, "previous"),
      el("small", {}, answer.total ? `${offset + 1} to ${Math.min(offset + PAGE, answer.total)}` : "none"),
      el("button", { type: "button", disabled: offset + PAGE >= answer.total, onclick: () => ask({ offset: offset + PAGE }) }, "next"));
  }

  const root = el("section", {}, el("div", { class: "bar" }, steps, search, order, turn, count), legend(), rows, pager);
  ask();
  return { root, refresh: () => ask(), close: () => abort?.abort() };
}

function card(row) {
  const told = [
    ["reward", row.reward], ["advantage", row.advantage], ["tokens", row.num_tokens],
    ["ended", row.stop_reason || null], ["largest difference", row.largest_difference],
    ...Object.entries(row.rewards).length > 1 ? Object.entries(row.rewards) : [],
  ].filter(([, value]) => value !== null && value !== undefined);
  return el("article", { class: "completion" },
    el("div", { class: "told" }, told.map(([name, value]) => el("span", {}, el("small", {}, name), ` ${number(value)}`))),
    el("details", {}, el("summary", {}, "prompt"), el("pre", {}, row.prompt)),
    el("pre", { class: "text" }, row.pieces ? row.pieces.map(piece) : row.completion || el("i", { class: "soft" }, "(empty)")));
}

function piece([text, difference]) {
  const made = el("span", { class: "piece" }, text);
  if (difference === null) return made;
  made.title = `trainer's log-prob ${difference > 0 ? "higher" : "lower"} by ${number(Math.abs(difference))}`;
  const strength = Math.min(1, Math.sqrt(Math.abs(difference) / FULL));
  if (strength > 0.05) {
    made.style.backgroundColor = `color-mix(in srgb, var(${difference > 0 ? "--c1" : "--c2"}) ${Math.round(strength * 70)}%, transparent)`;
  }
  return made;
}

function legend() {
  const sample = (text, difference) => piece([text, difference]);
  return el("p", { class: "soft legend" }, "Colours: the trainer finds the token ",
    sample("likelier", 0.5), " or ", sample("less likely", -0.5), " than the engine did that sampled it.");
}
