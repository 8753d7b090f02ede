// The completion tab: a text that the model continues token by token, with the most likely alternatives.
import { ApiError, postJson, stream } from "./api.js";
import { Component, createRef, html } from "./html.js";
import { fieldOf, nameOf, ScalingPicker, SERVERS_OWN } from "./scaling.js";
import { fields, NumberFields } from "./settings.js";

const TOP = 5; // alternatives asked for
const NAME = "token_id:";
const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.995 ? "100 %" : share >= 0.01 ? `${share.toFixed(2)} %` : `${share.toExponential(1)} %`;
};
// Levels of the colours in the style sheet.
const level = (logprob) => (logprob === null ? "none" : ["a", "b", "c", "d", "e"][[0.8, 0.5, 0.2, 0.05, 0].findIndex((least) => Math.exp(logprob) >= least)]);

// What a token is shown as: spaces and ends of lines are seen.
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export class Completion extends Component {
  state = { prompt: "", settings: { max_tokens: "60" }, picked: SERVERS_OWN, tokens: [], looked: null, busy: false, error: null, facts: null, start: null };
  texts = new Map(); // of token ids
  running = null;
  list = createRef();

  componentDidMount() {
    this.setState({ settings: { ...this.props.starting, max_tokens: "60" } });
  }

  componentWillUnmount() {
    this.running?.abort();
  }

  // Texts of ids that were not seen before, in one question.
  async learn(ids) {
    const fresh = [...new Set(ids)].filter((id) => !this.texts.has(id));
    if (!fresh.length) return;
    const { token_strs: found } = await postJson("detokenize", { tokens: fresh, return_token_strs: true, return_offsets: false });
    fresh.forEach((id, index) => this.texts.set(id, found[index]));
  }

  run = (event) => {
    event?.preventDefault();
    if (this.state.prompt) this.generate(this.state.prompt, []);
  };

  // The prompt and the kept tokens go as ids, so that nothing is cut in another way the second time.
  async generate(prompt, kept) {
    this.running?.abort();
    const running = (this.running = new AbortController());
    const mine = () => this.running === running;
    this.setState({ busy: true, error: null, facts: null, tokens: kept, looked: null });
    let tokens = kept;
    let { start } = this.state;
    const began = performance.now();
    try {
      if (!kept.length) start = (await postJson("tokenize", { prompt, return_offsets: false })).tokens;
      if (mine()) this.setState({ start });
      const body = {
        model: this.props.model,
        prompt: [...start, ...kept.map((token) => token.id)],
        ...fields(this.state.settings),
        ...fieldOf(this.state.picked),
        logprobs: TOP,
        return_token_ids: true,
        return_tokens_as_token_ids: true,
        stream_options: { include_usage: true },
      };
      for await (const chunk of stream("v1/completions", body, running.signal)) {
        if (!mine()) return;
        const choice = chunk.choices[0];
        const ids = choice?.token_ids ?? [];
        const tops = (choice?.logprobs?.top_logprobs ?? []).map((top) => entries(top));
        await this.learn([...ids, ...tops.flat().map(({ id }) => id)]);
        tokens = [...tokens, ...ids.map((id, index) => ({ id, logprob: choice.logprobs?.token_logprobs[index] ?? null, top: tops[index] ?? [] }))];
        this.setState({ tokens, ...(chunk.usage ? { facts: this.facts(chunk.usage, began) } : {}) });
      }
    } catch (error) {
      if (error.name !== "AbortError" && mine()) this.setState({ error: error.message });
      if (error instanceof ApiError && error.status === 401) this.props.onLocked();
    }
    if (mine()) {
      this.running = null;
      this.setState({ busy: false });
    }
  }

  facts(usage, began) {
    const seconds = (performance.now() - began) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    return `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s${cached ? `, ${cached} of the prompt's from the cache` : ""}`;
  }

  // Continue after the tokens before `index` and, if it is given, another token in its place.
  continueFrom = (index, id) => {
    const { tokens, prompt } = this.state;
    const before = tokens.slice(0, index);
    const chosen = tokens[index].top.find((other) => other.id === id);
    this.generate(prompt, [...before, { ...tokens[index], id, logprob: chosen?.logprob ?? tokens[index].logprob }]);
  };

  keys = (event) => {
    if (event.key === "Escape") this.running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
  };

  walk = (event, index) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.list.current.querySelectorAll(".token")[index + step]?.focus();
  };

  render({ scalings }, { prompt, settings, picked, tokens, looked, busy, error, facts }) {
    return html`<main class="room" onKeyDown=${this.keys}>
      <p class="note">The model continues a text token by token. The color of each token shows its probability; its alternatives can be chosen instead.</p>
      <form class="ask" onSubmit=${this.run}>
        <label>Text to continue
          <textarea rows="4" value=${prompt} placeholder="Once upon a time" onInput=${(event) => this.setState({ prompt: event.currentTarget.value })}></textarea>
        </label>
        <details class="settings"><summary>Settings and rotary scaling (${nameOf(picked)})</summary>
          <${NumberFields} values=${settings} onChange=${(values) => this.setState({ settings: values })} />
          <${ScalingPicker} label="Rotary scaling" value=${picked} scalings=${scalings} onChange=${(value) => this.setState({ picked: value })} />
        </details>
        <div class="tools">
          ${busy
            ? html`<button type="button" class="primary" onClick=${() => this.running?.abort()}>Stop</button>`
            : html`<button class="primary" disabled=${!prompt}>Continue the text</button>`}
          <span class="note keys">Ctrl+Enter runs, Escape stops.</span>
          ${facts && html`<span class="facts">${facts}</span>`}
        </div>
      </form>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${tokens.length > 0 && html`<section class="result" aria-label="The continuation">
        <p class="tokens" ref=${this.list} aria-busy=${String(busy)}><span class="before">${prompt}</span>${tokens.map(
          (token, index) => html`<span role="button" key=${index} class="token" tabindex=${index === (looked ?? 0) ? 0 : -1} data-level=${level(token.logprob)} aria-pressed=${String(looked === index)}
            aria-label=${`${visible(this.texts.get(token.id) ?? "")}, ${token.logprob === null ? "" : percent(token.logprob)}`}
            onFocus=${() => this.setState({ looked: index })} onMouseEnter=${() => this.setState({ looked: index })}
            onKeyDown=${(event) => this.walk(event, index)} onClick=${() => this.setState({ looked: index })}>${this.texts.get(token.id)}</span>`,
        )}</p>
        <p class="legend" aria-hidden="true">${[["a", "80 % and more"], ["b", "50 %"], ["c", "20 %"], ["d", "5 %"], ["e", "less"]].map(([key, text]) => html`<span><i class="swatch" data-level=${key}></i>${text}</span>`)}</p>
        ${looked !== null && tokens[looked] ? this.alternatives(tokens[looked], looked, busy) : html`<p class="note">Point at a token, or walk through them with the arrow keys, to see what else was likely.</p>`}
      </section>`}
    </main>`;
  }

  alternatives(token, index, busy) {
    return html`<section class="alternatives" aria-label="Likely tokens" aria-live="polite">
      <h2>Token ${index + 1}: <code>${visible(this.texts.get(token.id) ?? "")}</code></h2>
      <table><thead><tr><th scope="col">Token</th><th scope="col">Probability</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
        <tbody>${token.top.map(({ id, logprob }) => html`<tr key=${id} aria-current=${id === token.id ? "true" : undefined}>
          <td><code>${visible(this.texts.get(id) ?? "")}</code></td>
          <td><meter min="0" max="1" value=${Math.exp(logprob)} aria-label=${percent(logprob)}></meter> ${percent(logprob)}</td>
          <td><button type="button" class="quiet" disabled=${busy} onClick=${() => this.continueFrom(index, id)}>${id === token.id ? "Continue from here" : "Take this"}</button></td>
        </tr>`)}</tbody></table>
    </section>`;
  }
}

// {"token_id:17": -0.3, …} as a list, most likely first.
function entries(top) {
  return Object.entries(top ?? {})
    .map(([name, logprob]) => ({ id: Number(name.slice(NAME.length)), logprob }))
    .sort((a, b) => b.logprob - a.logprob);
}
