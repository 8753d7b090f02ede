// A quick sweep: how well the model predicts a pasted text by position, under two scalings. The server gives every log-probability.
import { ApiError, postJson } from "./api.js";
import { Lines } from "./charts.js";
import { Component, html } from "./html.js";
import { fieldOf, nameOf } from "./scaling.js";

const MOST = 4096; // tokens
const FIRST = 128; // those of the shortest request; each one after it is twice as long
const BINS = 4; // of a request's new tokens

// Lengths of the requests, each scoring the tokens behind the one before: at most twice the work of the longest.
function lengthsTo(total) {
  const found = [];
  for (let length = Math.min(FIRST, total); ; length = Math.min(2 * length, total)) {
    found.push(length);
    if (length === total) return found;
  }
}

// Mean of −log p over equal parts of [from, to), as points at their middles.
function bins(logprobs, from, to) {
  const points = [];
  const count = Math.min(BINS, to - from);
  for (let bin = 0; bin < count; bin += 1) {
    const start = from + Math.floor(((to - from) * bin) / count);
    const end = from + Math.floor(((to - from) * (bin + 1)) / count);
    const part = logprobs.slice(start, end).filter((value) => value !== null);
    if (part.length) points.push({ at: (start + end) / 2, sum: -part.reduce((a, b) => a + b, 0), count: part.length });
  }
  return points;
}

export class Sweep extends Component {
  state = { text: "", runs: [], done: 0, total: 0, busy: false, error: null, note: null };

  componentWillUnmount() {
    this.running?.abort();
  }

  start = async () => {
    const running = (this.running = new AbortController());
    this.setState({ busy: true, error: null, note: null, runs: [], done: 0, total: 0 });
    const post = (path, body) => postJson(path, { model: this.props.model, ...body }, running.signal);
    try {
      const { tokens } = await post("tokenize", { prompt: this.state.text, return_offsets: false });
      const ids = tokens.slice(0, Math.min(MOST, this.props.longest));
      if (ids.length < 16) throw new Error(`The text has ${ids.length} tokens: paste at least 16, better a few thousand.`);
      if (ids.length < tokens.length) this.setState({ note: `The first ${ids.length.toLocaleString("en")} of ${tokens.length.toLocaleString("en")} tokens are read.` });
      const lengths = lengthsTo(ids.length);
      const picks = this.props.picks.map((picked) => ({ name: nameOf(picked), field: fieldOf(picked), points: [] }));
      this.setState({ runs: picks, total: lengths.reduce((a, b) => a + b, 0) * picks.length });
      for (let index = 0; index < lengths.length; index += 1) {
        for (const run of picks) {
          const body = { prompt: ids.slice(0, lengths[index]), max_tokens: 0, echo: true, logprobs: 0, ...run.field };
          const answer = await post("v1/completions", body);
          run.points.push(...bins(answer.choices[0].logprobs.token_logprobs, index ? lengths[index - 1] : 0, lengths[index]));
          this.setState(({ done }) => ({ runs: [...picks], done: done + lengths[index] }));
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") this.setState({ error: error.message });
      if (error instanceof ApiError && error.status === 401) this.props.onLocked();
    }
    if (this.running === running) this.setState({ busy: false });
  };

  render({ trained }, { text, runs, done, total, busy, error, note }) {
    const seen = runs.filter((run) => run.points.length);
    return html`<section class="panel" aria-labelledby="sweep">
      <h2 id="sweep">Quick sweep on your text</h2>
      <p class="note">How surprised the model is by each part of a text, by position, under both scalings: lower is better. Each part is scored in a
        request that ends with it. <code>windlass rope sweep</code> measures more, and says how sure it is.</p>
      <label>Text, up to ${MOST.toLocaleString("en")} tokens
        <textarea rows="4" value=${text} onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea></label>
      <div class="tools">
        ${busy
          ? html`<button type="button" class="primary" onClick=${() => this.running.abort()}>Stop</button>`
          : html`<button type="button" class="primary" disabled=${!text.trim()} onClick=${this.start}>Run the sweep</button>`}
        ${total > 0 && html`<progress max=${total} value=${done} aria-label="Tokens scored"></progress>
          <span class="facts">${done.toLocaleString("en")} of ${total.toLocaleString("en")} tokens scored</span>`}
      </div>
      ${note && html`<p class="note">${note}</p>`}
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${seen.length > 0 && html`<${Lines} title="Perplexity by position" xTitle="position in tokens" yTitle="perplexity" logX logY points
        marks=${seen[0].points.at(-1).at > trained ? [{ at: trained, name: "trained length" }] : []}
        series=${seen.map((run) => ({ name: run.name, x: run.points.map(({ at }) => at), y: run.points.map(({ sum, count }) => Math.exp(sum / count)) }))} />
        <p class="totals">${seen.map((run) => html`<span key=${run.name}>${run.name}: perplexity ${overall(run.points).toFixed(3)}</span>`)}</p>`}
    </section>`;
  }
}

// Over every token that was scored.
function overall(points) {
  const [sum, count] = points.reduce(([a, b], point) => [a + point.sum, b + point.count], [0, 0]);
  return Math.exp(sum / count);
}
