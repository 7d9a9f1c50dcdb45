// Charts as inline SVG, each with a legend, a readout for pointer and arrow keys, and its numbers as a table.
// Text is added to the page as text nodes only.

const NS = "http://www.w3.org/2000/svg";
//: Half the width of a letter on an axis.
const LETTER = 3.2;
const MARGIN = { left: 56, right: 10, top: 8, bottom: 22 };

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, text = null) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

/**
 * `data`: {
 *   x: [numbers], xTicks: [[x, text]], xFrom, xTo, xText: x => text, xName,
 *   series: [{ name, color: 0..7, values: [number or null] }],
 *   kind: "line" | "bars" | "area" (bars are stacked), width: of a bar, in x
 *   gap: points further apart in x than this are not joined,
 *   yText: y => text, yTicks: [numbers] or left out, binary: whether they go by 1024,
 *   limit: { value, name } or null,
 *   label: what the chart shows, in a sentence; nothing: what to say if there are no points
 * }
 */
export function chart(figure, data) {
  const parts = figure.parts ?? (figure.parts = build(figure));
  parts.data = data;
  draw(parts);
}

function build(figure) {
  const svg = drawn("svg", { role: "img", tabindex: "0" });
  const nothing = element("p", { className: "nothing" });
  const readout = element("output");
  const legend = element("ul", { className: "legend" });
  const scroll = element("div", { tabIndex: 0 });
  const details = element("details", {}, element("summary", { textContent: "As a table" }), scroll);
  figure.append(svg, nothing, legend, readout, details);
  const parts = { figure, svg, nothing, readout, legend, details, scroll, at: null };
  new ResizeObserver(() => draw(parts)).observe(figure);
  details.addEventListener("toggle", () => table(parts));
  svg.addEventListener("pointermove", (event) => {
    const x = parts.scale?.back(event.clientX - svg.getBoundingClientRect().left);
    point(parts, x === undefined ? null : nearest(parts.data.x, x));
  });
  svg.addEventListener("pointerleave", () => point(parts, null));
  svg.addEventListener("blur", () => point(parts, null));
  svg.addEventListener("keydown", (event) => {
    const last = parts.data.x.length - 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || last < 0) return;
    event.preventDefault();
    point(parts, Math.min(last, Math.max(0, (parts.at ?? (move < 0 ? last + 1 : -1)) + move)));
  });
  return parts;
}

function nearest(values, wanted) {
  let best = null;
  values.forEach((value, i) => {
    if (best === null || Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i;
  });
  return best;
}

function point(parts, at) {
  parts.at = at;
  parts.svg.querySelector(".cursor")?.remove();
  const { data, scale } = parts;
  if (at === null || !scale || at >= data.x.length) {
    parts.readout.textContent = "";
    return;
  }
  const x = scale.x(data.x[at]);
  parts.svg.append(drawn("line", { class: "cursor", x1: x, x2: x, y1: scale.top, y2: scale.bottom }));
  const said = data.series
    .filter((one) => one.values[at] !== null && (one.values[at] || data.series.length < 3))
    .map((one) => (data.series.length > 1 ? `${one.name} ${data.yText(one.values[at])}` : data.yText(one.values[at])));
  parts.readout.textContent = `${data.xText(data.x[at])}: ${said.join(", ") || "nothing"}`;
}

/** Round numbers from 0 to at least `top`, in powers of ten, or of 1024 where `binary`. */
export function ticks(top, binary = false) {
  if (!(top > 0)) return [0, 1];
  const unit = binary ? 1024 ** Math.floor(Math.log(top) / Math.log(1024)) : 1;
  const rough = top / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) * unit;
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, i) => i * step);
}

function draw(parts) {
  const { data, svg } = parts;
  if (!data) return;
  const empty = data.x.length === 0;
  svg.toggleAttribute("hidden", empty);
  parts.nothing.hidden = !empty;
  parts.nothing.textContent = empty ? data.nothing : "";
  parts.details.hidden = empty;
  svg.setAttribute("aria-label", data.label);
  legend(parts);
  table(parts);
  if (empty) {
    parts.scale = null;
    point(parts, null);
    return;
  }
  const width = Math.max(200, svg.clientWidth || parts.figure.clientWidth);
  const height = svg.clientHeight || 208;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const levels = data.yTicks ?? ticks(highest(data), data.binary);
  const top = levels[levels.length - 1];
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const bottom = height - MARGIN.bottom;
  const span = data.xTo - data.xFrom || 1;
  const scale = {
    top: MARGIN.top,
    bottom,
    x: (value) => left + ((value - data.xFrom) / span) * (right - left),
    y: (value) => bottom - (Math.min(value, top) / top) * (bottom - MARGIN.top),
    back: (pixel) => data.xFrom + ((pixel - left) / (right - left)) * span,
  };
  parts.scale = scale;
  const made = [];
  for (const level of levels) {
    const y = scale.y(level);
    made.push(drawn("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
    const text = data.yText(level).replace(".0 ", " ");
    made.push(drawn("text", { class: "axis", x: left - 6, y: y + 4, "text-anchor": "end" }, text));
  }
  for (const [value, text] of fitting(data.xTicks, scale)) {
    const x = scale.x(value);
    if (x < left || x + text.length * LETTER > width + 8) continue;
    made.push(drawn("text", { class: "axis", x, y: height - 6, "text-anchor": "middle" }, text));
  }
  made.push(...(data.kind === "bars" ? bars(data, scale) : lines(data, scale)));
  if (data.limit && data.limit.value <= top) {
    const y = scale.y(data.limit.value);
    made.push(drawn("line", { class: "limit", x1: left, x2: right, y1: y, y2: y }));
  }
  svg.replaceChildren(...made);
  point(parts, parts.at);
}

/** Leaves out ticks at equal distances until no two labels touch. */
function fitting(ticks, scale) {
  if (ticks.length < 2) return ticks;
  const widest = Math.max(...ticks.map(([, text]) => text.length)) * 2 * LETTER + 8;
  const every = Math.ceil(widest / (scale.x(ticks[1][0]) - scale.x(ticks[0][0])));
  return ticks.filter((_, i) => i % every === 0);
}

function highest(data) {
  const sums = data.x.map((_, i) => {
    const values = data.series.map((one) => one.values[i] ?? 0);
    return data.kind === "bars" ? values.reduce((sum, value) => sum + value, 0) : Math.max(0, ...values);
  });
  return Math.max(0, ...sums, data.limit?.value ?? 0);
}

function lines(data, scale) {
  const made = [];
  for (const one of data.series) {
    const runs = [];
    data.x.forEach((x, i) => {
      if (one.values[i] === null) return;
      const joined = i > 0 && one.values[i - 1] !== null && x - data.x[i - 1] <= data.gap;
      if (!joined) runs.push([]);
      runs[runs.length - 1].push([scale.x(x), scale.y(one.values[i])]);
    });
    for (const run of runs) {
      const path = run.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
      const ends = `${run[run.length - 1][0].toFixed(1)},${scale.bottom}L${run[0][0].toFixed(1)},${scale.bottom}Z`;
      if (run.length === 1) {
        made.push(drawn("circle", { class: `fill c${one.color}`, cx: run[0][0], cy: run[0][1], r: 2.5 }));
        continue;
      }
      if (data.kind === "area") made.push(drawn("path", { class: `fill under c${one.color}`, d: `M${path}L${ends}` }));
      made.push(drawn("path", { class: `line c${one.color}`, d: `M${path}` }));
    }
  }
  return made;
}

function bars(data, scale) {
  const made = [];
  data.x.forEach((x, i) => {
    const from = scale.x(x - data.width / 2);
    const room = scale.x(x + data.width / 2) - from;
    const wide = Math.max(1, room > 4 ? room - 1 : room);
    let base = 0;
    for (const one of data.series) {
      const value = one.values[i];
      if (!value) continue;
      const [low, high] = [scale.y(base), scale.y(base + value)];
      made.push(drawn("rect", { class: `fill c${one.color}`, x: from, y: high, width: wide, height: Math.max(0.5, low - high) }));
      base += value;
    }
  });
  return made;
}

function legend(parts) {
  const { data } = parts;
  const names = data.series.map((one) => [one.name, one.color]);
  const shown = data.series.length > 1 ? names : [];
  const key = JSON.stringify(shown);
  if (parts.legendKey === key) return;
  parts.legendKey = key;
  const items = shown.map(([name, color]) => element("li", {}, element("i", { className: `c${color}` }), name));
  parts.legend.replaceChildren(...items);
}

function table(parts) {
  const { data } = parts;
  if (!data || !parts.details.open) return;
  const head = [data.xName, ...data.series.map((one) => one.name)];
  const rows = data.x.map((x, i) => [
    data.xText(x),
    ...data.series.map((one) => (one.values[i] === null ? "–" : data.yText(one.values[i]))),
  ]);
  const cells = (tag, row) =>
    row.map((text, i) => element(tag, { className: i ? "right" : "", textContent: text }));
  parts.scroll.replaceChildren(
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...cells("th", head))),
      element("tbody", {}, ...rows.reverse().map((row) => element("tr", {}, ...cells("td", row)))),
    ),
  );
}
