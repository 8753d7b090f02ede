// One message of a chat: shown, copied, edited, continued, generated again.
import { Component, html } from "./html.js";
import { copyText } from "./clipboard.js";
import { Markdown } from "./markdown.js";

const LONG = 600; // characters; a longer question can be scrolled

const SHORTEST = 0.05; // seconds of an answer whose speed is shown: shorter ones arrive at once

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Tokens, speed after the first token, and why the answer ended.
function facts({ facts: { tokens, seconds, wait, ended, cached, seed, used, context, before = 0 }, content, thinking, error }) {
  const found = [];
  if (!content && !error && ended === "stop") found.push(thinking ? "no answer: the model ended after its thinking" : "empty answer: the model ended at once");
  if (tokens !== undefined) found.push(plural(tokens, "token"));
  if (tokens - before > 1 && seconds > SHORTEST) found.push(`${((tokens - before - 1) / seconds).toFixed(1)} tokens/s`);
  if (wait !== undefined) found.push(`first after ${wait.toFixed(2)} s`);
  if (used <= context) found.push(`${whole(used)} of ${whole(context)} tokens of context used`);
  if (cached) found.push(`${whole(cached)} of them from the cache`);
  if (seed !== undefined) found.push(`seed ${seed}`);
  if (ended === "length") found.push(used === context ? "the context is full" : "cut at the longest answer");
  if (ended === "stopped") found.push("stopped");
  return found.join(" · ");
}

const whole = (value) => value.toLocaleString("en");
// Whether an answer was cut by something else than the end of the context.
const continuable = ({ ended, used, context } = {}) => ended === "stopped" || (ended === "length" && used !== context);

const visible = (text) => text.replaceAll("\n", "↵");
const difference = ({ number, token }) => (token ? `differs from token ${number}: “${visible(token)}”` : `ends before token ${number} of the other answer`);

const LONG_PROMPT = 1024; // tokens that are not cached: their progress is shown
const isLong = (reading) => reading && reading.total - reading.cache >= LONG_PROMPT;

export class Message extends Component {
  state = { draft: null };

  save = (event) => {
    event.preventDefault();
    const text = this.state.draft.trim();
    this.setState({ draft: null });
    if (text) this.props.onEdit(text);
  };

  keys = (event) => {
    if (event.key === "Escape") this.setState({ draft: null });
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.save(event);
  };

  render({ message, busy, last, onRetry, onContinue }, { draft }) {
    const mine = message.role === "user";
    if (draft !== null) {
      return html`<li class="message user"><form onSubmit=${this.save}>
        <textarea aria-label="Edit the message" rows="3" value=${draft} onKeyDown=${this.keys}
          ref=${(area) => area && !area.dataset.seen && ((area.dataset.seen = "yes"), area.focus())}
          onInput=${(event) => this.setState({ draft: event.currentTarget.value })}></textarea>
        <div class="tools"><button class="primary">Send again</button>
          <button type="button" onClick=${() => this.setState({ draft: null })}>Cancel</button></div>
      </form></li>`;
    }
    const waiting = !mine && busy && last && !message.content && !message.thinking;
    return html`<li class=${`message ${message.role}`}>
      <span class="who">${mine ? "You" : "Model"}</span>
      ${message.thinking && html`<details class="thinking"><summary>Thinking</summary><p>${message.thinking}</p></details>`}
      ${waiting && isLong(message.reading) && html`<p class="reading">Reading: ${message.reading.processed.toLocaleString("en")} of
        ${message.reading.total.toLocaleString("en")} tokens <progress aria-label="Prompt" max=${message.reading.total} value=${message.reading.processed}></progress></p>`}
      ${waiting && !isLong(message.reading) && html`<p class="waiting" aria-label="Waiting for the first token"><i></i><i></i><i></i></p>`}
      ${mine ? html`<p class="plain" tabindex=${message.content.length > LONG ? 0 : undefined}>${message.content}</p>` : html`<${Markdown} text=${message.content} mark=${message.differs} />`}
      ${message.error && html`<p class="error" role="alert">${message.error}</p>`}
      ${message.differs && html`<p class="facts">${difference(message.differs)}</p>`}
      ${!(busy && last) && html`<div class="tools">
        ${message.facts && html`<span class="facts">${facts(message)}</span>`}
        ${message.content && html`<button type="button" class="quiet" onClick=${(event) => copyText(message.content, event.currentTarget)}>Copy</button>`}
        ${mine && !busy && html`<button type="button" class="quiet edit" onClick=${() => this.setState({ draft: message.content })}>Edit</button>`}
        ${!mine && last && html`<button type="button" class="quiet" onClick=${onRetry}>Retry</button>`}
        ${!mine && last && message.content && continuable(message.facts) && html`<button type="button" class="quiet" onClick=${onContinue}>Continue</button>`}
      </div>`}
    </li>`;
  }
}
