// Charts in SVG and maps on canvas, each with its numbers as a table for readers who do not see it.
import { Component, createRef, html } from "./html.js";

const HEIGHT = 230;
const EDGE = { left: 56, right: 12, top: 10, bottom: 40 };
const LISTED = 24; // rows of a table of numbers

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

// Short forms for the labels of an axis.
const brief = (value) => (Math.abs(value) >= 1e4 ? value.toLocaleString("en", { notation: "compact" }) : short(value));

export const exact = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(9))));

// Round marks between two numbers, powers of ten on a logarithmic axis.
function ticks(low, high, log) {
  if (log) {
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) powers.push(10 ** power);
    const within = (values) => values.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    const found = within(powers);
    if (found.length > 8) return found.filter((_, index) => index % 2 === 0);
    return found.length >= 3 ? found : within(powers.flatMap((power) => [power, 2 * power, 5 * power]));
  }
  const rough = (high - low) / 5 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((times) => times * unit >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

// A line keeps its colour while others have no points yet.
const classOf = (line) => `line-${line.index}${line.dashed ? " dashed" : ""}`;

// A component that knows how wide it is.
class Measured extends Component {
  state = { width: 0 };
  box = createRef();

  componentDidMount() {
    this.observer = new ResizeObserver(([entry]) => this.setState({ width: Math.round(entry.contentRect.width) }));
    this.observer.observe(this.box.current);
  }

  componentWillUnmount() {
    this.observer.disconnect();
  }
}

// series: [{name, x: [], y: [], dashed}], null in y for a gap; a dashed one has no points; marks: [{at, name}] on the x axis.
export class Lines extends Measured {
  render({ title, xTitle, yTitle, series, logX, logY, marks = [], points }, { width }) {
    const shown = series.map((line, index) => ({ ...line, index })).filter((line) => line.x.length > 0);
    return html`<figure class="chart" ref=${this.box}>
      <figcaption>${title}</figcaption>
      ${shown.length > 1 && html`<p class="legend">${shown.map((line) => html`<span class=${classOf(line)}>${line.name}</span>`)}</p>`}
      ${width > 0 && shown.length > 0 && this.drawing(width, { title, xTitle, yTitle, shown, logX, logY, marks, points })}
      ${shown.length > 0 && html`<${Numbers} xTitle=${xTitle} series=${shown} />`}
    </figure>`;
  }

  drawing(width, { title, xTitle, yTitle, shown, logX, logY, marks, points }) {
    const usable = (value, log) => value !== null && Number.isFinite(value) && (!log || value > 0);
    const xs = shown.flatMap((line) => line.x).concat(marks.map((mark) => mark.at)).filter((x) => usable(x, logX));
    const ys = shown.flatMap((line) => line.y).filter((y) => usable(y, logY));
    if (!xs.length || !ys.length) return null;
    const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const [x0, x1] = range(xs);
    let [y0, y1] = range(ys);
    if (y0 === y1) [y0, y1] = logY ? [y0 / 2, y1 * 2] : [y0, y1 + 1];
    const place = (value, low, high, from, to, log) => {
      const [v, a, b] = log ? [value, low, high].map(Math.log) : [value, low, high];
      return from + ((v - a) / (b - a || 1)) * (to - from);
    };
    const px = (x) => place(x, x0, x1, EDGE.left, width - EDGE.right, logX);
    const py = (y) => place(y, y0, y1, HEIGHT - EDGE.bottom, EDGE.top, logY);
    const path = (line) => {
      let drawn = "";
      line.x.forEach((x, index) => {
        const y = line.y[index];
        if (!usable(x, logX) || !usable(y, logY)) return;
        const before = index > 0 && usable(line.x[index - 1], logX) && usable(line.y[index - 1], logY);
        drawn += `${drawn && before ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`;
      });
      return drawn;
    };
    const xTicks = ticks(x0, x1, logX);
    const sparse = width < 420 ? xTicks.filter((_, index) => index % 2 === 0) : xTicks;
    return html`<svg width=${width} height=${HEIGHT} role="img" aria-label=${title}>
      ${ticks(y0, y1, logY).map((y) => html`<g class="tick"><line x1=${EDGE.left} x2=${width - EDGE.right} y1=${py(y)} y2=${py(y)} />
        <text x=${EDGE.left - 6} y=${py(y) + 4} text-anchor="end">${brief(y)}</text></g>`)}
      ${sparse.map((x) => html`<text class="tick" x=${px(x)} y=${HEIGHT - EDGE.bottom + 16} text-anchor="middle">${brief(x)}</text>`)}
      ${marks.map((mark) => html`<g class="mark"><line x1=${px(mark.at)} x2=${px(mark.at)} y1=${EDGE.top} y2=${HEIGHT - EDGE.bottom} />
        <text x=${px(mark.at) + (px(mark.at) > width / 2 ? -5 : 5)} y=${EDGE.top + 11}
          text-anchor=${px(mark.at) > width / 2 ? "end" : "start"}>${mark.name}</text></g>`)}
      ${shown.map((line) => html`<path class=${classOf(line)} d=${path(line)} />`)}
      ${points && shown.filter((line) => !line.dashed).map((line) => line.x.map((x, at) => usable(line.y[at], logY) && html`<circle class=${classOf(line)} r="2.5" cx=${px(x)} cy=${py(line.y[at])} />`))}
      <text class="axis" x=${(EDGE.left + width - EDGE.right) / 2} y=${HEIGHT - 6} text-anchor="middle">${xTitle}</text>
      <text class="axis" x="12" y=${(HEIGHT - EDGE.bottom) / 2} text-anchor="middle" transform=${`rotate(-90 12 ${(HEIGHT - EDGE.bottom) / 2})`}>${yTitle}</text>
    </svg>`;
  }
}

// The same x for all series, or that of the first longest.
function Numbers({ xTitle, series }) {
  const { x } = series.reduce((longest, line) => (line.x.length > longest.x.length ? line : longest));
  const every = Math.max(1, Math.ceil(x.length / LISTED));
  const rows = x.map((_, index) => index).filter((index) => index % every === 0 || index === x.length - 1);
  return html`<details class="numbers"><summary>As numbers</summary>
    <div class="scroll" tabindex="0" role="group" aria-label="Numbers"><table>
      <thead><tr><th scope="col">${xTitle}</th>${series.map((line) => html`<th scope="col">${line.name}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr><th scope="row">${short(x[row])}</th>
        ${series.map((line) => html`<td>${exact(line.y[line.x.indexOf(x[row])])}</td>`)}</tr>`)}</tbody>
    </table></div>
  </details>`;
}

// Colours of numbers in −1 … 1 (blue, ground, orange) or in 0 … 1.
const mix = (a, b, share) => a.map((value, index) => Math.round(value + (b[index] - value) * share));
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const ends = () => (dark() ? { ground: [28, 32, 38], low: [92, 172, 255], high: [255, 158, 74] } : { ground: [255, 255, 255], low: [20, 86, 160], high: [196, 86, 0] });

export function colour(value, signed) {
  const { ground, low, high } = ends();
  if (value === null || value === undefined) return ground;
  if (signed) return mix(ground, value < 0 ? low : high, Math.min(1, Math.abs(value)));
  return mix(ground, low, Math.sqrt(Math.max(0, Math.min(1, value))));
}

const LABELS = 32; // of an axis of a map

// Labels along an axis of a map. Of many, some are shown.
function Labels({ names, axis }) {
  const every = Math.ceil(names.length / LABELS);
  return html`<span class=${`labels ${axis}`} aria-hidden="true">${names.map((name, index) => html`<span>${index % every === 0 ? name : ""}</span>`)}</span>`;
}

// A map of numbers by rows: inspect one cell with the pointer or the arrow keys.
// rows: [[number or null]]; describe: (row, column) => text; names: of rows and columns, or nothing.
export class HeatMap extends Component {
  state = { row: 0, column: 0 };
  canvas = createRef();

  componentDidMount() {
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.draw);
    this.draw();
  }

  componentWillUnmount() {
    this.scheme.removeEventListener("change", this.draw);
  }

  componentDidUpdate(before) {
    if (before.rows !== this.props.rows) this.draw();
  }

  draw = () => {
    const { rows, signed } = this.props;
    const columns = Math.max(...rows.map((row) => row.length));
    const canvas = this.canvas.current;
    Object.assign(canvas, { width: columns, height: rows.length });
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows.length);
    rows.forEach((row, i) => {
      for (let j = 0; j < columns; j += 1) image.data.set([...colour(row[j] ?? null, signed), 255], 4 * (i * columns + j));
    });
    context.putImageData(image, 0, 0);
  };

  point = (event) => {
    const box = this.canvas.current.getBoundingClientRect();
    const { rows } = this.props;
    const columns = this.canvas.current.width;
    const within = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
    this.setState({
      row: within((event.clientY - box.top) / box.height, rows.length),
      column: within((event.clientX - box.left) / box.width, columns),
    });
  };

  keys = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.setState(({ row, column }) => ({
      row: clamp(row + step[0], this.props.rows.length),
      column: clamp(column + step[1], this.canvas.current.width),
    }));
  };

  render({ title, xTitle, yTitle, rows, describe, square, names }, { row, column }) {
    const at = [Math.min(row, rows.length - 1), column];
    return html`<figure class="chart">
      <figcaption>${title}</figcaption>
      <div class=${names ? "map named" : "map"} data-square=${square ? "yes" : undefined}>
        <span class="axis y">${yTitle}</span>
        ${names && html`<${Labels} names=${names} axis="down" />`}
        <canvas ref=${this.canvas} tabindex="0" role="img" aria-label=${`${title}. ${describe(...at)}. Arrow keys move.`}
          onPointerMove=${this.point} onPointerDown=${this.point} onKeyDown=${this.keys}></canvas>
        ${names && html`<${Labels} names=${names} axis="across" />`}
        <span class="axis x">${xTitle}</span>
      </div>
      <p class="reading">${describe(...at)}</p>
    </figure>`;
  }
}
