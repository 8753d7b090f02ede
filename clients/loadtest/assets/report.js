// Builds the charts of a load test's report from the JSON inside the page. `chart.js` draws; nothing is computed here
// but what depends on the reader's choices.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const { number } = Chart;
  const measures = Object.keys(data.measures);
  const several = data.runs.length > 1;
  const units = (measure) => data.units[measure];
  const seriesColour = (index) => Chart.palette(index, data.context.length);
  const runColour = (index) => Chart.palette(index, data.runs.length);
  const state = { tails: "ttft", rate: "ttft" };

  // A row of buttons above a chart, one pressed.
  const choices = (figure, names, current, choose) => {
    let bar = figure.querySelector(".choices");
    if (!bar) {
      bar = document.createElement("div");
      bar.className = "choices";
      figure.insertBefore(bar, figure.querySelector(".plot"));
    }
    bar.replaceChildren(
      ...names.map(([key, label]) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = label;
        button.setAttribute("aria-pressed", String(key === current));
        button.addEventListener("click", () => choose(key));
        return button;
      }),
    );
  };
  const measureChoices = (figure, key) =>
    choices(figure, measures.map((name) => [name, data.measures[name]]), state[key], (name) => {
      state[key] = name;
      render(figure);
    });

  // Percentiles are drawn at -log10(1 - p): 90, 99 and 99.9 % are a step apart.
  const tailPlace = (percent) => -Math.log10(1 - percent / 100);
  const tailTicks = [50, 90, 99, 99.9, 99.99].map((percent) => [tailPlace(percent), percent + " %"]);

  const context = (pick, more) => ({
    x: { label: "context, tokens", zero: true },
    series: data.context.flatMap((entry, index) => pick(entry, seriesColour(index), index)),
    tip: (row, series) => [series.label, `${number(row.x)} tokens`, ...more(row)],
  });
  // Of several series a legend names each once; of one, its lines.
  const pooled = data.context.length > 1;
  const named = (entry, text) => ({ label: pooled ? `${entry.name}, ${text}` : text, group: pooled ? entry.name : text });

  const loadAxis = () => ({ label: data.rate.offered ? "requests per second, offered" : "concurrent requests", zero: true });
  const byGroup = (make) => {
    const groups = [...new Set(data.rate.rows.map((row) => row.group))];
    return groups.flatMap((group, index) => make(group, data.rate.rows.filter((row) => row.group === group), index, groups.length));
  };

  const kinds = {
    "rate-latency": (figure) => {
      measureChoices(figure, "rate");
      const measure = state.rate, limit = data.slo[measure];
      const line = (group, rows, percent, colour, dash) => ({
        label: `${group ? group + ", " : ""}${percent === "p50" ? "median" : percent}`, group: group || percent.replace("p50", "median"),
        colour, dash, markers: true, points: rows.map((row) => [row.load, row[measure][percent], row.name]),
      });
      const dashes = { p50: undefined, p90: [6, 3], p99: [2, 3] };
      return {
        x: loadAxis(),
        y: { label: `${measure.toUpperCase().replace("_ACTUAL", "")}, ${units(measure)}`, log: true },
        series: byGroup((group, rows, index, count) => count > 1
          ? ["p50", "p99"].map((percent) => line(group, rows, percent, Chart.palette(index, count), dashes[percent]))
          : ["p50", "p90", "p99"].map((percent, place) => line(group, rows, percent, Chart.colour("c" + place), dashes[percent]))),
        marks: limit === undefined ? [] : [{ y: limit, text: `limit ${number(limit)} ms` }],
        tip: (row, series) => [row.about, `${series.label}: ${number(row.y)} ms`],
      };
    },
    "rate-throughput": () => {
      const line = (group, rows, label, key, colour, dash) => ({
        label: group ? `${group}, ${label}` : label, group: group || label, colour, dash, markers: true, points: rows.map((row) => [row.load, row[key], row]),
      });
      return {
        x: loadAxis(),
        y: { label: "requests per second" },
        diagonal: data.rate.offered,
        series: byGroup((group, rows, index, count) => [
          line(group, rows, "completed", "request_rate", Chart.palette(index, Math.max(3, count))),
          ...(rows.some((row) => row.goodput !== null)
            ? [line(group, rows, "within the limits", "goodput", count > 1 ? Chart.palette(index, Math.max(3, count)) : Chart.colour("c2"), [6, 3])]
            : []),
        ]),
        tip: (row, series) => [row.about.name, `${series.label}: ${number(row.y)} requests/s`, `${number(row.about.tokens_per_second)} output tokens/s`],
      };
    },
    tails: (figure) => {
      const line = (label, colour, curve, dash) => ({ label, colour, dash, points: curve.map(([percent, value]) => [tailPlace(percent), value, percent]) });
      if (several) measureChoices(figure, "tails");
      const series = several
        ? data.runs.map((run, index) => line(run.name, runColour(index), run.tails[state.tails]))
        : measures.map((name, index) => line(data.measures[name], Chart.colour("c" + index), data.runs[0].tails[name], name === "ttft_actual" ? [5, 4] : undefined));
      const last = Math.max(1, ...series.flatMap((one) => one.points.map((point) => point[0])));
      return {
        x: { label: "percentile", range: [0, last * 1.02], splits: tailTicks.map((tick) => tick[0]).filter((place) => place <= last * 1.02),
             values: (place) => (tailTicks.find((tick) => Math.abs(tick[0] - place) < 1e-9) || ["", ""])[1] },
        y: { label: "ms", log: true },
        series,
        tip: (row, one) => [one.label, `p${+row.about.toPrecision(4)}: ${number(row.y)} ms`],
      };
    },
    "context-ttft": () => ({
      ...context((entry, colour) => [
        { ...named(entry, "requests"), colour, line: false, alpha: 0.45, points: entry.ttft.points },
        { ...named(entry, "median"), colour, points: entry.ttft.bins.map((bin) => [bin.x, bin.median, bin]) },
      ], (row) => [`${number(row.y)} ms`, ...(row.about ? [`median of ${number(row.about.count)} requests`] : [])]),
      x: { label: "input tokens", zero: true },
      y: { label: "ms" },
    }),
    "context-itl": () => ({
      ...context((entry, colour) => {
        const bins = entry.itl.bins, fit = entry.itl_fit, last = bins.length ? bins[bins.length - 1].x : 0;
        const found = [
          { ...named(entry, "median"), colour, markers: bins.length < 20, points: bins.map((bin) => [bin.x, bin.median, bin]) },
          { ...named(entry, "p95"), colour, dash: [6, 3], width: 1.5, points: bins.map((bin) => [bin.x, bin.p95, bin]) },
        ];
        if (fit) found.push({ ...named(entry, "fit"), colour, dash: [2, 4], width: 1.5, points: [0, last].map((x) => [x, fit.intercept + fit.slope * x]) });
        return found;
      }, (row) => [`${number(row.y)} ms`, ...(row.about ? [`${number(row.about.count)} gaps, mean ${number(row.about.mean)} ms`] : [])]),
      y: { label: "ms" },
    }),
    "context-prefill": () => ({
      ...context((entry, colour) => [{ ...named(entry, "requests"), colour, line: false, alpha: 0.6, points: entry.prefill.points }], (row) => [`${number(row.y)} prompt tokens/s`]),
      x: { label: "input tokens", zero: true },
      y: { label: "tokens per second" },
    }),
    "context-decode": () => ({
      ...context((entry, colour) => [{ ...named(entry, "bins"), colour, markers: entry.decode.length < 20, points: entry.decode }], (row) => [`${number(row.y)} tokens/s`]),
      y: { label: "tokens per second" },
    }),
    "time-throughput": (figure) => {
      const { time } = data.runs[figure.dataset.run], half = (moment) => time.widths[time.seconds.indexOf(moment)] / 2;
      const points = time.seconds.map((moment, index) => [moment, time.tokens_per_second[index]]);
      return {
        x: { label: "seconds", zero: true },
        y: { label: "tokens per second" },
        series: [{ label: "output tokens per second", colour: Chart.colour("c0"), fill: `color-mix(in srgb, ${Chart.colour("c0")} 14%, transparent)`, points }],
        tip: (row) => [`${number(row.y)} tokens/s`, `around ${number(row.x)} s, ± ${number(half(row.x))} s`],
      };
    },
    "time-open": (figure) => {
      const { time } = data.runs[figure.dataset.run];
      const line = (label, key, colour) => ({ label, colour, points: time.seconds.map((moment, index) => [moment, time[key][index]]) });
      return {
        x: { label: "seconds", zero: true },
        y: { label: "requests" },
        series: [line("waiting for a first token", "waiting", Chart.colour("wait")), line("receiving", "decoding", Chart.colour("decode"))],
        tip: (row, series) => [`${number(row.y)} ${series.label}`, `at ${number(row.x)} s`],
      };
    },
  };

  const seconds = (value) => (value === null ? "–" : number(value) + " s");
  const requestLines = (row) => [
    `request ${row.index}${row.label ? ", " + row.label : ""}`,
    `${number(row.tokens[0])} tokens in, ${number(row.tokens[1])} out`,
    `intended ${seconds(row.intended)}, sent ${seconds(row.sent)}`,
    ...(row.first === null ? [] : [`first token after ${number((row.first - row.intended) * 1000)} ms`]),
    ...(row.end === null ? [] : [`${row.outcome === null ? "ended" : row.failed ? "failed" : "given up"} after ${number((row.end - row.intended) * 1000)} ms`]),
    ...(row.outcome === null ? [] : [row.outcome + (row.message ? ": " + row.message.slice(0, 200) : "")]),
  ];

  // Bars from the intended send to the end; uPlot gives axes, zoom and pointer.
  const drawTimeline = (figure) => {
    const run = data.runs[figure.dataset.run], { rows } = run.timeline, host = figure.querySelector(".plot");
    host.replaceChildren();
    if (!rows.length) {
      host.textContent = "No requests.";
      return null;
    }
    const ends = rows.map((row) => Math.max(row.intended, row.sent ?? 0, row.first ?? 0, row.end ?? 0));
    const last = Math.max(run.duration, ...ends.slice(0, 50000));
    const bars = (u) => {
      const { ctx, bbox } = u, ratio = devicePixelRatio || 1, step = bbox.height / rows.length;
      const height = Math.max(ratio, Math.min(step * 0.8, 16 * ratio));
      const x = (moment) => u.valToPos(moment, "x", true);
      const bar = (from, to, top, colour) => {
        ctx.fillStyle = colour;
        ctx.fillRect(x(from), top, Math.max(ratio * 0.75, x(to) - x(from)), height);
      };
      const colours = Object.fromEntries(["late", "wait", "decode", "bad", "soft"].map((name) => [name, Chart.colour(name)]));
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      rows.forEach((row, index) => {
        const top = bbox.top + step * (index + 0.5) - height / 2, end = row.end ?? last;
        const ended = row.outcome === null ? null : row.failed ? colours.bad : colours.soft;
        if (row.sent === null) bar(row.intended, end < row.intended ? row.intended : end, top, ended ?? colours.late);
        else {
          if (row.sent > row.intended) bar(row.intended, row.sent, top, colours.late);
          bar(row.sent, row.first ?? end, top, row.first === null && ended ? ended : colours.wait);
          if (row.first !== null) bar(row.first, end, top, ended ?? colours.decode);
        }
        if (row.failed) {
          const side = Math.max(3.5 * ratio, height * 0.4), at = x(Math.max(end, row.intended));
          ctx.strokeStyle = colours.bad;
          ctx.lineWidth = 2 * ratio;
          ctx.beginPath();
          for (const way of [1, -1]) {
            ctx.moveTo(at - side, top + height / 2 - side * way);
            ctx.lineTo(at + side, top + height / 2 + side * way);
          }
          ctx.stroke();
        }
      });
      ctx.restore();
    };
    const spec = { height: Math.max(160, Math.min(560, 70 + rows.length * 7)) };
    const range = [0, last * 1.02];
    return new uPlot({
      ...Chart.size(host, spec),
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { points: { show: false }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => (low === 0 && high === last ? range : [low, high]) }, y: { range: () => [0, rows.length], dir: -1 } },
      axes: [Chart.axis("seconds", { size: 30 }), Chart.axis("requests", { values: (u, splits) => splits.map((value) => (Number.isInteger(value) ? number(value) : "")) })],
      series: [{}, { paths: () => null, points: { show: false } }],
      plugins: [
        { hooks: { draw: bars } },
        Chart.tipPlugin((u, left, top) => {
          const row = rows[Math.min(rows.length - 1, Math.max(0, Math.floor((top / u.over.clientHeight) * rows.length)))];
          return { lines: requestLines(row), left, top };
        }),
      ],
    }, [[0, last], [null, null]], host);
  };

  const drawn = new Map();
  const render = (figure) => {
    drawn.get(figure)?.destroy();
    const host = figure.querySelector(".plot"), kind = figure.dataset.kind;
    const chart = kind === "timeline" ? drawTimeline(figure) : Chart.draw(host, kinds[kind](figure));
    drawn.set(figure, chart);
    figure.dataset.drawn = "yes";
  };
  const visible = (figure) => !figure.closest("details:not([open])");
  const renderAll = () => document.querySelectorAll("figure.chart").forEach((figure) => visible(figure) && render(figure));

  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const figure = target.closest("figure"), chart = drawn.get(figure), width = Math.max(200, target.clientWidth);
      if (visible(figure) && chart && Math.abs(chart.width - width) > 1) render(figure);
    }
  });
  renderAll();
  document.querySelectorAll("figure.chart .plot").forEach((host) => observer.observe(host));
  document.querySelectorAll("details.run").forEach((part) =>
    part.addEventListener("toggle", () => part.open && part.querySelectorAll("figure.chart").forEach(render)),
  );
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderAll);
})();
