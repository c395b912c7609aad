// Hover: a cross line at the nearest step and the values of all lines there.
"use strict";
for (const figure of document.querySelectorAll("figure.plot")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg");
  const cross = figure.querySelector(".cross");
  const tip = figure.querySelector(".tip");
  const [low, high, start, end] = data.x;

  const nearest = (xs, x) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) {
      const m = (a + b) >> 1;
      if (xs[m] < x) a = m; else b = m;
    }
    return x - xs[a] < xs[b] - x ? a : b;
  };
  const text = (v) => (v === null ? "not finite" : String(+v.toPrecision(5)));

  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = data.width / box.width;
    const pixel = (event.clientX - box.left) * scale;
    if (pixel < start - 8 || pixel > end + 8) return hide();
    const x = low + ((pixel - start) / (end - start)) * (high - low);
    const anchor = data.lines[0];
    const step = anchor.x[nearest(anchor.x, x)];
    const at = start + ((step - low) / (high - low)) * (end - start);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = "step " + step.toLocaleString("en");
    tip.append(head);
    for (const line of data.lines) {
      const i = nearest(line.x, step);
      const row = document.createElement("div");
      const swatch = document.createElement("i");
      swatch.className = "c" + line.colour;
      const note = line.x[i] === step ? "" : " (step " + line.x[i] + ")";
      row.append(swatch, line.label + note + " ", Object.assign(
        document.createElement("span"), { textContent: text(line.y[i]) }));
      tip.append(row);
    }
    tip.hidden = false;
    const left = at / scale;
    const flip = left > box.width / 2;
    tip.style.left = flip ? "" : left + 14 + "px";
    tip.style.right = flip ? box.width - left + 14 + "px" : "";
  };
  const hide = () => {
    tip.hidden = true;
    cross.setAttribute("x1", -9);
    cross.setAttribute("x2", -9);
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", hide);
}
