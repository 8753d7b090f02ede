// Draws one chart with uPlot: points or lines of several series, a box with the nearest point's values, light and dark.
// Independent of load tests. All text reaches the page as textContent or on a canvas, never as HTML.
"use strict";
const Chart = (() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Colours of n series: the page's own for a few, a ramp of hues for more.
  const palette = (index, count) => {
    if (count <= 6) return colour("c" + index);
    const light = matchMedia("(prefers-color-scheme: dark)").matches ? 68 : 42;
    return `hsl(${Math.round(175 + (205 * index) / (count - 1))} 58% ${light}%)`;
  };

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(+value.toPrecision(3));
  };

  // 1, 2 and 5 of every decade inside [low, high]; every digit of a short span.
  const logSplits = (low, high) => {
    const found = [];
    const digits = high / low < 4 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : high / low < 400 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of digits) {
        const value = digit * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    return found;
  };

  // One table for uPlot: a row per point, in the order of x, null where a row is another series'.
  const table = (series, log) => {
    const rows = [];
    series.forEach((one, index) => {
      for (const [x, y, about] of one.points)
        if (y !== null && Number.isFinite(y) && !(log && y <= 0)) rows.push({ x, y, index, about });
    });
    rows.sort((a, b) => a.x - b.x);
    const columns = [rows.map((row) => row.x), ...series.map(() => new Array(rows.length).fill(null))];
    rows.forEach((row, place) => (columns[row.index + 1][place] = row.y));
    return { rows, columns };
  };

  const nearest = (u, rows, left, top, reach) => {
    let best = null, least = reach * reach;
    for (const row of rows) {
      if (!u.series[row.index + 1].show) continue;
      const dx = u.valToPos(row.x, "x") - left, dy = u.valToPos(row.y, "y") - top;
      const distance = dx * dx + dy * dy * 0.5;
      if (distance < least) { least = distance; best = row; }
    }
    return best;
  };

  // The box next to the pointer. text(u, left, top) gives its lines and where it points, or null.
  const tipPlugin = (text) => {
    let tip;
    return {
      hooks: {
        init: (u) => {
          tip = document.createElement("div");
          tip.className = "tip";
          tip.hidden = true;
          u.over.appendChild(tip);
          u.over.addEventListener("mouseleave", () => (tip.hidden = true));
        },
        setCursor: (u) => {
          const { left, top } = u.cursor;
          const found = left < 0 ? null : text(u, left, top);
          tip.hidden = !found;
          if (!found) return;
          tip.textContent = found.lines.join("\n");
          const width = u.over.clientWidth, beside = found.left > width / 2;
          tip.style.left = beside ? "" : found.left + 14 + "px";
          tip.style.right = beside ? width - found.left + 14 + "px" : "";
          tip.style.top = Math.max(0, Math.min(found.top - 10, u.over.clientHeight - tip.offsetHeight)) + "px";
        },
      },
    };
  };

  // Horizontal limits and the diagonal.
  const marksPlugin = (spec) => ({
    hooks: {
      draw: (u) => {
        const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
        ctx.save();
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
        ctx.lineWidth = 1.5 * ratio;
        for (const mark of spec.marks || []) {
          const y = u.valToPos(mark.y, "y", true);
          ctx.strokeStyle = ctx.fillStyle = colour("bad");
          ctx.setLineDash([6 * ratio, 4 * ratio]);
          ctx.beginPath();
          ctx.moveTo(bbox.left, y);
          ctx.lineTo(bbox.left + bbox.width, y);
          ctx.stroke();
          ctx.textAlign = "left";
          ctx.textBaseline = "alphabetic";
          ctx.font = `${11 * ratio}px system-ui, sans-serif`;
          ctx.fillText(mark.text, bbox.left + 6 * ratio, y - 5 * ratio);
        }
        if (spec.diagonal) {
          const high = Math.min(u.scales.x.max, u.scales.y.max);
          ctx.strokeStyle = colour("soft");
          ctx.setLineDash([2 * ratio, 4 * ratio]);
          ctx.beginPath();
          ctx.moveTo(u.valToPos(0, "x", true), u.valToPos(0, "y", true));
          ctx.lineTo(u.valToPos(high, "x", true), u.valToPos(high, "y", true));
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  });

  const axis = (label, more) => ({
    label, labelSize: 20, labelFont: "12px system-ui, sans-serif", font: "11px system-ui, sans-serif",
    stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false },
    values: (u, splits) => splits.map(number), ...more,
  });

  const size = (host, spec) => ({
    width: Math.max(200, host.clientWidth), height: spec.height || Math.max(210, Math.min(320, host.clientWidth * 0.6)),
  });

  // Width of the widest label of the y axis.
  const labelRoom = (u, values) => 14 + 7 * Math.max(2, ...(values || []).map((value) => String(value).length));

  const paddedRange = (values, log, marks) => {
    const all = values.concat(marks);
    const low = Math.min(...all.slice(0, 60000)), high = Math.max(...all.slice(0, 60000));
    // Chunks read together are microseconds apart: four decades show all that matters.
    return log ? [Math.max(low / 1.25, high / 1e4), high * 1.25] : [0, high > 0 ? high * 1.06 : 1];
  };

  // A button per group of series; pressing it hides or shows them.
  const legend = (host, u, series) => {
    const groups = new Map();
    series.forEach((one, index) => groups.set(one.group ?? one.label, [...(groups.get(one.group ?? one.label) || []), index]));
    if (groups.size < 2) return;
    const bar = document.createElement("div");
    bar.className = "legend";
    for (const [name, members] of groups) {
      const button = document.createElement("button"), mark = document.createElement("span");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      mark.className = "mark";
      mark.style.borderTopColor = series[members[0]].colour;
      mark.style.borderTopStyle = series[members[0]].dash ? (series[members[0]].dash[0] > 3 ? "dashed" : "dotted") : "solid";
      button.append(mark, name);
      button.addEventListener("click", () => {
        const show = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(show));
        u.batch(() => members.forEach((index) => u.setSeries(index + 1, { show })));
      });
      bar.append(button);
    }
    host.append(bar);
  };

  // spec: series [{label, group, points [[x, y, about]], line, dash, points shown, alpha}], x and y {label, log, splits, values},
  // marks [{y, text}], diagonal, tip(row, series) for lines of the box, height.
  const draw = (host, spec) => {
    const log = Boolean(spec.y.log);
    const { rows, columns } = table(spec.series, log);
    host.replaceChildren();
    if (!rows.length) {
      const none = document.createElement("div");
      none.className = "none";
      none.textContent = "Nothing was measured for this chart.";
      host.appendChild(none);
      return null;
    }
    const xs = rows.map((row) => row.x), first = xs[0], last = xs[xs.length - 1];
    const span = last - first || Math.abs(last) || 1;
    const xRange = spec.x.range || [spec.x.zero ? 0 : first - span * 0.04, last + span * 0.04];
    const yRange = paddedRange(rows.map((row) => row.y), log, (spec.marks || []).map((mark) => mark.y));
    const options = {
      ...size(host, spec),
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { points: { show: false }, y: false, drag: { x: true, y: false } },
      scales: {
        x: { time: false, range: (u, low, high) => (low === null || (low === first && high === last) ? xRange : [low, high]) },
        y: { distr: log ? 3 : 1, range: () => yRange },
      },
      axes: [
        axis(spec.x.label, { size: 30, ...(spec.x.splits ? { splits: () => spec.x.splits } : {}), ...(spec.x.values ? { values: (u, s) => s.map(spec.x.values) } : {}) }),
        axis(spec.y.label, { size: labelRoom, ...(log ? { splits: (u, a, low, high) => logSplits(low, high), filter: (u, s) => s } : {}) }),
      ],
      series: [
        {},
        ...spec.series.map((one) => ({
          label: one.label, stroke: one.colour, fill: one.fill, width: one.line === false ? 0 : one.width || 2, dash: one.dash,
          spanGaps: true, alpha: one.alpha || 1, paths: one.line === false ? () => null : one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: one.markers || one.line === false || one.points.length === 1, size: one.line === false ? 5 : 6, width: 1, stroke: one.colour, fill: one.colour },
        })),
      ],
      plugins: [
        marksPlugin(spec),
        tipPlugin((u, left, top) => {
          const row = nearest(u, rows, left, top, spec.reach || 90);
          if (!row) return null;
          return { lines: spec.tip(row, spec.series[row.index]), left: u.valToPos(row.x, "x"), top: u.valToPos(row.y, "y") };
        }),
      ],
    };
    const u = new uPlot(options, columns, host);
    legend(host, u, spec.series);
    return u;
  };

  return { draw, colour, palette, number, axis, size, tipPlugin };
})();
