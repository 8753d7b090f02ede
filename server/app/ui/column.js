// One conversation under one rotary scaling. It keeps its messages and runs its requests.
import { ApiError, hasKey, stream, url } from "./api.js";
import { Component, createRef, html } from "./html.js";
import { copyText } from "./markdown.js";
import { Message } from "./message.js";
import { fields, scaling } from "./settings.js";
import * as snippets from "./snippets.js";

export class Column extends Component {
  state = { messages: [], scaling: "", rotary: null, sent: null }; // sent: the request behind the last answer
  running = null; // the AbortController of the request that is under way
  list = createRef();
  follows = true;

  componentDidMount() {
    this.props.slot.current = this;
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

  // The request as it is sent, but for `stream` and `stream_options`.
  body(messages) {
    const { settings, model } = this.props;
    const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
    const said = messages.map(({ role, content }) => ({ role, content }));
    return { model, messages: [...system, ...said], ...fields(settings), ...scaling(this.state.scaling) };
  }

  // A question that got no answer at all is taken out: many templates want the turns to alternate.
  ask = (text) => {
    const { messages } = this.state;
    const kept = messages.length && !messages.at(-1).content ? messages.slice(0, -2) : messages;
    this.run([...kept, { role: "user", content: text }]);
  };

  stop = () => this.running?.abort();
  clear = () => this.setState({ messages: [], rotary: null, sent: null });

  edit = (index, content) => this.run([...this.state.messages.slice(0, index), { role: "user", content }]);
  retry = () => this.run(this.state.messages.slice(0, -1));

  async run(messages) {
    this.stop();
    const running = (this.running = new AbortController());
    const answer = { role: "assistant", content: "", thinking: "" };
    const show = (more = {}) => this.running === running && this.setState({ messages: [...messages, { ...answer }], ...more });
    this.follows = true;
    show({ rotary: null, sent: null });
    this.props.onBusy(this, true);
    const asked = performance.now();
    let first, last;
    const facts = {};
    try {
      const sent = this.body(messages);
      show({ sent });
      const body = { ...sent, stream_options: { include_usage: true } };
      for await (const chunk of stream("v1/chat/completions", body, running.signal)) {
        const choice = chunk.choices[0];
        const { content, reasoning_content: thinking } = choice?.delta ?? {};
        if (content || thinking) {
          last = performance.now();
          first ??= last;
          answer.content += content ?? "";
          answer.thinking += thinking ?? "";
        }
        if (choice?.finish_reason) facts.ended = choice.finish_reason;
        if (chunk.usage) {
          facts.tokens = chunk.usage.completion_tokens;
          facts.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
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
    // A newer request of this column has taken over where this one was aborted by it.
    if (this.running !== running) return;
    show();
    this.running = null;
    this.props.onBusy(this, false);
  }

  copy = (kind) => (event) => {
    const base = url("v1");
    const address = kind === "openai" ? base : `${base}/chat/completions`;
    copyText(snippets[kind](address, this.state.sent, hasKey()), event.currentTarget);
  };

  render({ name, compared }, { messages, rotary, sent }) {
    const running = this.running !== null;
    return html`<section class="column" aria-label=${name}>
      <div class="head">
        <label>${compared ? `${name}: rotary scaling` : "Rotary scaling"}
          <input type="text" spellcheck=${false} autocapitalize="off" autocomplete="off" placeholder="the server's own"
            value=${this.state.scaling} onInput=${(event) => this.setState({ scaling: event.currentTarget.value })} />
        </label>
        ${rotary && html`<span class="facts" title=${`fingerprint ${rotary.fingerprint}`}>ran under ${rotary.rope_type}</span>`}
      </div>
      <ol class="messages" ref=${this.list} onScroll=${this.scrolled} tabindex="0" aria-label="Messages" aria-live="polite"
        aria-busy=${String(running)}>
        ${messages.map(
          (message, index) => html`<${Message} key=${index} message=${message} busy=${running}
            last=${index === messages.length - 1} onEdit=${(text) => this.edit(index, text)} onRetry=${this.retry} />`,
        )}
      </ol>
      ${sent && !running && html`<div class="tools as-code"><span>Copy as</span>
        ${["curl", "httpx", "openai"].map((kind) => html`<button type="button" class="quiet" onClick=${this.copy(kind)}>${kind}</button>`)}
      </div>`}
    </section>`;
  }
}
