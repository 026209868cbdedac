// Charts as SVG, drawn by hand. Nothing here becomes HTML: nodes are made, text is set as text.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 176;
const EDGE = { left: 46, right: 10, top: 8, bottom: 20 };

/** A node with attributes and children; strings become text nodes, null is left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

/** A ceiling for an axis and its step: 1, 2 or 5 times a power of ten. */
export function scale(most) {
  if (!(most > 0)) return { top: 1, step: 0.5 };
  const power = 10 ** Math.floor(Math.log10(most / 3));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => most / one <= 4);
  return { top: Math.ceil(most / step - 1e-9) * step, step };
}

/** The horizontal bar of parts: [class, share 0..1]. */
export function bar(parts, width, label, className) {
  const shapes = [];
  let at = 0;
  for (const [colour, share] of parts) {
    const wide = Math.max(0, Math.min(1 - at, share)) * width;
    if (wide > 0) shapes.push(svg("rect", { x: (at * width).toFixed(2), y: 0, width: wide.toFixed(2), height: 10, class: `bar-part ${colour}` }));
    at += Math.max(0, share);
  }
  return svg("svg", { class: className, viewBox: `0 0 ${width} 10`, preserveAspectRatio: "none", role: "img", "aria-label": label }, shapes);
}

/** A chart over time in a node; `set` gives it new data, and it draws itself anew when resized. */
export class Chart {
  // options: series [{name, colour}], stacked, format(value), most (fixed ceiling or null), nothing
  constructor(node, options) {
    this.node = node;
    this.options = options;
    this.data = { times: [], columns: [], from: 0, to: 1 };
    this.hover = null;
    this.legend = el("div", { class: "legend" });
    this.drawing = svg("svg", { role: "img" });
    node.replaceChildren(this.drawing, this.legend);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(node);
  }

  set(data) {
    this.data = data;
    this.draw();
  }

  point(event) {
    const { times, from, to } = this.data;
    const box = this.drawing.getBoundingClientRect();
    const share = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    const wanted = from + share * (to - from);
    let best = null;
    for (let i = 0; i < times.length; i += 1) {
      if (best === null || Math.abs(times[i] - wanted) < Math.abs(times[best] - wanted)) best = i;
    }
    this.hover = best;
    this.draw();
  }

  draw() {
    const width = Math.max(200, Math.round(this.node.clientWidth));
    const { series, stacked, format } = this.options;
    const { times, columns, from, to } = this.data;
    const inner = { w: width - EDGE.left - EDGE.right, h: HEIGHT - EDGE.top - EDGE.bottom };
    const tops = stacked
      ? times.map((_, i) => columns.reduce((sum, column) => sum + (column[i] ?? 0), 0))
      : columns.flat().filter((value) => value !== null);
    const most = Math.max(0, ...tops);
    const { top, step } = this.options.most ? { top: this.options.most, step: this.options.most / 4 } : scale(most);
    const x = (time) => EDGE.left + ((time - from) / (to - from)) * inner.w;
    const y = (value) => EDGE.top + (1 - Math.min(value, top) / top) * inner.h;
    const parts = [];
    for (let value = 0; value <= top * 1.0001; value += step) {
      parts.push(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }));
      parts.push(svg("text", { x: EDGE.left - 7, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    const minutes = Math.round((to - from) / 60);
    for (const share of [0, 0.5, 1]) {
      const before = Math.round(minutes * (1 - share) * 10) / 10;
      parts.push(svg("text", { x: EDGE.left + share * inner.w, y: HEIGHT - 4, "text-anchor": ["start", "middle", "end"][share * 2] }, before ? `−${before} min` : "now"));
    }
    if (stacked) parts.push(...this.bars(x, y, inner));
    else parts.push(...this.lines(x, y));
    const has = columns.some((column) => column.some((value) => value !== null && value !== undefined));
    if (!has || (stacked && most === 0)) {
      parts.push(svg("text", { class: "nothing", x: EDGE.left + inner.w / 2, y: EDGE.top + inner.h / 2, "text-anchor": "middle" }, this.options.nothing));
    }
    const shown = this.hover !== null && this.hover < times.length ? this.hover : times.length - 1;
    if (this.hover !== null && shown >= 0) {
      parts.push(svg("line", { class: "cross", x1: x(times[shown]), x2: x(times[shown]), y1: EDGE.top, y2: EDGE.top + inner.h }));
    }
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawing.replaceChildren(...parts);
    const told = series.map((one, n) => {
      const value = shown >= 0 ? columns[n]?.[shown] : null;
      return [one, value === null || value === undefined ? "–" : format(value)];
    });
    this.drawing.setAttribute("aria-label", `${this.options.label}: ${told.map(([one, value]) => `${one.name} ${value}`).join(", ")}`);
    const when = this.hover !== null && shown >= 0 ? el("span", {}, new Date(times[shown] * 1000).toLocaleTimeString()) : null;
    this.legend.replaceChildren(
      ...told.map(([one, value]) => el("span", {}, el("span", { class: `key ${one.colour}`, "aria-hidden": "true" }), `${one.name} `, el("b", {}, value))),
      ...(when ? [when] : []),
    );
  }

  lines(x, y) {
    const { times, columns } = this.data;
    const found = [];
    this.options.series.forEach((one, n) => {
      let path = "";
      let pen = false;
      const alone = [];
      const column = columns[n] ?? [];
      column.forEach((value, i) => {
        if (value === null || value === undefined) { pen = false; return; }
        path += `${pen ? "L" : "M"}${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
        if (!pen && (column[i + 1] ?? null) === null) alone.push(i);
        pen = true;
      });
      if (path) found.push(svg("path", { class: `line ${one.colour}`, d: path }));
      for (const i of alone) found.push(svg("circle", { class: `bar-part ${one.colour}`, cx: x(times[i]), cy: y(column[i]), r: 2 }));
    });
    return found;
  }

  bars(x, y, inner) {
    const { times, columns, from, to, every } = this.data;
    const wide = Math.max(1, (every / (to - from)) * inner.w - (inner.w / ((to - from) / every) > 4 ? 1 : 0));
    const found = [];
    times.forEach((time, i) => {
      let below = 0;
      this.options.series.forEach((one, n) => {
        const value = columns[n]?.[i] ?? 0;
        if (value > 0) {
          const high = y(below) - y(below + value);
          found.push(svg("rect", { class: `bar-part ${one.colour}`, x: (x(time) - wide).toFixed(1), y: y(below + value).toFixed(1), width: wide.toFixed(1), height: Math.max(0.6, high).toFixed(1) }));
          below += value;
        }
      });
    });
    return found;
  }
}
