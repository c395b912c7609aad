// Build elements and format values. Texts are set as text, never as HTML: they come from logs.

// Characters that are invisible or change the order of the text around them are shown as escapes, as in
// the terminal and the report (see observe/safe_text.py).
const UNSAFE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]/gu;

export const safeText = (text) => text.replace(UNSAFE, (one) => {
  const code = one.codePointAt(0);
  const [mark, size] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${mark}${code.toString(16).padStart(size, "0")}`;
});

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  const shown = children.flat().filter((child) => child !== null && child !== undefined);
  made.append(...shown.map((child) => (typeof child === "string" ? safeText(child) : child)));
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 9999.5 && size < 1e6) return Math.round(value).toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e/, "e");
  return value.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

// The labels of an axis, with as many digits as tell its ticks apart.
export function tickLabels(ticks, increment) {
  const size = Math.max(...ticks.map(Math.abs));
  if (size >= 1e9 || size < 1e-3) {
    const digits = Math.min(12, Math.max(0, Math.ceil(Math.log10(size / increment)) + 1));
    return ticks.map((tick) => (Math.abs(tick) < increment / 1e6 ? "0" : tick.toExponential(digits).replace(/\.?0*e\+?/, "e")));
  }
  let digits = 0;
  while (digits < 12 && Math.abs(increment * 10 ** digits - Math.round(increment * 10 ** digits)) > 1e-6) digits += 1;
  return ticks.map((tick) => (tick + 0).toLocaleString("en", { maximumFractionDigits: digits }));
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
