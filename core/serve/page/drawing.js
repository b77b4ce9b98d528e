/* Figures as text, elements, tables and charts of the operator's page. It knows no server and no snapshot.
   Text is only ever set as text, never as HTML. */

const DRAWN = new Set(["svg", "rect", "path", "circle", "line", "text", "title"]);
const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// ---- figures as text; a figure that is not there is a dash

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const digits = (value) => String(Number(value.toPrecision(3)));

export function count(value) {
  if (!isNumber(value)) return "–";
  return Math.abs(value) < 1e6 ? whole.format(value) : compact.format(value);
}

/** All digits of a number that `count` shortens, for a title. */
export const exact = (value) => (isNumber(value) && Math.abs(value) >= 1e6 ? whole.format(value) : "");
export const percent = (part, all) => (all > 0 ? (100 * part) / all : null);

export function share(part, all) {
  const value = percent(part, all);
  if (!isNumber(value)) return "–";
  return value === 0 || value === 100 ? `${value} %` : `${value.toFixed(1)} %`;
}

export const clock = (seconds, options = {}) => new Date(1000 * seconds).toLocaleTimeString("en-GB", options);

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0.9995) return `${digits(1000 * seconds)} ms`;
  if (seconds < 59.5) return `${digits(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${count(Math.floor(minutes / 1440))} days`;
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  const power = Math.min(5, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return `${digits(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

// ---- elements

export const $ = (id) => document.getElementById(id);

/** Set what an element says, only where it says something else: a selection of text survives. */
export function set(node, text, title = "") {
  if (node.textContent !== String(text)) node.textContent = text;
  if (node.getAttribute("title") !== title) node.setAttribute("title", title);
  if (!title) node.removeAttribute("title");
}

export function make(tag, attributes = {}, ...children) {
  const node = DRAWN.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Let `parent` have one child for each item, in their order. A child whose key stays is changed, not replaced. */
export function sync(parent, items, keyOf, create, change = () => {}) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    const node = old.get(key) ?? create(item);
    old.delete(key);
    node.dataset.key = key;
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    change(node, item);
  });
  old.forEach((node) => node.remove());
}

/** Fill a table's body, one row an item. The first cell heads its row.
 *  A column has `text` of an item, perhaps its `title`, or `fill(cell, item)`; `class` is that of its cells. */
export function fillTable(id, columns, items, keyOf, empty = "") {
  const body = $(id);
  const labels = [...body.closest("table").tHead.rows[0].cells].map((cell) => cell.textContent);
  if (!items.length && empty) {
    body.replaceChildren(make("tr", {}, make("td", { colspan: columns.length, class: "muted" }, empty)));
    return;
  }
  const cellOf = (column, index) =>
    make(index ? "td" : "th", {
      ...(index ? { role: "cell" } : { role: "rowheader", scope: "row" }),
      class: column.class ?? "",
      "data-label": labels[index],
    });
  const change = (row, item) =>
    columns.forEach((column, index) => {
      if (column.fill) column.fill(row.cells[index], item);
      else set(row.cells[index], column.text(item), column.title?.(item));
    });
  sync(body, items, keyOf, () => make("tr", { role: "row" }, ...columns.map(cellOf)), change);
}

// ---- series: rectangles, lines and swatches of one name have one colour

let highlighted = null;

const nameClass = (name) => (/^[a-z_]+$/.test(name) ? `s-${name}` : "");
export const swatch = (name) => make("span", { class: `swatch ${nameClass(name)}`, "aria-hidden": "true" });

/** Fade all that has another reason's colour; null: nothing is faded. */
export function highlight(name = highlighted) {
  highlighted = name;
  for (const node of document.querySelectorAll("[data-series]")) {
    node.classList.toggle("faded", name !== null && node.dataset.series !== name);
  }
}

/** A bar that `parts`, [name, value, title], fill up to `all`. A part that is there is wide enough to be seen. */
export function drawBar(host, parts, all, attributes) {
  const there = parts.filter(([, value]) => value > 0);
  const widths = there.map(([, value]) => Math.max(6, (1000 * value) / all));
  const scale = Math.max(1, widths.reduce((sum, width) => sum + width, 0) / 1000);
  let x = 0;
  const rects = there.map(([name, , title], index) => {
    const width = widths[index] / scale;
    const place = { x, width, y: 0, height: 10 };
    x += width;
    return make("rect", { class: `series ${nameClass(name)}`, "data-series": name, ...place }, make("title", {}, title));
  });
  const blank = { role: "img", viewBox: "0 0 1000 10", preserveAspectRatio: "none" };
  const picture = host.querySelector("svg") ?? host.insertBefore(make("svg", blank), host.firstChild);
  for (const [name, value] of Object.entries(attributes)) picture.setAttribute(name, value);
  picture.replaceChildren(...rects);
}

// ---- charts over time

const BIN_LENGTHS_S = [1, 2, 4, 5, 10, 15, 20, 30];
const EDGE = { left: 46, right: 6, top: 8, bottom: 20 };
const sumOf = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);

/** The shown time, up to the newest point, in bins of equal length, which multiples of their length bound. */
function binsOf({ points, every_s: everyS, nowS, windowS }, plotWidth) {
  const fits = (s) => s % everyS === 0 && plotWidth / (windowS / s) >= 6;
  const lengthS = BIN_LENGTHS_S.find(fits) ?? 60;
  const newestS = points.at(-1)?.time_s ?? nowS;
  const endS = nowS - newestS < 2 * everyS ? newestS : nowS;
  const startS = Math.ceil(endS / lengthS) * lengthS - windowS;
  const bins = Array.from({ length: Math.round(windowS / lengthS) }, (_, index) => {
    const inside = [];
    const fromS = startS + index * lengthS;
    return {
      fromS,
      toS: fromS + lengthS,
      inside,
      sum: (of) => sumOf(inside.map(of)), // counts of an interval
      last: (of) => (inside.length ? of(inside[inside.length - 1]) : null), // levels
    };
  });
  for (const point of points) bins[Math.ceil((point.time_s - startS) / lengthS) - 1]?.inside.push(point);
  return bins;
}

/** The ends of at most five equal steps from 0 that are round numbers, the last at least `most`. */
function ticksUpTo(most) {
  const power = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(most, 1))) - 1);
  const step = [1, 2, 5, 10, 20, 50].map((factor) => factor * power).find((size) => 4 * size >= most) ?? most;
  return Array.from({ length: Math.max(1, Math.ceil(most / step)) + 1 }, (_, index) => index * step);
}

/** A chart of the points of a time, in the element `id`.
 *
 *  `series`: [{name, label, of(bin)}], stacked; null is no value. Options: `label` for readers who see none of it,
 *  `line` instead of stacks, `parts` (each is a share of the sum), `gap` between stacks in pixels,
 *  `full()` is the axis' end, `show(value)` and `tick(value)` as text, `empty` is said where all is 0. */
export class Chart {
  constructor(id, series, options) {
    Object.assign(this, { show: count, tick: count, gap: 0, empty: "" }, options, { series, at: null, bins: [] });
    this.host = $(id);
    this.picture = this.host.appendChild(make("svg", { role: "img", tabindex: "0" }));
    this.note = this.host.appendChild(make("p", { class: "empty" }));
    this.host.addEventListener("pointermove", (event) => {
      const at = event.clientX - this.host.getBoundingClientRect().left;
      this.read(this.bins.findIndex((_, index) => at >= this.x(index) && at < this.x(index + 1)));
    });
    for (const leaving of ["pointerleave", "focusout"]) this.host.addEventListener(leaving, () => this.read(-1));
    this.host.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.read(Math.max(0, Math.min(this.bins.length - 1, (this.at ?? this.bins.length) + by)));
    });
  }

  /** Show these points: {points, every_s, nowS, windowS}. */
  draw(shown = this.shown) {
    const { clientWidth: width, clientHeight: height } = this.host;
    if (!width || !shown) return;
    this.shown = shown;
    const plot = { width: width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
    this.bins = binsOf(shown, plot.width);
    this.rows = this.bins.map((bin) => this.series.map((series) => series.of(bin)));
    this.sums = this.rows.map(sumOf);
    this.x = (index) => EDGE.left + (index * plot.width) / this.bins.length;
    const full = this.full?.();
    const ticks = full > 0 ? [0, full / 2, full] : ticksUpTo(Math.max(4, ...this.sums));
    const most = ticks[ticks.length - 1];
    const y = (value) => EDGE.top + plot.height * (1 - Math.min(value / most, 1));
    const parts = [...this.axes(ticks, y, width, height), ...(this.line ? this.points(y) : this.stacks(y))];
    if (this.bins[this.at]) {
      const place = { x: this.x(this.at), width: this.x(1) - this.x(0), y: EDGE.top, height: plot.height };
      parts.push(make("rect", { class: "cursor", ...place }));
    }
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.picture.setAttribute("aria-label", `${this.label}. Last: ${this.latest()}. Arrow keys read single times.`);
    this.picture.replaceChildren(...parts);
    const blank = this.rows.every((row) => row.every((value) => (this.line ? value === null : !value)));
    set(this.note, blank ? this.empty : "");
    if (this.at !== null) this.tell();
  }

  axes(ticks, y, width, height) {
    const { fromS } = this.bins[0];
    const { windowS } = this.shown;
    const parts = ticks.flatMap((value) => [
      make("line", { class: "rule", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      make("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, this.tick(value)),
    ]);
    const everyS = windowS / (width > 520 ? 5 : 3);
    for (let atS = Math.ceil(fromS / everyS) * everyS; atS < fromS + windowS; atS += everyS) {
      const x = EDGE.left + ((atS - fromS) / windowS) * (width - EDGE.left - EDGE.right);
      const words = clock(atS, windowS > 60 ? { timeStyle: "short" } : {});
      if (x < EDGE.left + 20 || x > width - 26) continue;
      parts.push(make("text", { x, y: height - 5, "text-anchor": "middle" }, words));
    }
    return parts;
  }

  stacks(y) {
    const parts = [];
    this.rows.forEach((row, index) => {
      let below = 0;
      row.forEach((value, number) => {
        if (!(value > 0)) return;
        const { name } = this.series[number];
        const top = y(below + value);
        const width = Math.max(1, this.x(index + 1) - this.x(index) - this.gap);
        const place = { x: this.x(index), width, y: top, height: Math.max(0.8, y(below) - top) };
        const marks = this.parts ? { "data-series": name } : {};
        parts.push(make("rect", { class: `series ${nameClass(name)}`, ...marks, ...place }));
        below += value;
      });
    });
    return parts;
  }

  /** A point for each bin with a value. The line is faint over bins without one. */
  points(y) {
    const middle = (index) => (this.x(index) + this.x(index + 1)) / 2;
    const there = this.rows.flatMap(([value], index) => (value === null ? [] : [[middle(index), y(value), index]]));
    const colour = nameClass(this.series[0].name);
    const isNext = (number) => number > 0 && there[number][2] === there[number - 1][2] + 1;
    const path = (joins) => there.map(([x, height], number) => `${joins(number) ? "L" : "M"}${x} ${height}`).join("");
    const dots = there.map(([cx, cy]) => make("circle", { class: `series ${colour}`, cx, cy, r: 2 }));
    return [
      make("path", { class: `line faint ${colour}`, d: path((number) => number > 0) }),
      make("path", { class: `line ${colour}`, d: path(isNext) }),
      ...dots,
    ];
  }

  latest() {
    const last = (number) => this.rows.findLast((row) => row[number] !== null)?.[number];
    const words = ({ label, name }, number) => `${label ?? name} ${isNumber(last(number)) ? this.show(last(number)) : "–"}`;
    return this.series.map(words).join(", ");
  }

  /** Mark the bin with this number and say what is in it; a bin that is not there ends that. */
  read(index) {
    const before = this.at;
    this.at = this.bins[index] ? index : null;
    if (this.at === before) return;
    this.draw();
    highlight();
    if (this.at === null) $("tip").hidden = true;
  }

  tell() {
    const bin = this.bins[this.at];
    const total = this.sums[this.at];
    const lines = this.series.flatMap(({ name, label }, number) => {
      const value = this.rows[this.at][number];
      if (value === null || (this.parts && !value)) return [];
      const words = this.show(value) + (this.parts ? ` · ${share(value, total)}` : "");
      return [make("div", {}, make("span", {}, swatch(name), label ?? name), make("span", {}, words))];
    });
    if (this.parts) lines.unshift(make("div", {}, make("span", {}, this.parts), make("span", {}, count(total))));
    const tip = $("tip");
    tip.replaceChildren(make("strong", {}, `${clock(bin.fromS)} to ${clock(bin.toS)}`), ...lines);
    tip.hidden = false;
    const box = this.host.getBoundingClientRect();
    const right = box.left + this.x(this.at + 1) + 10;
    const fits = right + tip.offsetWidth < document.documentElement.clientWidth - 8;
    const left = fits ? right : box.left + this.x(this.at) - tip.offsetWidth - 10;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${box.top + window.scrollY + 4}px`;
  }
}
