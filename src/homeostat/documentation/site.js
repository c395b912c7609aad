"use strict";

// The search: all words must occur; hits in a title or heading come first.
const root = document.body.dataset.root;
const field = document.getElementById("search");
const found = document.getElementById("found");
const menu = document.getElementById("menu");
const button = document.getElementById("menu_button");
const MOST = 25;

button.addEventListener("click", () => {
  const open = menu.classList.toggle("open");
  button.setAttribute("aria-expanded", String(open));
});

function loadIndex(then) {
  if (window.SEARCH_INDEX) return then();
  const script = document.createElement("script");
  script.src = root + "search_index.js";
  script.onload = then;
  document.head.append(script);
}

function rank(row, words) {
  const [, title, heading, text] = row.map((part) => part.toLowerCase());
  let sum = 0;
  for (const word of words) {
    const hit = 4 * title.includes(word) + 6 * heading.includes(word) + text.includes(word);
    if (!hit) return 0;
    sum += hit;
  }
  // Pages of single rules are many, and rarely what is looked for by a word.
  return row[0].includes("/rules/") ? sum / 2 : sum;
}

function excerpt(text, word) {
  const at = Math.max(0, text.toLowerCase().indexOf(word) - 40);
  const part = document.createElement("small");
  const piece = text.slice(at, at + 150);
  const hit = piece.toLowerCase().indexOf(word);
  if (hit < 0) {
    part.textContent = piece;
    return part;
  }
  const mark = document.createElement("mark");
  mark.textContent = piece.slice(hit, hit + word.length);
  part.append((at ? "... " : "") + piece.slice(0, hit), mark, piece.slice(hit + word.length));
  return part;
}

function show() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.hidden = !words.length;
  if (!words.length) return;
  const hits = window.SEARCH_INDEX.map((row) => [rank(row, words), row])
    .filter(([score]) => score)
    .sort((a, b) => b[0] - a[0])
    .slice(0, MOST);
  found.replaceChildren(...hits.map(([, [url, title, heading, text]]) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = root + url;
    link.append(title === heading ? title : `${title}: ${heading}`, excerpt(text, words[0]));
    item.append(link);
    return item;
  }));
  if (!hits.length) {
    const item = document.createElement("li");
    item.className = "none";
    item.textContent = "No page has all of these words.";
    found.append(item);
  }
}

field.addEventListener("input", () => loadIndex(show));
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter") found.querySelector("a")?.click();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== field) {
    event.preventDefault();
    field.focus();
  } else if (event.key === "Escape") {
    found.hidden = true;
  }
});
document.addEventListener("click", (event) => {
  if (!found.contains(event.target) && event.target !== field) found.hidden = true;
});
