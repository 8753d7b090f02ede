// The attention tab: what one head of the served model attends to in a text, under two scalings.
import { ApiError, postJson } from "./api.js";
import { HeatMap, Lines } from "./charts.js";
import { Component, html } from "./html.js";
import { fieldOf, nameOf, ScalingPicker, SERVERS_OWN, startOf } from "./scaling.js";

const MOST = 256; // tokens, as the server takes
const START = "The cat sat on the mat, and the dog lay by the door. When the rain began, the cat went in and the dog went in after it.";

export class Attention extends Component {
  state = { text: START, layer: 0, head: 0, picks: [SERVERS_OWN, startOf("linear", this.props.scalings.kinds)], maps: null, texts: [], error: null, note: null, busy: false };

  componentWillUnmount() {
    this.running?.abort();
  }

  ask = async (event) => {
    event?.preventDefault();
    this.running?.abort();
    const running = (this.running = new AbortController());
    this.setState({ busy: true, error: null, note: null });
    const post = (path, body) => postJson(path, { model: this.props.model, ...body }, running.signal);
    const { text, layer, head, picks } = this.state;
    try {
      const { tokens, token_strs: texts } = await post("tokenize", { prompt: text, return_token_strs: true, return_offsets: false });
      const ids = tokens.slice(0, MOST);
      const note = ids.length < tokens.length ? `The first ${MOST} of ${tokens.length.toLocaleString("en")} tokens are shown.` : null;
      const maps = [];
      for (const picked of picks) {
        const map = await post("v1/attention", { tokens: ids, layer, head, ...fieldOf(picked) });
        maps.push({ ...map, name: nameOf(picked) });
      }
      this.setState({ maps, texts, note });
    } catch (error) {
      if (error.name !== "AbortError") this.setState({ error: error.message });
      if (error instanceof ApiError && error.status === 401) this.props.onLocked();
    }
    if (this.running === running) this.setState({ busy: false });
  };

  number = (name, most) => (event) => {
    const value = Number(event.currentTarget.value);
    if (Number.isInteger(value) && value >= 0 && (most === undefined || value <= most)) this.setState({ [name]: value });
  };

  render({ scalings, attentionMaps }, { text, layer, head, picks, maps, texts, error, note, busy }) {
    const [layers, heads] = [maps?.[0].num_layers, maps?.[0].num_heads];
    const pick = (index) => (value) => this.setState({ picks: picks.map((one, at) => (at === index ? value : one)) });
    return html`<main class="room wide">
      <p class="note">How much each token of a text attends to the tokens before it, in one head of one layer, under two rotary scalings.</p>
      ${attentionMaps === false && html`<p class="banner notice">Attention maps are disabled on this server, because other requests wait while one is computed.
        The operator enables them by starting the server with <code>--attention-maps</code>.</p>`}
      <form class="panel" onSubmit=${this.ask}>
        <label>Text, up to ${MOST} tokens
          <textarea rows="3" value=${text} onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea></label>
        <div class="grid">
          <label>Layer${layers ? ` of ${layers}` : ""}, from 0 <input type="number" min="0" max=${layers && layers - 1} value=${layer} onInput=${this.number("layer", layers && layers - 1)} /></label>
          <label>Head${heads ? ` of ${heads}` : ""}, from 0 <input type="number" min="0" max=${heads && heads - 1} value=${head} onInput=${this.number("head", heads && heads - 1)} /></label>
        </div>
        <div class="pair">
          <${ScalingPicker} label="Left" value=${picks[0]} scalings=${scalings} onChange=${pick(0)} />
          <${ScalingPicker} label="Right" value=${picks[1]} scalings=${scalings} onChange=${pick(1)} />
        </div>
        <div class="tools"><button class="primary" disabled=${busy || attentionMaps === false || !text.trim()}>Show the attention</button>
          <span class="note">The engine computes the text once for each map. Other requests wait meanwhile.</span></div>
      </form>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${note && html`<p class="note">${note}</p>`}
      ${maps && html`<div class="stack">
        <div class="pair">${maps.map((map, index) => html`<${HeatMap} key=${index} square title=${`${map.name}: layer ${map.layer}, head ${map.head}`}
          xTitle="attended to" yTitle="token" rows=${map.weights} names=${texts.slice(0, map.weights.length).map(visible)} describe=${(row, column) => describe(map, texts, row, column)} />`)}</div>
        <${Lines} title="Mean score by distance, before the softmax" xTitle="tokens back" yTitle="score" series=${maps.map((map) => byDistance(map, "score_by_distance"))} />
        <${Lines} title="Mean weight by distance" xTitle="tokens back" yTitle="weight" logY series=${maps.map((map) => byDistance(map, "weight_by_distance"))} />
      </div>`}
    </main>`;
  }
}

const visible = (text) => (text ?? "").trim().replaceAll("\n", "↵") || "␣";

function describe(map, texts, row, column) {
  const name = (index) => `“${(texts[index] ?? "").replaceAll("\n", "↵")}” (${index})`;
  if (column > row) return `${name(row)} does not see ${name(column)}: it comes later`;
  return `${name(row)} gives ${name(column)} a weight of ${map.weights[row][column].toFixed(6)}, score ${map.scores[row][column]?.toFixed(6) ?? "none"}`;
}

const byDistance = (map, field) => ({ name: map.name, x: map[field].map((_, back) => back), y: map[field] });
