// One message of a chat: shown, copied, edited, asked again.
import { Component, html } from "./html.js";
import { copyText, Markdown } from "./markdown.js";

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Tokens, speed behind the first token, and what ended the answer.
function facts({ tokens, seconds, wait, ended, cached }) {
  const found = [];
  if (tokens !== undefined) found.push(plural(tokens, "token"));
  if (tokens > 1 && seconds > 0) found.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (wait !== undefined) found.push(`first after ${wait.toFixed(2)} s`);
  if (cached) found.push(`${cached} of the prompt's tokens from the cache`);
  if (ended === "length") found.push("cut at the longest answer");
  if (ended === "stopped") found.push("stopped");
  return found.join(" · ");
}

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

  render({ message, busy, last, onRetry }, { draft }) {
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
      ${waiting && html`<p class="waiting" aria-label="Waiting for the first token"><i></i><i></i><i></i></p>`}
      ${mine ? html`<p class="plain">${message.content}</p>` : html`<${Markdown} text=${message.content} />`}
      ${message.error && html`<p class="error" role="alert">${message.error}</p>`}
      ${!(busy && last) && html`<div class="tools">
        ${message.facts && html`<span class="facts">${facts(message.facts)}</span>`}
        ${message.content && html`<button type="button" class="quiet" onClick=${(event) => copyText(message.content, event.currentTarget)}>Copy</button>`}
        ${mine && !busy && html`<button type="button" class="quiet" onClick=${() => this.setState({ draft: message.content })}>Edit</button>`}
        ${!mine && last && html`<button type="button" class="quiet" onClick=${onRetry}>Retry</button>`}
      </div>`}
    </li>`;
  }
}
