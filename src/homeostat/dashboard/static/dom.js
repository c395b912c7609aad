// Build elements and format values. Texts are set as text, never as HTML: they come from logs.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e/, "e");
  return value.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");

export function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  const units = [["day", 86400], ["hour", 3600], ["minute", 60]];
  for (const [name, length] of units) {
    const count = Math.floor(passed / length);
    if (count >= 1) return `${count} ${name}${count > 1 ? "s" : ""} ago`;
  }
  return "just now";
}

const VERDICTS = {
  ill: ["ill", "bad"],
  look: ["look at it", "warn"],
  not_known: ["not known", "plain"],
  unfinished: ["unfinished", "plain"],
  no_illness: ["no illness", "good"],
};

export function verdict(name) {
  const [text, kind] = VERDICTS[name] ?? [name, "plain"];
  return el("span", { class: `badge ${kind}` }, text);
}

export const LEVELS = { error: "bad", warn: "warn", info: "plain" };

export function message(text) {
  return el("p", { class: "notice", role: "alert" }, text);
}
