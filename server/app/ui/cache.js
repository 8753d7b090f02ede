// The cache tab: the blocks of the cache, the requests that use them, and tokens per second.
import { ApiError, getJson } from "./api.js";
import { Lines } from "./charts.js";
import { Component, createRef, html } from "./html.js";

const EVERY = 1000; // milliseconds
const KEPT = 120; // samples that are shown
const COLOURS = 8; // of owners, in the style sheet

const whole = (value) => Math.round(value).toLocaleString("en");
const bytes = (value) => {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
};

export class Cache extends Component {
  state = { look: null, rates: [], error: null, paused: false };

  componentDidMount() {
    this.alive = true;
    this.ask();
  }

  componentDidUpdate(before) {
    if (this.props.shown && !before.shown) this.ask();
  }

  componentWillUnmount() {
    this.alive = false;
    clearTimeout(this.timer);
  }

  // One request at a time, and none while the tab is hidden.
  ask = async () => {
    clearTimeout(this.timer);
    if (!this.alive || !this.props.shown || this.state.paused) return;
    try {
      const look = await getJson("v1/cache");
      this.setState(({ look: before, rates }) => ({ look, error: null, rates: before && look.time > before.time ? [...rates, rate(before, look)].slice(-KEPT) : rates }));
    } catch (error) {
      this.setState({ error: error.message });
      if (error instanceof ApiError && error.status === 401) return this.props.onLocked();
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(this.ask, document.hidden ? 5 * EVERY : EVERY);
  };

  pause = () => this.setState(({ paused }) => ({ paused: !paused }), this.ask);

  render(_, { look, rates, error, paused }) {
    return html`<main class="room wide">
      <div class="tools"><button type="button" aria-pressed=${String(paused)} onClick=${this.pause}>${paused ? "Resume" : "Pause"}</button>
        <span class="note">Updated once a second while this tab is open.</span></div>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${look && html`<div class="stack">
        ${figures(look, rates.at(-1))}
        ${look.groups.map((group, index) => html`<${Pages} key=${index} group=${group} name=${nameOf(group, look.groups)} look=${look} />`)}
        <${Lines} title="Tokens per second" xTitle="seconds from now" yTitle="tokens/s"
          series=${["generated", "read"].map((field) => ({ name: field === "read" ? "of prompts" : field, x: rates.length > 1 ? rates.map(({ time }) => time - look.time) : [], y: rates.map((one) => one[field]) }))} />
        ${look.sequences.length > 0 && sequences(look.sequences)}
      </div>`}
    </main>`;
  }
}

function rate(before, look) {
  const seconds = look.time - before.time;
  const grown = (name) => Math.max(0, look.counters[name] - before.counters[name]) / seconds;
  return { time: look.time, generated: grown("generation_tokens"), read: grown("prompt_tokens") };
}

function figures({ counters, groups, block_size: size, bytes_per_token: each }, now) {
  const used = groups.map((group) => sum(group.held) + sum(group.shared));
  const kept = groups.map((group) => sum(group.idle));
  const { prefix_cache_queries: asked, prefix_cache_hits: hit } = counters;
  const rows = [
    ["Running", whole(counters.num_running)],
    ["Waiting", whole(counters.num_waiting)],
    ["Tokens per second", now ? now.generated.toFixed(1) : "–"],
    ["Blocks in use", `${used.map(whole).join(" + ")} of ${groups.map((group) => whole(group.num_blocks)).join(" + ")}`],
    ["Cached for later prompts", `${kept.map(whole).join(" + ")} blocks`],
    ["A block", `${size} tokens, ${bytes(size * each)}`],
    ["Prompt tokens found", asked ? `${whole(hit)} of ${whole(asked)} (${((100 * hit) / asked).toFixed(0)} %)` : "no prompts yet"],
    ["Shifts", `${whole(counters.context_shifts)}, ${whole(counters.dropped_tokens)} tokens dropped`],
    ["Reused passages", `${whole(counters.reused_passages)}, ${whole(counters.reused_tokens)} tokens`],
    ["Preempted", whole(counters.num_preemptions)],
  ];
  return html`<section class="panel" aria-label="In numbers"><dl class="figures">
    ${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></section>`;
}

// The replica and the group of a cache, where there are several.
function nameOf(group, groups) {
  const own = groups.filter(({ engine }) => engine === group.engine);
  const replica = groups.some(({ engine }) => engine !== group.engine) ? ` of replica ${group.engine}` : "";
  return own.length > 1 ? `${replica && `${replica},`} of group ${own.indexOf(group) + 1}` : replica;
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

function sequences(list) {
  return html`<section class="panel" aria-labelledby="who"><h2 id="who">Running requests</h2>
    <div class="scroll" tabindex="0" role="group" aria-label="Running sequences"><table>
      <thead><tr>${["", "Tokens", "Prompt", "From the cache", "Blocks", "Shifts", "Reused tokens"].map((name) => html`<th scope="col">${name || html`<span class="hidden">Colour</span>`}</th>`)}</tr></thead>
      <tbody>${list.map((one, index) => html`<tr key=${index}><td><i class="swatch" data-owner=${index % COLOURS}></i></td>
        ${[one.num_tokens, one.num_prompt_tokens, one.num_cached_tokens, one.num_blocks, one.num_shifts, one.num_reused_tokens].map((value) => html`<td>${whole(value)}</td>`)}</tr>`)}</tbody>
    </table></div></section>`;
}

// The blocks as squares: filled where used, in the color of a request; grey where cached; faint where free.
class Pages extends Component {
  canvas = createRef();

  componentDidMount() {
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.draw);
    this.observer = new ResizeObserver(this.draw);
    this.observer.observe(this.canvas.current.parentElement);
  }

  componentWillUnmount() {
    this.scheme.removeEventListener("change", this.draw);
    this.observer.disconnect();
  }

  componentDidUpdate() {
    this.draw();
  }

  draw = () => {
    const canvas = this.canvas.current;
    const { group } = this.props;
    const width = canvas.parentElement.clientWidth;
    if (!width) return;
    const cells = group.held.length;
    const columns = Math.max(16, Math.min(64, Math.floor(width / 12), cells));
    const side = width / columns;
    const scale = devicePixelRatio || 1;
    const rows = Math.ceil(cells / columns);
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(rows * side * scale) });
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const tone = (name) => style.getPropertyValue(name).trim();
    for (let cell = 0; cell < cells; cell += 1) {
      const [x, y] = [(cell % columns) * side + 1, Math.floor(cell / columns) * side + 1];
      const inner = side - 2;
      context.fillStyle = tone("--free");
      context.fillRect(x, y, inner, inner);
      const share = (count) => Math.min(1, count / group.blocks_per_cell);
      const held = share(group.held[cell] + group.shared[cell]);
      const idle = share(group.idle[cell]);
      context.fillStyle = tone("--kept");
      context.fillRect(x, y + inner * (1 - held - idle), inner, inner * idle);
      context.fillStyle = tone(group.owners[cell] < 0 ? "--held" : `--owner-${group.owners[cell] % COLOURS}`);
      context.fillRect(x, y + inner * (1 - held), inner, inner * held);
      if (group.shared[cell]) {
        context.fillStyle = tone("--text");
        context.fillRect(x + inner * 0.35, y + inner * 0.35, inner * 0.3, inner * 0.3);
      }
    }
  };

  render({ group, name }) {
    const [held, shared, idle] = [group.held, group.shared, group.idle].map(sum);
    const kind = group.window === null ? "" : `, layers that see ${whole(group.window)} tokens`;
    const title = group.states ? `States${name}, one for each request` : `Pages${name}${kind}`;
    const text = `${whole(held)} used by one request, ${whole(shared)} by several, ${whole(idle)} cached, of ${whole(group.num_blocks)}`;
    return html`<figure class="chart pages">
      <figcaption>${title}</figcaption>
      <div><canvas ref=${this.canvas} role="img" aria-label=${`${title}: ${text}`}></canvas></div>
      <p class="legend"><span><i class="swatch" data-owner="0"></i>used by one request, in its color</span><span><i class="swatch shared"></i>used by several</span>
        <span><i class="swatch kept"></i>cached for later prompts</span><span><i class="swatch free"></i>free</span></p>
      <p class="reading">${text}. A square is ${group.blocks_per_cell === 1 ? "a block" : `${group.blocks_per_cell} blocks`};
        ${group.num_shown < group.num_blocks ? ` the ${whole(group.num_blocks - group.num_shown)} blocks after these are free.` : " all are shown."}</p>
    </figure>`;
  }
}
