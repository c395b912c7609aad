// The doctor's findings, each with its evidence, causes and changes to make.

import { LEVELS, el, number } from "./dom.js";

const steps = (finding) => {
  if (finding.first_step === null) return "";
  const last = finding.last_step !== null && finding.last_step !== finding.first_step
    ? ` to ${number(finding.last_step)}` : "";
  return `step ${number(finding.first_step)}${last}`;
};

export function findingCard(finding, open = finding.level !== "info") {
  return el("details", { class: `finding ${LEVELS[finding.level]}`, open },
    el("summary", {},
      el("span", { class: `badge ${LEVELS[finding.level]}` }, finding.level),
      el("b", {}, `${finding.code} ${finding.name}`),
      el("small", {}, steps(finding))),
    el("p", {}, finding.message),
    list("Evidence", finding.evidence, (line) => el("code", {}, line)),
    list("Likely causes, in order", finding.causes.filter((one) => one.guess === undefined), because),
    list("Guesses, from similar errors of others", finding.causes.filter((one) => one.guess !== undefined), because),
    list("What to do", finding.fixes, fix));
}

const GRADES = { safe: "safe: what is learned stays the same", unsafe: "changes how the run learns" };

const fix = (one) => [
  one.setting ? el("code", {}, one.value ? `${one.setting} = ${one.value}` : one.setting) : null,
  one.advice ? (one.setting ? ` (${one.advice})` : one.advice) : null,
  one.setting || one.advice ? `: ${one.why}` : one.why,
  GRADES[one.grade] ? el("small", {}, ` ${GRADES[one.grade]}`) : null,
];

const because = (one) => [el("b", {}, one.name), `: ${one.why}`];

function list(title, items, show) {
  if (!items?.length) return null;
  return el("div", { class: "list" }, el("h4", {}, title), el("ul", {}, items.map((one) => el("li", {}, show(one)))));
}

export function health(doctor) {
  const few = doctor.findings.length <= 3;
  return el("section", { class: "health" },
    doctor.findings.map((one) => findingCard(one, few || one.level !== "info")),
    doctor.findings.length ? null : el("p", { class: "soft" }, "No rule has found anything."),
    doctor.not_evaluated.length ? el("details", { class: "quiet" },
      el("summary", {}, `${doctor.not_evaluated.length} rules could not be evaluated`),
      el("ul", {}, doctor.not_evaluated.map((one) => el("li", {}, `${one.code} ${one.name}: ${one.why}`)))) : null);
}
