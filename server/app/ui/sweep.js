// A quick sweep: how well the model predicts a pasted text by position, under several scalings. The server gives every log-probability.
import { ApiError, postJson } from "./api.js";
import { Lines } from "./charts.js";
import { Component, html } from "./html.js";
import { fieldOf, nameOf, SERVERS_OWN, startOf, valueOf, writtenOf } from "./scaling.js";

const FIRST = 128; // those of the shortest request; each one after it is twice as long
const PAST = 2; // times the trained length is the longest text
const LEAST = 4096; // tokens of the longest text, where the trained length is short
const BINS = 4; // of a request's new tokens
const MOST_SCALINGS = 6; // as many requests as a browser has open to one server, so that one batch reads them all

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

// chosen: scalings to compare with the server's own and that of the sliders, each of which has a checkbox of its own.
export class Sweep extends Component {
  state = { text: "", own: true, sliders: true, chosen: [], runs: [], done: 0, total: 0, busy: false, error: null, note: null };

  componentWillUnmount() {
    this.running?.abort();
  }

  // Tokens of the longest text: past the trained length, where the server's context allows it.
  most = () => Math.min(this.props.longest, Math.max(LEAST, PAST * this.props.trained));

  // The scalings to compare, in the order of the boxes; equal ones once.
  picks() {
    const { own, sliders, chosen } = this.state;
    const all = [...(own ? [SERVERS_OWN] : []), ...(sliders ? [this.props.picked] : []), ...chosen];
    const seen = new Set();
    return all.filter((picked) => {
      const written = keyOf(picked);
      return !seen.has(written) && seen.add(written);
    });
  }

  add = (picked) => {
    const there = this.state.chosen.some((one) => keyOf(one) === keyOf(picked));
    if (!there) this.setState(({ chosen }) => ({ chosen: [...chosen, picked] }));
  };

  start = async () => {
    const running = (this.running = new AbortController());
    this.setState({ busy: true, error: null, note: null, runs: [], done: 0, total: 0 });
    const post = (path, body) => postJson(path, { model: this.props.model, ...body }, running.signal);
    try {
      const picks = this.picks();
      const runs = named(picks).map((name, index) => ({ name, field: fieldOf(picks[index]), points: [] }));
      const { tokens } = await post("tokenize", { prompt: this.state.text, return_offsets: false });
      const ids = tokens.slice(0, this.most());
      if (ids.length < 16) throw new Error(`The text has ${ids.length} tokens: paste at least 16, better a few thousand.`);
      if (ids.length < tokens.length) this.setState({ note: `The first ${ids.length.toLocaleString("en")} of ${tokens.length.toLocaleString("en")} tokens are read.` });
      const lengths = lengthsTo(ids.length);
      this.setState({ runs, total: lengths.reduce((a, b) => a + b, 0) * runs.length });
      for (let index = 0; index < lengths.length; index += 1) {
        const [from, to] = [index ? lengths[index - 1] : 0, lengths[index]];
        // All scalings at once: the engine reads them in one batch.
        await Promise.all(runs.map(async (run) => {
          const body = { prompt: ids.slice(0, to), max_tokens: 0, echo: true, logprobs: 0, ...run.field };
          const answer = await post("v1/completions", body).catch((error) => {
            throw error.name === "AbortError" ? error : Object.assign(error, { message: `${run.name}: ${error.message}` });
          });
          run.points.push(...bins(answer.choices[0].logprobs.token_logprobs, from, to));
          this.setState(({ done }) => ({ runs: [...runs], done: done + to }));
        }));
      }
    } catch (error) {
      if (error.name !== "AbortError") this.setState({ error: error.message });
      if (error instanceof ApiError && error.status === 401) this.props.onLocked();
      running.abort(); // the others of the batch
    }
    if (this.running === running) this.setState({ busy: false });
  };

  chooser({ picked, scalings: { kinds, profiles } }, { own, sliders, chosen, busy }) {
    const check = (name, checked, onChange) => html`<label class="check"><input type="checkbox" checked=${checked} disabled=${busy} onChange=${onChange} /> ${name}</label>`;
    const factor = picked.fields.factor ?? 4;
    const quick = (kind) => ({ ...startOf(kind, kinds), fields: { ...startOf(kind, kinds).fields, factor } });
    const full = this.picks().length >= MOST_SCALINGS;
    const button = (name, one) => html`<button type="button" disabled=${busy || full} onClick=${() => this.add(one)}>${name}</button>`;
    const names = named(chosen);
    return html`<fieldset class="picker set"><legend>Scalings to compare, up to ${MOST_SCALINGS}</legend>
      <div class="boxes">
        ${check(nameOf(SERVERS_OWN), own, () => this.setState({ own: !own }))}
        ${check(`the sliders': ${nameOf(picked)}`, sliders, () => this.setState({ sliders: !sliders }))}
        ${chosen.map((one, index) => html`<span class="kept" key=${keyOf(one)}>${names[index]}
          <button type="button" class="quiet" disabled=${busy} aria-label=${`Leave out ${names[index]}`}
            onClick=${() => this.setState({ chosen: chosen.filter((other) => other !== one) })}>×</button></span>`)}
      </div>
      <div class="tools"><span class="facts">Add</span>
        ${button("The sliders' as it is now", picked)}
        ${Object.keys(kinds).filter((kind) => kinds[kind].factor).map((kind) => button(named([quick(kind)])[0], quick(kind)))}
        ${button("No scaling", startOf("default"))}
        ${profiles.map((name) => button(`Profile ${name}`, startOf(`profile:${name}`)))}
      </div>
    </fieldset>`;
  }

  render(props, state) {
    const { text, runs, done, total, busy, error, note } = state;
    const seen = runs.filter((run) => run.points.length);
    const count = this.picks().length;
    return html`<section class="panel" aria-labelledby="sweep">
      <h2 id="sweep">Quick sweep on your text</h2>
      <p class="note">How surprised the model is by each part of a text, by position, under each scaling: lower is better. Each part is scored in a
        request that ends with it; the scalings share a batch. <code>windlass rope sweep</code> measures more, with confidence intervals.</p>
      <p class="note">A scaling costs short text, because it slows the rotation of all tokens: near tokens too then appear at fractions of
        distances, which the model did not see in training. It pays past the trained length (${whole(props.trained)} tokens).
        ${props.longest <= props.trained && ` This server's context of ${whole(props.longest)} tokens ends before that: only the operator can enlarge it, with --max-model-len.`}</p>
      <label>Text, up to ${whole(this.most())} tokens
        <textarea rows="4" value=${text} onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea></label>
      ${this.chooser(props, state)}
      <div class="tools">
        ${busy
          ? html`<button type="button" class="primary" onClick=${() => this.running.abort()}>Stop</button>`
          : html`<button type="button" class="primary" disabled=${!text.trim() || count === 0 || count > MOST_SCALINGS} onClick=${this.start}>Run the sweep</button>`}
        ${total > 0 && html`<progress max=${total} value=${done} aria-label="Tokens scored"></progress>
          <span class="facts">${done.toLocaleString("en")} of ${total.toLocaleString("en")} tokens scored</span>`}
      </div>
      ${note && html`<p class="note">${note}</p>`}
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${seen.length > 0 && html`<${Lines} title="Perplexity by position" xTitle="position in tokens" yTitle="perplexity" logX logY points
        marks=${seen[0].points.at(-1).at > props.trained ? [{ at: props.trained, name: "trained length" }] : []}
        series=${runs.map((run) => ({ name: run.name, x: run.points.map(({ at }) => at), y: run.points.map(({ sum, count }) => Math.exp(sum / count)) }))} />
        <p class="totals">${seen.map((run) => html`<span key=${run.name}>${run.name}: perplexity ${overall(run.points).toFixed(3)}</span>`)}</p>
        <p class="note verdict">${verdicts(seen, props.trained).join(" ")}</p>`}
    </section>`;
  }
}

// What distinguishes two scalings. An unfinished JSON is distinguished by its text.
function keyOf(picked) {
  try {
    return writtenOf(picked);
  } catch {
    return picked.text;
  }
}

// A name for each, with its fields where two would have the same.
function named(picks) {
  const names = picks.map((picked) => (picked.kind === "text" ? kindOf(picked) : nameOf(picked)));
  return names.map((name, index) => (names.indexOf(name) === names.lastIndexOf(name) ? name : `${name} ${keyOf(picks[index])}`));
}

function kindOf(picked) {
  try {
    const value = valueOf(picked);
    if (value === undefined || typeof value === "string") return value ?? nameOf(SERVERS_OWN);
    return value.factor === undefined ? `${value.rope_type}` : `${value.rope_type}, factor ${value.factor}`;
  } catch {
    return "the JSON";
  }
}

const whole = (value) => value.toLocaleString("en");

// What each scaling costs up to the trained length, and gains past it, against the first.
function verdicts([reference, ...others], trained) {
  return others.flatMap(({ name, points }) => {
    const parts = [["up to the trained length", (at) => at <= trained], ["past it", (at) => at > trained]].flatMap(([where, includes]) => {
      const [own, scaled] = [reference.points, points].map((all) => all.filter(({ at }) => includes(at)));
      if (!own.length || own.length !== scaled.length) return [];
      const change = 100 * (overall(scaled) / overall(own) - 1);
      return [`${Math.abs(change).toFixed(1)} % ${change > 0 ? "higher" : "lower"} ${where}`];
    });
    return parts.length ? [`Perplexity of ${name} against ${reference.name}: ${parts.join(", ")}.`] : [];
  });
}

// Over every token that was scored.
function overall(points) {
  const [sum, count] = points.reduce(([a, b], point) => [a + point.sum, b + point.count], [0, 0]);
  return Math.exp(sum / count);
}
