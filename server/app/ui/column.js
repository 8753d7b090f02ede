// One conversation under one rotary scaling. It has its messages and runs its requests.
import { ApiError, hasKey, stream, url } from "./api.js";
import { Component, createRef, html } from "./html.js";
import { copyText } from "./clipboard.js";
import { Message } from "./message.js";
import { fieldOf, ScalingPicker } from "./scaling.js";
import { fields } from "./settings.js";
import * as snippets from "./snippets.js";

// A message as it is stored.
const stored = ({ ids, ...message }) => message;

export class Column extends Component {
  state = { messages: this.props.initial.messages, picked: this.props.initial.picked, rotary: null, sent: null }; // sent: the request of the last answer
  running = null; // the AbortController of the current request
  list = createRef();
  follows = true;

  componentDidMount() {
    this.props.slot.current = this;
    this.componentDidUpdate(); // a stored conversation is shown at its end
  }

  componentWillUnmount() {
    this.props.slot.current = null;
    this.running?.abort();
  }

  componentDidUpdate() {
    const list = this.list.current;
    if (this.follows && list) list.scrollTop = list.scrollHeight;
  }

  scrolled = () => {
    const list = this.list.current;
    this.follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  };

  snapshot = () => ({ picked: this.state.picked, messages: this.state.messages.map(stored) });

  pick = (picked) => this.setState({ picked }, this.props.onChange);

  // The request as it is sent, but for `stream` and what only the page reads.
  body(messages, seed) {
    const { settings, model } = this.props;
    const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
    const turns = messages.map(({ role, content }) => ({ role, content }));
    const continued = messages.at(-1).role === "assistant" ? { continue_final_message: true } : {};
    return { model: model.id, messages: [...system, ...turns], ...continued, ...fields(settings), ...(seed === null ? {} : { seed }), ...fieldOf(this.state.picked) };
  }

  // A question without an answer is removed: many templates require that the turns alternate.
  ask = (content, seed) => {
    const { messages } = this.state;
    const kept = messages.length && !messages.at(-1).content ? messages.slice(0, -2) : messages;
    return this.run([...kept, { role: "user", content }], seed);
  };

  stop = () => this.running?.abort();

  edit = (index, content, seed) => this.run([...this.state.messages.slice(0, index), { role: "user", content }], seed);
  retry = (seed) => this.run(this.state.messages.slice(0, -1), seed);
  continue = () => {
    const { messages } = this.state;
    return this.run(messages, null, messages.at(-1));
  };

  // Mark where the last answer differs from that of the other column.
  mark = (differs) => {
    const { messages } = this.state;
    return new Promise((done) => this.setState({ messages: [...messages.slice(0, -1), { ...messages.at(-1), differs }] }, done));
  };

  // Returns the answer. continued: the answer at the end of `messages` that is continued.
  async run(messages, seed, continued) {
    this.stop();
    const running = (this.running = new AbortController());
    const before = continued ? messages.slice(0, -1) : messages;
    const answer = { role: "assistant", content: "", thinking: "", ids: [], ...continued, error: undefined };
    const facts = continued ? { before: continued.facts?.tokens ?? 0 } : seed === null ? {} : { seed };
    const show = (more = {}) => this.running === running && this.setState({ messages: [...before, { ...answer }], ...more });
    this.follows = true;
    answer.facts = { ended: "stopped" }; // of a page that is closed meanwhile
    show({ rotary: null, sent: null });
    this.props.onBusy(this, true);
    const asked = performance.now();
    let first, last;
    try {
      const sent = this.body(messages, seed);
      show({ sent });
      const body = { ...sent, return_token_ids: true, stream_options: { include_usage: true }, return_progress: true };
      for await (const chunk of stream("v1/chat/completions", body, running.signal)) {
        answer.reading = chunk.prompt_progress;
        const choice = chunk.choices[0];
        const { content, reasoning_content: thinking } = choice?.delta ?? {};
        if (content || thinking) {
          last = performance.now();
          first ??= last;
          answer.content += content ?? "";
          answer.thinking += thinking ?? "";
        }
        if (choice?.token_ids) answer.ids = [...(answer.ids ?? []), ...choice.token_ids];
        if (choice?.finish_reason) facts.ended = choice.finish_reason;
        if (chunk.usage) {
          facts.tokens = chunk.usage.completion_tokens + (facts.before ?? 0);
          facts.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
          facts.used = chunk.usage.total_tokens;
          facts.context = this.props.model.max_model_len;
        }
        show(chunk.rotary ? { rotary: chunk.rotary } : {});
      }
    } catch (error) {
      if (error.name === "AbortError") facts.ended = "stopped";
      else answer.error = error.message;
      if (error instanceof ApiError && error.status === 401) this.props.onLocked();
    }
    if (first !== undefined) Object.assign(facts, { wait: (first - asked) / 1000, seconds: (last - first) / 1000 });
    answer.facts = facts;
    // A newer request of this column has replaced this one, which it stopped.
    if (this.running !== running) return answer;
    this.running = null;
    await new Promise((done) => this.setState({ messages: [...before, answer] }, done));
    this.props.onBusy(this, false);
    return answer;
  }

  copy = (kind) => (event) => {
    const base = url("v1");
    const address = kind === "openai" ? base : `${base}/chat/completions`;
    copyText(snippets[kind](address, this.state.sent, hasKey()), event.currentTarget);
  };

  render({ name, compared, model, scalings, onEdit, onRetry, onContinue }, { messages, picked, rotary, sent }) {
    const running = this.running !== null;
    return html`<section class="column" aria-label=${name}>
      <div class="head">
        <${ScalingPicker} label=${compared ? `${name}: rotary scaling` : "Rotary scaling"} value=${picked} scalings=${scalings} onChange=${this.pick} />
        ${rotary && html`<p class="facts" title=${`fingerprint ${rotary.fingerprint}`}>Computed ${rotaryName(rotary)}</p>`}
      </div>
      <ol class="messages" ref=${this.list} onScroll=${this.scrolled} tabindex="0" aria-label="Messages" aria-live="polite"
        aria-busy=${String(running)}>
        ${!messages.length && html`<li class="empty">${compared ? html`<p>Questions are answered here under the scaling above.</p>` : welcome(model, scalings.policy !== "off")}</li>`}
        ${messages.map(
          (message, index) => html`<${Message} key=${index} message=${message} busy=${running} last=${index === messages.length - 1}
            onEdit=${(text) => onEdit(index, text)} onRetry=${onRetry} onContinue=${() => onContinue(this)} />`,
        )}
      </ol>
      ${sent && !running && html`<div class="tools as-code"><span>Copy the request as</span>
        ${["curl", "httpx", "openai"].map((kind) => html`<button type="button" class="quiet" onClick=${this.copy(kind)}>${kind}</button>`)}
      </div>`}
    </section>`;
  }
}

function rotaryName({ rope_type: kind, parameters }) {
  if (kind === "default") return "without scaling";
  return parameters?.factor ? `with ${kind}, factor ${parameters.factor}` : `with ${kind}`;
}

const welcome = ({ id, trained_len: trained }, scalable) => html`<h2>Chat with ${id}</h2>
  <p>Ask a question below. The model runs on this server, and conversations are stored in this browser only.</p>
  ${trained && scalable && html`<p>A rotary scaling lets the model read more than the ${trained.toLocaleString("en")} tokens of its
    training. <strong>Compare</strong> answers each question under two scalings, next to each other.</p>`}`;
