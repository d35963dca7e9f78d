"""The report's script: read-outs of charts and tokens, and the colour switch. The page is complete without it."""

JS = """
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const make = (name, css, text) => {
    const node = document.createElement(name);
    if (css) node.className = css;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const svgNode = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const show = (head, rows, x, y) => {
    tip.replaceChildren(make("div", "head", head));
    for (const [name, value, css] of rows) {
      const row = make("div", "row"), label = make("span");
      if (css) label.append(make("i", "key " + css));
      label.append(name);
      row.append(label, make("span", "", value));
      tip.append(row);
    }
    tip.style.display = "block";
    const right = scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8;
    const below = y + 20 + tip.offsetHeight < scrollY + innerHeight;
    tip.style.left = Math.max(scrollX + 8, Math.min(x + 14, right)) + "px";
    tip.style.top = (below ? y + 18 : Math.max(scrollY + 4, y - tip.offsetHeight - 12)) + "px";
  };
  const hide = () => { tip.style.display = "none"; };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const source = figure.querySelector(".chart-data");
    if (!source) continue;
    const data = JSON.parse(source.textContent);
    const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      let best = 0;
      data.x.forEach((x, index) => { if (Math.abs(x - at) < Math.abs(data.x[best] - at)) best = index; });
      const marks = [svgNode("line", {x1: data.x[best], x2: data.x[best], y1: data.top, y2: data.bottom})];
      for (const one of data.series)
        if (one.y[best] !== null)
          marks.push(svgNode("circle", {class: "s" + one.color, cx: data.x[best], cy: one.y[best], r: 3}));
      cursor.replaceChildren(...marks);
      const rows = data.series.map((one) => [one.name, one.text[best], "s" + one.color]);
      show(data.xName + " " + data.xText[best], rows, event.pageX, event.pageY);
    });
    svg.addEventListener("pointerleave", () => { cursor.replaceChildren(); hide(); });
  }

  const examples = document.getElementById("examples");
  if (examples) {
    for (const token of examples.querySelectorAll(".t")) {
      token.dataset.tip = token.title;
      token.removeAttribute("title");
    }
    examples.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".t");
      if (!token) return hide();
      const [head, ...lines] = token.dataset.tip.split("\\n");
      const rows = lines.map((line) => {
        const cut = line.indexOf(": ");
        return [line.slice(0, cut), line.slice(cut + 2)];
      });
      const box = token.getBoundingClientRect();
      show(head, rows, box.left + scrollX - 14, box.bottom + scrollY - 10);
    });
    examples.addEventListener("pointerleave", hide);
    const inputs = document.querySelectorAll("input[name=mode]");
    const choose = () => { for (const input of inputs) if (input.checked) examples.dataset.mode = input.value; };
    for (const input of inputs) input.addEventListener("change", choose);
    choose();
  }
})();
"""
